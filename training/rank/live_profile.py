"""Profile some steps of a live rank on request (``ltui profile``).

Each chosen rank profiles the same steps by itself: nothing waits for other ranks except in the
collectives of the program. The profiler is started and stopped in the training thread, at the ends
of steps, and writes its trace there. Only the compression runs in a thread of its own, which calls
nothing of torch and for which the exit of the process waits a while.

The report of a rank has the times of its steps and of what happened within them that is no part of
a step. It is written last: without it there is no profile.
"""

from __future__ import annotations

import atexit
import contextlib
import gzip
import os
import shutil
import threading
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
    trace_path,
)
from ltui.training.shared.regular_files import write_private_json
from ltui.training.tensor_queue.control_block import ControlFile

MOST_TRACE_BYTES = 256 << 20
"""Size above which a trace is removed."""
MOST_MEMORY_BYTES = 2 << 30
"""Bytes by which the process may grow while it records. Then fewer steps are profiled."""
MOST_SECONDS = 120.0
"""Seconds after which no further step is profiled."""
_EXIT_WAIT_S = 20.0
"""Maximum seconds for which the exit of the process waits for the compression of a trace."""

clock = time.monotonic_ns


class LiveProfile:
    """The profiles of one rank. Call ``step_ended`` if ``word[0]`` differs from ``seen``."""

    __slots__ = (
        *("_anchor_ns", "_began_ns", "_channel", "_control", "_excluded", "_on_device"),
        *("_peak", "_profiler", "_request", "_restore", "_rss", "_started_ns", "_steps"),
        *("seen", "word"),
    )

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
            used = torch.cuda.max_memory_allocated() if self._on_device else resident_bytes()
            self._peak = max(self._peak, used)
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
        """Stop the profiler, write its trace, and have it compressed and reported."""
        profiler, self._profiler = self._profiler, None
        assert profiler is not None
        self._began_ns = 0
        self._end()
        profiler.stop_trace()
        self._channel.pulse.beat()
        folder = self._folder(request)
        raw = trace_path(folder, self._channel.rank).with_suffix(".part")
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(raw.unlink, missing_ok=True)
            raw.touch(0o600)
            profiler.export_chrome_trace(str(raw))
            self._channel.pulse.beat()
            if raw.stat().st_size > MOST_TRACE_BYTES:
                size = f"{raw.stat().st_size >> 20} MB, more than {MOST_TRACE_BYTES >> 20} MB"
                raise ValueError(f"the trace has {size}. Take fewer steps")
            on_failure.pop_all()
        report = {
            "rank": self._channel.rank,
            "anchor_ns": self._anchor_ns,
            "steps": self._steps,
            "excluded": self._excluded,
            "on_device": self._on_device,
            "peak_bytes": self._peak,
            "threads": torch.get_num_threads(),
        }
        compression = threading.Thread(
            target=_compress,
            args=(raw, trace_path(folder, self._channel.rank), report),
            name="ltui-profile",
            daemon=True,
        )
        compression.start()
        atexit.register(compression.join, _EXIT_WAIT_S)
        self._request, self.seen = None, request.number

    def _give_way(self) -> None:
        """End this profile, because the program starts a profiler of its own."""
        if self._profiler is not None:
            self._fail("the program started a profiler of its own")

    def _fail(self, reason: str) -> None:
        """End this profile with the reason for which there is none."""
        profiler, self._profiler = self._profiler, None
        started, self._began_ns = self._began_ns, 0
        self._end()
        if profiler is not None:
            with contextlib.suppress(Exception):
                if not started:
                    profiler.start_trace()
                profiler.stop_trace()
        request, self._request = self._request, None
        self.seen = self.word[0] if request is None else request.number
        if request is not None:
            with contextlib.suppress(OSError):
                path = report_path(self._folder(request), self._channel.rank)
                write_private_json(path, {"rank": self._channel.rank, "error": reason[:400]})

    def _end(self) -> None:
        restore, self._restore = self._restore, None
        if restore is not None:
            restore()

    def _folder(self, request: ProfileRequest) -> Path:
        return self._channel.environment.run_dir / FOLDER / str(request.number)


def _compress(raw: Path, trace: Path, report: dict[str, Any]) -> None:
    """Compress a trace, then write the report."""
    part = trace.with_suffix(".part.gz")
    try:
        part.touch(0o600)
        with open(raw, "rb") as source, gzip.open(part, "wb", compresslevel=5) as target:
            shutil.copyfileobj(source, target, 1 << 20)
        part.replace(trace)
    except OSError as error:
        report = {"rank": report["rank"], "error": f"its trace could not be written: {error}"}
        part.unlink(missing_ok=True)
    finally:
        raw.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        write_private_json(report_path(trace.parent, int(report["rank"])), report)


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


def resident_bytes() -> int:
    """Return the bytes of memory that this process occupies."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
