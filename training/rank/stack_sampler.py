"""Samples of the main thread's stack: where a rank spends its time, without a profiler.

A thread looks at the main thread some fifty times a second, for some seconds, when the supervisor
asks for it. It adds the time since its last look to the stack that it sees. If it could not run for
longer, a call of C code held the GIL. The interpreter lets other threads run when such a call
returns, so the stack that is seen next is that of the call.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from ltui.training.shared.defaults import SAMPLE_S
from ltui.training.shared.regular_files import write_private_json

PERIOD_S = 0.02
"""Seconds between two samples."""
_HELD_S = 0.2
"""Seconds without a sample from which on it is checked whether the main thread held the GIL: it
used a processor, and this thread did not wait for one."""
_MAX_STACKS, _MAX_WRITTEN = 2000, 300
"""Different stacks that are counted, and those with the most time, which are written."""
_MAX_FRAMES = 64
_MAX_CHARS = 300
"""Innermost frames of a stack, and characters of a path or name."""
_EXIT_WAIT_S = 5.0
"""Maximum seconds for which the exit of the process waits for a thread of ltui."""

Frames = list[tuple[str, int, str]]
"""File, line and function of each frame, innermost first."""


class ExitLock:
    """A lock for a thread that uses frames of others, or torch. The exit takes it for ever.

    When Python ends, it ends a daemon thread where it next needs the GIL. Within C++ code of torch
    that aborts the process. A thread that holds frames of the main thread may get there: if these
    return meanwhile, it destroys their variables, such as a model.
    """

    def __init__(self) -> None:
        self._lock, self._pid = threading.Lock(), os.getpid()
        self.exits = False
        atexit.register(self._end)

    def acquire(self) -> bool:
        """Wait for the lock and take it. Return False if the process exits."""
        return not self.exits and self._lock.acquire(timeout=_EXIT_WAIT_S)

    def release(self) -> None:
        """Give the lock back."""
        self._lock.release()

    def _end(self) -> None:
        if os.getpid() == self._pid:  # the lock of a forked child may be held for ever
            self.exits = True
            self._lock.acquire(timeout=_EXIT_WAIT_S)


_look_lock = ExitLock()
"""Held during a look."""


class StackSampler:
    """Samples of one thread. ``run`` takes them."""

    def __init__(self, thread: int) -> None:
        """``thread`` is the ``ident`` of the thread, which must be alive."""
        self._thread = thread
        self._clock = time.pthread_getcpuclockid(thread)
        self.times: dict[tuple[tuple[str, int, str], ...], list[float]] = {}
        """Stack -> seconds, and the seconds of those in which no other thread ran Python."""
        self.other_s = 0.0
        """Seconds of stacks that are not counted, because there are too many."""
        self.seconds = 0.0
        """Seconds that were sampled."""

    def run(self, seconds: float) -> None:
        """Take samples for ``seconds``."""
        began_s = time.monotonic()
        last_s, last_cpu_s, last_delay_s = began_s, time.clock_gettime(self._clock), _delay_s()
        while last_s - began_s < seconds:
            time.sleep(PERIOD_S)
            now_s, cpu_s, delay_s = time.monotonic(), time.clock_gettime(self._clock), _delay_s()
            elapsed_s = now_s - last_s
            held = (
                elapsed_s > _HELD_S
                and delay_s - last_delay_s < elapsed_s / 2
                and cpu_s - last_cpu_s > elapsed_s / 10
            )
            if _look_lock.acquire():
                self._count(elapsed_s, elapsed_s if held else 0.0)
                _look_lock.release()
            last_s, last_cpu_s, last_delay_s = now_s, cpu_s, delay_s
        self.seconds = last_s - began_s

    def _count(self, elapsed_s: float, held_s: float) -> None:
        stack = tuple(frames_of(sys._current_frames().get(self._thread), _MAX_FRAMES))
        times = self.times.get(stack)
        if times is None and len(self.times) < _MAX_STACKS:
            times = self.times[stack] = [0.0, 0.0]
        if times is None:
            self.other_s += elapsed_s
        else:
            times[0] += elapsed_s
            times[1] += held_s

    def document(self) -> dict[str, Any]:
        """Return the samples as JSON values."""
        longest = sorted(self.times.items(), key=lambda item: -item[1][0])[:_MAX_WRITTEN]
        return {
            "seconds": self.seconds,
            "stacks": [
                {
                    "frames": [
                        {"file": f[-_MAX_CHARS:], "line": line, "function": name[:_MAX_CHARS]}
                        for f, line, name in stack
                    ],
                    "seconds": round(seconds, 4),
                    "held_s": round(held_s, 4),
                }
                for stack, (seconds, held_s) in longest
            ],
        }


def _delay_s() -> float:
    """Return the seconds for which this thread has waited for a processor; 0 if unknown."""
    try:
        with open("/proc/thread-self/schedstat", encoding="ascii") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def frames_of(frame: FrameType | None, most: int) -> Frames:
    """Return a frame and its callers, at most so many. No frame is kept, because that keeps its
    variables alive."""
    frames: Frames = []
    while frame is not None and len(frames) < most:
        code = frame.f_code
        frames.append((code.co_filename, frame.f_lineno or 0, code.co_name))
        frame = frame.f_back
    return frames


def sample(thread: int, folder: str | Path, request: int) -> None:
    """Sample a thread, and write the samples into the folder of the evidence. Never raises."""
    with contextlib.suppress(Exception):  # a failure here must not disturb training
        sampler = StackSampler(thread)
        sampler.run(SAMPLE_S)
        path = Path(folder, f"samples-{os.getpid()}.json")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private_json(path, {"request": request, **sampler.document()})
