"""Frames of past moments of a run: from its record of snapshots, its history and its logs.

What was not recorded is shown as unknown, never as it is now. Nothing here has a clock or a thread.
"""

from __future__ import annotations

from itertools import count

from msgspec.structs import replace

from ltui.app.live.curve_arithmetic import LatestCurveRequest
from ltui.app.live.frame import NOT_RECORDED, Frame, ShownMoment
from ltui.app.live.log_tail import LogTail
from ltui.app.live.run_poller import RunPoller
from ltui.training.problem import ProblemError
from ltui.training.state.asked_moment import AskedMoment
from ltui.training.state.run_snapshot import LIVE, RunSnapshot, RunState
from ltui.training.store.history_reader import RunStore
from ltui.training.store.labels_file import with_given_name
from ltui.training.store.past.history import PastStore, time_of_step
from ltui.training.store.past.reader import PastMoment, PastReader
from ltui.training.store.past.snapshots import past_folder
from ltui.training.store.run_directory import RunDir
from ltui.widgets import formats

FORWARD_S = 60.0
"""Seconds from one moment to a later one up to which what was read is continued."""
AFTER_STEP_S = 10.0
"""Seconds after a step in which the first snapshot shows the step."""
_LOG_READS = 8
"""Maximum number of parts of each log that are read for one moment."""
_VERSIONS = 1 << 32
"""Distance of the versions of curves of two pollers."""


class PastPoller(RunPoller):
    """Collects what the dashboard showed of a run, from one moment on to later ones."""

    def __init__(self, run_dir: RunDir, requests: LatestCurveRequest, series: int) -> None:
        super().__init__(run_dir, requests)
        self.at = 0.0
        self.moment: PastMoment | None = None
        self._series = series
        self._logged_until = 0.0
        self._present: Frame | None = None
        self._supervisor_answers = True

    def frame_of(self, at: float, moment: PastMoment | None, present: Frame) -> Frame:
        """Return the frame of a moment, not before the last one. ``moment``: its record, None if
        there is none. Raise ``RunGoneError`` for a deleted run."""
        self.at, self.moment, self._present = at, moment, present
        # What happened since the last moment is read at once.
        self._events_at = 0.0
        if moment is None or moment.snapshot.state not in LIVE:
            return self.poll(at, 0)
        return self.poll(moment.at, 0)

    def _refresh_snapshot(self, now: float) -> None:
        assert self._present is not None
        if self.moment is None:
            self._snapshot = _unknown(self._present.snapshot)
            return
        self._snapshot_at = self.moment.at
        self._snapshot = with_given_name(self.run_dir, self.moment.snapshot)
        self._gpu_history.add(self._snapshot.gpus)
        self._track_verdicts(self._snapshot, now)

    def _open_store(self) -> RunStore:
        if self.moment is None:
            return PastStore(self.run_dir, self.at, None)
        snapshot = self.moment.snapshot
        # After its end, a run had what it has; before, what it had at the time of the snapshot.
        at = self.moment.at if snapshot.state in LIVE else self.at
        return PastStore(self.run_dir, at, (snapshot.attempt, snapshot.global_step or 0))

    def _read_time(self, now: float, live: bool) -> None:
        """Read nothing: where the time went is known for the present only."""

    def _poll_log(self, log: LogTail, now: float) -> None:  # noqa: ARG002 - as the method above
        sizes = () if self.moment is None else self.moment.log_sizes
        sizes = tuple(pair for pair in sizes if pair[0] > self._logged_until)
        for at, size in sizes:
            self._logged_until = at
            log.poll(at, size)
        for _ in range(_LOG_READS if sizes else 0):
            if not log.poll(*sizes[-1]):
                break

    def _frame(self, snapshot: RunSnapshot, now: float) -> Frame:
        frame, present = super()._frame(snapshot, now), self._present
        assert present is not None
        ended_at = present.snapshot.ended_at if present.snapshot.state not in LIVE else None
        same_attempt = snapshot.attempt == present.snapshot.attempt
        return replace(
            frame,
            spec=frame.spec if same_attempt and self.moment is not None else None,
            code=tuple(code for code in frame.code if code.attempt <= snapshot.attempt),
            # These files are compared with the present ones.
            code_changes=(),
            # A version that no frame of the present has, nor one of another poller.
            curves_version=-self._series * _VERSIONS - frame.curves_version,
            moment=ShownMoment(
                at=self.at,
                newest=ended_at or present.now,
                has_ended=ended_at is not None,
                series=self._series,
            ),
        )


