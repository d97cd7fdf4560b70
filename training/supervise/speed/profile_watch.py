"""Profiles on request: choose ranks and steps, wait for the ranks' traces, store the summary.

The supervisor reads no trace itself. A process with a limit of memory and time does
(``summarise_profile.py``), so that a damaged or huge trace harms nothing.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from msgspec.structs import replace

from ltui.training.diagnosis.profile_summary import (
    Profile,
    ProfileState,
    change_text,
    explain,
    find_difference,
)
from ltui.training.diagnosis.trace_times import RankProfile, RankReport
from ltui.training.json_codec import from_json, parse_json
from ltui.training.process.python_environment import module_command
from ltui.training.shared.profile_request import (
    DEFAULT_RANKS,
    DEFAULT_STEPS,
    MOST_STEPS,
    ProfileRequest,
    read_request,
    report_path,
    write_request,
)
from ltui.training.shared.record_types import PulseState
from ltui.training.shared.regular_files import read_regular
from ltui.training.state.record_fold import FoldState
from ltui.training.state.run_snapshot import Event, RunState
from ltui.training.state.snapshot_from_fold import median_step_s
from ltui.training.store.profile_files import (
    last_number,
    profile_folder,
    read_profile,
    write_profile,
)
from ltui.training.store.run_directory import RunDir, open_private_log
from ltui.training.supervise.speed.summarise_profile import SUMMARY_NAME
from ltui.training.tensor_queue.control_block import ControlFile

MOST_RANKS = 8
"""Number of ranks that can be profiled at once."""
LEAD_S = 1.5
"""Seconds from a request to the first step, in which all ranks read it."""
KEPT = 10
"""Number of profiles of a run whose files are kept."""
LATE_S = 60.0
"""Seconds after the last step within which a rank must have written its trace."""
STUCK_STEPS = 10
"""Times of a step, if that is longer, after which a rank that does nothing ends a profile."""
SUMMARY_S = 180.0
"""Seconds for the summary."""
BETWEEN_S = 30.0
"""Seconds between two profiles of a device: CUPTI has to be closed in between."""
AFTER_STEPS, AFTER_S = 8, 20.0
"""Steps after a profile from which the step time is taken, and the most seconds to wait for them.
"""
_CLOSE_S = 20.0
_REPORT_BYTES = 1 << 20


def choose_ranks(wanted: str, order: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks that ``wanted`` names: numbers, ``slowest`` and ``median`` of ``order``.

    Raises ``ValueError``.
    """
    chosen = list[int]()
    for word in (part.strip() for part in wanted.split(",")):
        if word in ("slowest", "median"):
            rank = order[0] if word == "slowest" else order[len(order) // 2]
        elif word.isascii() and word.isdigit() and len(word) < 8 and int(word) in order:
            rank = int(word)
        else:
            raise ValueError(
                f"there is no rank {word[:20]!r}: use slowest, median or 0 to {max(order)}."
            )
        if rank not in chosen:
            chosen.append(rank)
    if len(chosen) > MOST_RANKS:
        raise ValueError(f"at most {MOST_RANKS} ranks can be profiled at once.")
    return tuple(chosen)


class ProfileWatch:
    """The profiles of one attempt. Used by the supervisor's loop."""

    def __init__(self, run_dir: RunDir, attempt: int) -> None:
        self._run_dir, self._attempt = run_dir, attempt
        self._profile = read_profile(run_dir)
        self._request = read_request(run_dir.queue_dir(attempt))
        self._summary: subprocess.Popen[bytes] | None = None
        self._profiles: tuple[RankProfile, ...] | None = None
        """Summaries of the ranks, once they are there."""
        self._due_s = 0.0
        """Monotonic time at which what is waited for is overdue; 0 if nothing is."""
        self._over_s = -math.inf
        """Monotonic time at which the last profile was over."""
        self._restarts: dict[int, int] = {}
        if (last := self.active) is not None and last.attempt != attempt:
            self._end(f"attempt {last.attempt} ended before it was complete")
        elif last is not None and not self._ranks_know(last.number):
            self._end("the supervisor was killed before the ranks had the request")

    def _ranks_know(self, number: int) -> bool:
        try:
            control = ControlFile.open(self._run_dir.queue_dir(self._attempt) / "control.bin")
        except (OSError, ValueError):
            return False
        known = control.profile_word[0] == number
        control.close()
        return known

    @property
    def active(self) -> Profile | None:
        """The profile that is being made."""
        return None if self._profile is None or self._profile.is_over else self._profile

    @property
    def unmeasured(self) -> tuple[int, int] | None:
        """The first and the last step whose times the last profile has changed."""
        request = self._request
        return None if request is None else (request.first - 1, request.last + 1)

    def leave_out(self, fold: FoldState) -> FoldState:
        """Return the fold, which will not measure these steps."""
        return replace(fold, unmeasured=self.unmeasured)

    def start(
        self, wish: Mapping[str, Any], fold: FoldState, order: Sequence[int],
        *, furthest: int, max_steps: int | None,
    ) -> Profile:  # fmt: skip
        """Begin a profile and return it. Raises ``ValueError`` with the reason if it cannot.

        ``order``: all ranks, the slowest first.
        """
        if self.active is not None:
            raise ValueError(f"profile {self.active.number} is running. Wait until it is over.")
        steps, wanted = wish.get("steps", DEFAULT_STEPS), wish.get("ranks", DEFAULT_RANKS)
        if not isinstance(steps, int) or isinstance(steps, bool) or not 1 <= steps <= MOST_STEPS:
            raise ValueError(f"the number of steps must be from 1 to {MOST_STEPS}.")
        known = [rank for rank in order if fold.ranks[rank].totals is not None]
        if not known:
            raise ValueError("the ranks have not made a step yet.")
        ranks = choose_ranks(str(wanted), known)
        hellos = [fold.ranks[rank].hello or {} for rank in ranks]
        on_device = any(str(hello.get("device", "")).startswith("cuda") for hello in hellos)
        if on_device and time.monotonic() - self._over_s < BETWEEN_S:
            raise ValueError(f"the last profile has just ended. Wait {BETWEEN_S:.0f} s.")
        step_s = _step_s(fold) or LEAD_S
        # A rank reads the request at the end of the step before the first one at the latest.
        first = furthest + 2 + math.ceil(LEAD_S / max(step_s, 1e-4))
        if max_steps is not None and first + steps > max_steps:
            raise ValueError(f"the run ends at step {max_steps}, too early for {steps} steps.")
        number = last_number(self._run_dir) + 1
        request = ProfileRequest(
            number=number, ranks=ranks, first=first, steps=steps, memory=bool(wish.get("memory"))
        )
        folder = profile_folder(self._run_dir, number)
        profile = Profile(
            number=number,
            attempt=self._attempt,
            state=ProfileState.WAITING,
            ranks=ranks,
            first=first + 1,
            last=request.last,
            memory=request.memory,
            requested_at=time.time(),
            request_id=str(wish.get("request_id", ""))[:64],
            rank_count=len(order),
            step_s_before=_step_s(fold),
            folder=str(folder),
        )
        try:
            folder.parent.mkdir(mode=0o700, exist_ok=True)
            folder.mkdir(mode=0o700)
            write_profile(self._run_dir, profile)
            queue_dir = self._run_dir.queue_dir(self._attempt)
            write_request(queue_dir, request)
            control = ControlFile.open(queue_dir / "control.bin")
            control.profile_word[0] = number
            control.close()
        except OSError as error:
            raise ValueError(f"its files cannot be written ({error.strerror or error}).") from None
        self._profile, self._request, self._profiles = profile, request, None
        self._restarts, self._due_s = {}, 0.0
        self._remove_old(number)
        return profile

    def _remove_old(self, number: int) -> None:
        for old in range(max(1, number - 2 * KEPT), number - KEPT + 1):
            shutil.rmtree(profile_folder(self._run_dir, old), ignore_errors=True)

    # -- while it is made ----------------------------------------------------------------------

    def update(
        self, state: RunState, pulses: Mapping[int, PulseState | None], fold: FoldState
    ) -> list[Event]:
        """Go on with the profile that is made. Return an event if it is over."""
        profile, now_s = self.active, time.monotonic()
        if profile is None:
            return []
        if self._profiles is not None:
            after_s = _steps_after(fold, profile.last + 1)
            is_late = now_s >= self._due_s or state is not RunState.RUNNING
            return [self._complete(after_s)] if after_s is not None or is_late else []
        if self._summary is not None:
            return self._await_summary(self._summary, now_s)
        reason = self._read_reports(profile)
        if reason is None and self._summary is None:
            reason = self._find_failure(profile, pulses, now_s)
            if reason is None and state is RunState.RUNNING:
                reason = _find_stuck(profile, pulses, now_s)
        return [] if reason is None else [self._end(reason)]

    def _read_reports(self, profile: Profile) -> str | None:
        """Begin the summary if all ranks have reported. Return why a rank has no trace."""
        folder, reported = profile_folder(self._run_dir, profile.number), 0
        for rank in profile.ranks:
            with contextlib.suppress(FileNotFoundError):
                try:
                    data = read_regular(report_path(folder, rank), _REPORT_BYTES)
                    report = from_json(RankReport, parse_json(data))
                except ValueError as error:
                    return f"the report of rank {rank} cannot be read ({error})"
                if report.error is not None:
                    return f"rank {rank}: {report.error}"
                reported += 1
        if reported < len(profile.ranks):
            return None
        return self._summarise(profile)

    def _summarise(self, profile: Profile) -> str | None:
        folder = profile_folder(self._run_dir, profile.number)
        program = module_command("ltui.training.supervise.speed.summarise_profile", str(folder))
        try:
            with open_private_log(folder / "summary.log") as log:
                self._summary = subprocess.Popen(
                    program, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder
                )
            self._save(replace(profile, state=ProfileState.SUMMARISING))
        except OSError as error:
            return f"its summary cannot be made ({error.strerror or error})"
        self._due_s = time.monotonic() + SUMMARY_S
        return None

    def _await_summary(self, process: subprocess.Popen[bytes], now_s: float) -> list[Event]:
        """Take the summary if it is there."""
        if process.poll() is None:
            if now_s < self._due_s:
                return []
            process.kill()
            process.wait()
            self._summary = None
            return [self._end(f"the traces were not read within {SUMMARY_S:.0f} s")]
        self._summary, profile = None, self.active
        assert profile is not None
        path = profile_folder(self._run_dir, profile.number) / SUMMARY_NAME
        try:
            document = parse_json(read_regular(path, _REPORT_BYTES))
            if (reason := document.get("error")) is not None:
                return [self._end(str(reason)[:400])]
            self._profiles = from_json(tuple[RankProfile, ...], document["profiles"])
        except (OSError, ValueError, AttributeError, LookupError):
            return [self._end(f"the traces could not be read (exit code {process.returncode})")]
        self._due_s = now_s + AFTER_S
        return []

    def _find_failure(
        self, profile: Profile, pulses: Mapping[int, PulseState | None], now_s: float
    ) -> str | None:
        """Return why a chosen rank will not report; None while it may."""
        past = 0
        for rank in profile.ranks:
            pulse = pulses.get(rank)
            if pulse is None:
                continue
            if self._restarts.setdefault(rank, pulse.restarts) != pulse.restarts:
                return f"rank {rank} was started again"
            past += pulse.global_step > profile.last + 1
        if past < len(profile.ranks):
            self._due_s = 0.0
        elif not self._due_s:
            self._due_s = now_s + LATE_S
        elif now_s >= self._due_s:
            return f"not all of the ranks wrote a trace within {LATE_S:.0f} s after the steps"
        return None

    # -- the end -------------------------------------------------------------------------------

    def _complete(self, after_s: float | None) -> Event:
        profile, profiles = self.active, self._profiles or ()
        assert profile is not None
        sentence, remedy = explain(profiles, profile.rank_count)
        done = replace(
            profile,
            state=ProfileState.DONE,
            profiles=profiles,
            difference=find_difference(profiles),
            sentence=sentence,
            remedy=remedy,
            step_s_after=after_s,
        )
        self._save(done)
        self._over_s = time.monotonic()
        text = f"Profile {done.number}: {sentence}"
        if (change := change_text(done)) is not None and "slower" in change:
            text += f" The {change}."
        return Event(time.time(), "profile", text, {"number": done.number, "step": done.last})

    def _end(self, reason: str) -> Event:
        """End the profile without a result."""
        profile = self._profile
        assert profile is not None
        self._save(replace(profile, state=ProfileState.FAILED, reason=reason))
        self._over_s = time.monotonic()
        text = f"Profile {profile.number} failed: {reason}."
        return Event(time.time(), "profile", text, {"number": profile.number})

    def _save(self, profile: Profile) -> None:
        self._profile = profile
        with contextlib.suppress(OSError):  # the disk is full; the result is in the event
            write_profile(self._run_dir, profile)

    def close(self) -> None:
        """End what is left, because the attempt has ended."""
        profile = self.active
        if profile is None:
            return
        if profile.state is ProfileState.WAITING:
            self._read_reports(profile)
        if self._summary is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._summary.wait(_CLOSE_S)
            self._await_summary(self._summary, math.inf)
        if self._profiles is not None:
            self._complete(None)
        elif self.active is not None:
            self._end("the attempt ended before it was complete")


def _step_s(fold: FoldState) -> float | None:
    """Return the median time of a step on the slowest rank."""
    medians = (median_step_s(rank) for rank in fold.ranks.values())
    return max((each for each in medians if each is not None), default=None)


def _find_stuck(
    profile: Profile, pulses: Mapping[int, PulseState | None], now_s: float
) -> str | None:
    """Return which chosen ranks do nothing before their steps are over; None if all do."""
    stuck = []
    for rank in profile.ranks:
        if (pulse := pulses.get(rank)) is not None and pulse.global_step <= profile.last + 1:
            # In the steps, a rank may also write its trace.
            limit_s = LATE_S if pulse.global_step < profile.first - 1 else SUMMARY_S
            limit_s = max(limit_s, STUCK_STEPS * (profile.step_s_before or 0.0))
            if now_s - pulse.changed_ns / 1e9 > limit_s:
                stuck.append(str(rank))
    if not stuck:
        return None
    ranks = f"rank{'s'[: len(stuck) - 1]} {', '.join(stuck)}"
    return f"{ranks} made no progress for more than {LATE_S:.0f} s. `ltui diagnose` may say why"


def _steps_after(fold: FoldState, step: int) -> float | None:
    """Return the median time of the steps after ``step``; None until there are enough."""
    times = list[float]()
    for rank in fold.ranks.values():
        count = (rank.global_step or 0) - step
        if count < AFTER_STEPS:
            return None
        times.append(median(rank.recent_step_s[-count:]))
    return max(times, default=None)


def announce(profile: Profile) -> Event:
    """Return the event with which a profile begins."""
    ranks = ", ".join(map(str, profile.ranks))
    text = (
        f"Profiling steps {profile.first} to {profile.last} on rank{'s'[: len(profile.ranks) - 1]}"
        f" {ranks}. They are slower, and the other ranks wait for them: these steps do not count"
        " for throughput, step times and stragglers."
    )
    fields = {"number": profile.number, "step": profile.first, "last": profile.last}
    return Event(time.time(), "profile", text, fields)
