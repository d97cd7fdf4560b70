"""Profile some steps of a live rank on request (``ltui profile``).

Each chosen rank profiles the same steps by itself: nothing waits for other ranks except in the
collectives of the program. The profiler is started and stopped in the training thread, at the ends
of steps, and writes its trace there. The process that reads the trace compresses it.

The report of a rank has the times of its steps and of what happened within them that is no part of
a step. It is written last: without it there is no profile.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ltui.training.rank import torch_internals
from ltui.training.rank.channel import Channel, current_channel
from ltui.training.shared.profile_request import (
    ANCHOR,
    FOLDER,
    ProfileRequest,
    read_request,
    report_path,
    written_trace_path,
)
from ltui.training.shared.regular_files import write_private_json
from ltui.training.tensor_queue.control_block import ControlFile

MOST_TRACE_BYTES = 256 << 20
"""Size above which a trace is removed."""
MOST_MEMORY_BYTES = 2 << 30
"""Bytes by which the process may grow while it records. Then fewer steps are profiled."""
MOST_SECONDS = 120.0
"""Seconds after which no further step is profiled."""

clock = time.monotonic_ns


class LiveProfile:
    """The profiles of one rank. Call ``step_ended`` if ``word[0]`` differs from ``seen``."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._control = ControlFile.open(channel.environment.queue_dir / "control.bin")
        self.word = self._control.profile_word
        self.seen = self.word[0]
        """The last request that this rank has answered. Earlier ones are not for this process."""
        self._request: ProfileRequest | None = None
        self._profiler: torch.profiler.profile | None = None
        self._restore: Callable[[], None] | None = None
        self._on_device = False
        self._started_ns = self._began_ns = self._anchor_ns = self._rss = self._peak = 0
        self._steps: list[tuple[int, int, int]] = []
        self._excluded: list[tuple[int, int]] = []

    def exclude(self, began_ns: int, ended_ns: int) -> None:
        """Count what lies between two times as no part of a step: a validation, a save, a wait."""
        if self._began_ns and ended_ns > began_ns:
            self._excluded.append((began_ns, ended_ns))

    def exclude_boundary(self) -> None:
        """Exclude the time since the end of the last step, in which the ranks acted together."""
        self.exclude(self._began_ns, clock())

    def step_ended(self, step: int) -> bool:
        """Pass the end of ``step``. Return True if that took time which is no part of a step."""
        try:
            return self._advance(step)
        except Exception as error:  # noqa: BLE001  (a profile must not disturb training)
            self._fail(f"{type(error).__name__}: {error}")
            return True

    def _advance(self, step: int) -> bool:
        now = clock()
        request = self._request
        if request is None:
            request = read_request(self._channel.environment.queue_dir)
            # The word is written after the file, so the file is this request or a later one.
            if request is None or self._channel.rank not in request.ranks:
                self.seen = self.word[0]
                return False
            self._request = request
        if self._profiler is None:
            if step < request.first - 1:
                return False
            self._prepare(request, step)
        elif not self._began_ns:
            self._start()
        else:
            self._steps.append((step, self._began_ns, now))
            self._peak = max(self._peak, used_bytes(on_device=self._on_device))
            grown = resident_bytes() - self._rss > MOST_MEMORY_BYTES
            if step < request.last and not grown and now - self._started_ns < MOST_SECONDS * 1e9:
                self._began_ns = clock()
                return False
            self._finish(request)
        return True

    def _prepare(self, request: ProfileRequest, step: int) -> None:
        """Get the profiler ready in the step before those that are measured."""
        if step > request.first - 1:
            self._fail(f"step {step} was over before the request arrived. Ask again")
        elif torch_internals.is_profiling():
            self._fail("the program profiles itself")
        else:
            self._steps, self._excluded, self._peak = [], [], 0
            self._profiler, self._on_device = create_profiler(memory=request.memory)
            self._profiler.prepare_trace()
            self._restore = torch_internals.call_before_profilers(self._give_way)

    def _start(self) -> None:
        assert self._profiler is not None
        if self._on_device:
            torch.cuda.reset_peak_memory_stats()
        self._rss, self._started_ns = resident_bytes(), clock()
        self._profiler.start_trace()
        for _ in range(2):  # the first mark also pays for what is imported and allocated once
            self._anchor_ns = clock()
            with torch.profiler.record_function(ANCHOR):
                pass
        self._began_ns = clock()

    def _finish(self, request: ProfileRequest) -> None:
        """Stop the profiler, write its trace, and report it."""
        profiler = self._end()
        assert profiler is not None
        profiler.stop_trace()
        self._channel.pulse.beat()
        trace = written_trace_path(self._folder(request), self._channel.rank)
        try:
            profiler.export_chrome_trace(str(trace))
            trace.chmod(0o600)  # torch replaces a file that exists
            self._channel.pulse.beat()
            if (size := trace.stat().st_size) > MOST_TRACE_BYTES:
                limit = f"{size >> 20} MB, more than {MOST_TRACE_BYTES >> 20} MB"
                raise ValueError(f"the trace has {limit}. Take fewer steps")
            self._report(
                request,
                anchor_ns=self._anchor_ns,
                steps=self._steps,
                excluded=self._excluded,
                on_device=self._on_device,
                peak_bytes=self._peak,
                threads=torch.get_num_threads(),
            )
        except BaseException:
            trace.unlink(missing_ok=True)
            raise
        self._request, self.seen = None, request.number

    def _give_way(self) -> None:
        """End this profile, because the program starts a profiler of its own."""
        if self._profiler is not None:
            self._fail("the program started a profiler of its own")

    def _fail(self, reason: str) -> None:
        """End this profile with the reason for which there is none."""
        is_started, profiler = self._began_ns > 0, self._end()
        if profiler is not None:
            with contextlib.suppress(Exception):
                if not is_started:
                    profiler.start_trace()
                profiler.stop_trace()
        request, self._request = self._request, None
        self.seen = self.word[0] if request is None else request.number
        if request is not None:
            with contextlib.suppress(OSError):
                self._report(request, error=reason[:400])

    def _end(self) -> torch.profiler.profile | None:
        """Measure no further step. Return the profiler, which may still be on."""
        if self._restore is not None:
            self._restore()
        profiler, self._profiler, self._restore = self._profiler, None, None
        self._began_ns = 0
        return profiler

    def _report(self, request: ProfileRequest, **report: Any) -> None:
        path = report_path(self._folder(request), self._channel.rank)
        write_private_json(path, {"rank": self._channel.rank, **report})

    def _folder(self, request: ProfileRequest) -> Path:
        return self._channel.environment.run_dir / FOLDER / str(request.number)


_current: LiveProfile | None = None


def live_profile(channel: Channel) -> LiveProfile | None:
    """Return the profiles of this process; None if the control block cannot be opened."""
    global _current
    if _current is None or _current._channel is not channel:
        _current = None
        with contextlib.suppress(OSError, ValueError):
            _current = LiveProfile(channel)
    return _current


def exclude_from_profile(began_ns: int, ended_ns: int) -> None:
    """Count what lies between two times as no part of a profiled step, if one is profiled."""
    if _current is not None and _current._channel is current_channel():
        _current.exclude(began_ns, ended_ns)


def create_profiler(*, memory: bool) -> tuple[torch.profiler.profile, bool]:
    """Return a profiler, and whether it profiles a device of CUDA too."""
    # Else its library writes lines into the output of the program.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    kinds = [torch.profiler.ProfilerActivity.CPU]
    on_device = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if on_device:
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(activities=kinds, profile_memory=memory), on_device


def used_bytes(*, on_device: bool) -> int:
    """Return the most bytes that tensors on the device had, or those that this process has now."""
    return torch.cuda.max_memory_allocated() if on_device else resident_bytes()


def resident_bytes() -> int:
    """Return the bytes of memory that this process occupies."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