def _unknown(present: RunSnapshot) -> RunSnapshot:
    """Return a snapshot of a moment of which only the names in the specification are known."""
    return RunSnapshot(
        id=present.id,
        name=present.name,
        preset=present.preset,
        command=present.command,
        program=present.program,
        created_at=present.created_at,
        state=RunState.QUEUED,
        saves_checkpoints=None,
        gpu_note=NOT_RECORDED,
    )


class PastFrames:
    """Makes the frames of past moments of one run. To be used by one thread at a time."""

    def __init__(self, run_dir: RunDir, requests: LatestCurveRequest) -> None:
        self._run_dir, self._requests = run_dir, requests
        self._reader = PastReader(past_folder(run_dir))
        self._poller: PastPoller | None = None
        self._series = count(1)

    def frame(self, at: float, present: Frame, *, playing: bool = False) -> Frame:
        """Return the frame of a moment in unix seconds. ``present``: the newest frame of the run.

        ``playing``: a time in which nothing was recorded, or the run had ended, is passed over.
        """
        self._reader.refresh()
        moment = self._reader.at(at)
        if playing and (moment is None or moment.snapshot.state not in LIVE):
            following = self._reader.following(at)
            if following is not None:
                at, moment = following, self._reader.at(following)
        poller = self._poller
        if (
            poller is None
            or not 0 <= at - poller.at < FORWARD_S
            or (poller.moment is None) != (moment is None)
        ):
            self._poller = poller = PastPoller(self._run_dir, self._requests, next(self._series))
        frame = poller.frame_of(at, moment, present)
        assert frame.moment is not None
        notes = [note for note in (frame.error, self._reader.damage) if note]
        shown = replace(frame.moment, gap=self._gap(at, present) if moment is None else None)
        return replace(frame, moment=shown, error="; ".join(notes) or None)

    def time_of(self, asked: AskedMoment, present: Frame) -> float:
        """Return a moment in unix seconds. Raise ``ProblemError`` if a step is not stored."""
        if asked.at is not None:
            return asked.at
        if asked.step is None:
            self._reader.refresh()
            bounds = self._reader.bounds()
            return (present.snapshot.created_at or 0.0) if bounds is None else bounds[0]
        with RunStore(self._run_dir) as store:
            at = time_of_step(store, asked.step)
        if at is None:
            newest = present.snapshot.global_step
            what = "its time is not stored."
            if newest is None or asked.step > newest:
                what = f"the run has not trained it. Its newest step is {newest or 0}."
            raise ProblemError.of(where=f"step {asked.step}", what=what)
        self._reader.refresh()
        following = self._reader.following(at)
        return at if following is None or following - at > AFTER_STEP_S else following

    def _gap(self, at: float, present: Frame) -> str:
        """Return a sentence about a moment at which nothing was recorded."""
        created = present.snapshot.created_at
        if created is not None and at < created:
            return f"the run did not exist at {formats.time_of_day(at, present.now)}"
        nearest = self._reader.nearest(at)
        said = f"nothing was recorded at {formats.time_of_day(at, present.now)}"
        if nearest is None:
            return f"{said}; the run has no record of past snapshots"
        return f"{said}; nearest {formats.time_of_day(nearest, at)}"
