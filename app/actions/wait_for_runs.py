"""Sleep until runs end or meet a condition, and read what happened in a run.

Both are for programs that start runs: one process that sleeps instead of many commands that ask.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

from msgspec import Struct
from msgspec.structs import replace

from ltui.app.actions.check_arguments import check, texts
from ltui.app.command_output import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED
from ltui.app.presentation.snapshot_text import shown_epoch
from ltui.app.state_words import FAILED, ended_sentence, is_blocked, open_verdicts, verdict_line
from ltui.training.lifecycle.run_status import current_snapshot
from ltui.training.problem import ProblemError
from ltui.training.state.good_checkpoints import is_resumable, nan_since
from ltui.training.state.run_queue import NEVER
from ltui.training.state.run_snapshot import LIVE, RunSnapshot, RunState, Verdict
from ltui.training.state.stop_conditions import (
    StopCondition,
    is_met,
    parse_metric_condition,
    unlogged_metrics,
)
from ltui.training.state.verdicts import most_severe_first
from ltui.training.store.database_schema import NoHistoryError
from ltui.training.store.find_run import find_run, find_runs
from ltui.training.store.history_reader import RunStore, StoredEvent
from ltui.training.store.run_directory import RunDir, ltui_home
from ltui.widgets.formats import duration
from ltui.widgets.sanitise import clean_line

POLL_INTERVAL_S = 1.0
"""Seconds between two looks at a run."""
UNREADABLE_S = 10.0
"""Seconds for which the files of a run may be unreadable, until it counts as lost."""
EXIT_RUNNING, EXIT_STALLED, EXIT_LOST = 4, 5, 6
EXIT_CODES = {
    "met": EXIT_DONE,
    "finished": EXIT_DONE,
    "running": EXIT_RUNNING,
    "stopped": EXIT_STOPPED,
    "stalled": EXIT_STALLED,
    NEVER: EXIT_STALLED,
    "not met": EXIT_FAILED,
    "failed": EXIT_FAILED,
    "lost": EXIT_LOST,
}
"""The exit code for each reason, the best first: of several runs the worst one counts."""
_NEXT = {
    "failed": "ltui diagnose {}",
    "stalled": "ltui diagnose {}",
    "stopped": "ltui resume {}",
    "running": "ltui wait {}",
    "paused": "ltui continue {}",
    NEVER: "ltui queue edit {0} --after none;ltui queue remove {0}",
}
"""What is usually done next, by reason."""
_LASTING_S = {"stalled": 1.5, "dead": 15.0}
"""Seconds after which a verdict counts, by its level. A run ends some seconds after a rank died,
unless the other ranks hang."""
_STATES = ("ended", "stalled", "resolved", "nan")
_EVENT = "event:"
_REMEDY = "Give ended, stalled, resolved, nan, step>=500, epoch>=3, 'val/loss<0.2' or event:NAME."


class Outcome(Struct, frozen=True, kw_only=True):
    """Why it is no longer waited for a run."""

    reason: str
    """A key of ``EXIT_CODES``."""
    sentence: str


class Condition(Struct, frozen=True, kw_only=True):
    """One ``--until``."""

    text: str
    comparison: StopCondition | None = None
    """With a number; its metric is ``step`` or ``epoch`` for those of the run."""

    def met(self, snapshot: RunSnapshot, events: Sequence[StoredEvent]) -> str | None:
        """Return a sentence that says how the run meets the condition; None if it does not.

        ``events`` are those since the begin of the wait.
        """
        if self.text == "stalled":
            verdict = lasting_stall(snapshot)
            return None if verdict is None else clean_line(verdict_line(verdict))
        if self.text == "resolved":
            live = snapshot.state in LIVE and not is_blocked(snapshot)
            return "no rank is stalled" if live else None
        if self.text == "nan":
            since = nan_since(snapshot.verdicts)
            return None if since is None else f"the loss is NaN since step {since}"
        if self.comparison is not None:
            return _compared(self.comparison, snapshot)
        if self.text == "ended":
            return None  # The state decides; see ``outcome``.
        name = self.text.removeprefix(_EVENT)
        texts = (clean_line(event.text or name) for event in events if event.kind == name)
        return next(texts, None)


def parse_condition(text: str) -> Condition:
    """Return the condition that ``--until`` names. Raise ``ProblemError`` if it is none."""
    if text in _STATES or (text.startswith(_EVENT) and text != _EVENT):
        return Condition(text=text)
    with suppress(ProblemError):
        return Condition(text=text, comparison=parse_metric_condition(text))
    raise ProblemError.of(where=f"--until {text}", what="invalid condition.", remedy=_REMEDY)


def _compared(comparison: StopCondition, snapshot: RunSnapshot) -> str | None:
    limit = f"{comparison.compare} {comparison.value:g}"
    if (position := _position(comparison, snapshot)) is not None:
        met = is_met(comparison, position)
        return f"at {comparison.metric} {position} ({limit})" if met else None
    metric = snapshot.metrics.get(comparison.metric or "")
    if metric is None:
        return None
    # An earlier value counts too: it may have been logged between two looks.
    for value in (metric.last, metric.best_min, metric.best_max):
        if value is not None and is_met(comparison, value):
            at = f" at step {metric.step}" if value == metric.last else ""
            return f"{clean_line(comparison.metric or '')} was {value:g} ({limit}){at}"
    return None


def _position(comparison: StopCondition, snapshot: RunSnapshot) -> int | None:
    """Return the step or the epoch, from 1, that is compared; None if it is neither or unknown."""
    if comparison.metric == "step":
        return snapshot.global_step
    return shown_epoch(snapshot) if comparison.metric == "epoch" else None


def lasting_stall(snapshot: RunSnapshot) -> Verdict | None:
    """Return the verdict that says why a live run does not go on; None if it goes on.

    A run that waits for its automatic restart, with a rank that died, goes on.
    """
    if snapshot.state not in LIVE or snapshot.state is RunState.QUEUED:
        return None
    now = snapshot.taken_at or time.time()
    for verdict in most_severe_first(open_verdicts(snapshot)):
        lasts_s = now - (verdict.began or math.inf)
        if lasts_s >= _LASTING_S.get(verdict.level, math.inf):
            return verdict
    return None


def outcome(
    conditions: Sequence[Condition], snapshot: RunSnapshot, events: Sequence[StoredEvent] = ()
) -> Outcome | None:
    """Return why the wait for one run is over, as it is now; None if it is not."""
    for condition in conditions:
        if (sentence := condition.met(snapshot, events)) is not None:
            return Outcome(reason="met", sentence=sentence)
    asked = {condition.text for condition in conditions}
    if snapshot.state not in LIVE:
        missed = "" if "ended" in asked else ", ".join(sorted(asked))
        reason: str = snapshot.state.value
        if reason == RunState.FINISHED.value and "ended" not in asked:
            reason = "not met"
        elif snapshot.state in FAILED and snapshot.state is not RunState.LOST:
            reason = "failed"
        never = f"; not met: {clean_line(missed)}" if missed else ""
        return Outcome(reason=reason, sentence=ended_sentence(snapshot) + never)
    if snapshot.state is RunState.QUEUED and (snapshot.detail or "").startswith(NEVER):
        return Outcome(reason=NEVER, sentence=clean_line(snapshot.detail or ""))
    stall = None if "resolved" in asked else lasting_stall(snapshot)
    if stall is None:
        return None
    return Outcome(reason="stalled", sentence=clean_line(verdict_line(stall)))


def next_commands(run: RunSnapshot, reason: str | None = None) -> list[str]:
    """Return the commands that usually follow on how a run is, or on the reason of a wait."""
    if reason is None:
        why = outcome([Condition(text="ended")], run)
        live = "paused" if run.state is RunState.PAUSED else "running"
        reason = live if why is None else why.reason
    if reason not in _NEXT or (reason == "stopped" and not is_resumable(run)):
        return []
    commands = _NEXT[reason].format(run.id)
    if (run.detail or "").startswith(f"{NEVER}: it needs"):
        commands = commands.replace("--after none", "--slots 1")
    return commands.split(";")


class _WaitedRun:
    """One run that is waited for."""

    def __init__(self, run_dir: RunDir, conditions: Sequence[Condition]) -> None:
        self.run_dir = run_dir
        self.snapshot: RunSnapshot | None = None
        self.outcome: Outcome | None = None
        self._conditions = conditions
        self._wants_events = any(c.text.startswith(_EVENT) for c in conditions)
        before = _events(run_dir) if self._wants_events else []
        self._last_event = before[-1].id if before else 0
        self._readable_at = time.monotonic()

    def look(self, queued: Mapping[str, str]) -> None:
        """Set ``outcome``. A stall may be over again; an end and a met condition stay.

        ``queued`` says what each run of the run queue waits for now.
        """
        if self.outcome is not None and self.outcome.reason not in ("stalled", NEVER):
            return
        try:
            snapshot = current_snapshot(self.run_dir)
            if snapshot.state is RunState.QUEUED and self.run_dir.id in queued:
                snapshot = replace(snapshot, detail=queued[self.run_dir.id])
            self.snapshot = snapshot
            events = _events(self.run_dir, self._last_event) if self._wants_events else []
        except ProblemError as error:
            if time.monotonic() - self._readable_at > UNREADABLE_S:
                self.outcome = Outcome(reason="lost", sentence=clean_line(str(error)))
            return
        self._readable_at = time.monotonic()
        self.outcome = outcome(self._conditions, self.snapshot, events)

    def result(self, waited_s: float) -> WaitedRun:
        """Return why it is no longer waited, perhaps because the time is over."""
        why = self.outcome or self._running(waited_s)
        run_id, snapshot, sentence = self.run_dir.id, self.snapshot, why.sentence
        if why.reason != "met" and (missing := self.unlogged()):
            sentence += f"; {missing}"
        return WaitedRun(id=run_id, reason=why.reason, sentence=sentence, snapshot=snapshot)

    def _running(self, waited_s: float) -> Outcome:
        if self.snapshot is None:
            return Outcome(reason="lost", sentence="its files cannot be read")
        step = self.snapshot.global_step
        at = "" if step is None else f" at step {step}"
        sentence = f"still {self.snapshot.state.value}{at} after {duration(waited_s)}"
        return Outcome(reason="running", sentence=sentence)

    def unlogged(self) -> str:
        """Return a sentence about metrics of the conditions, perhaps mistyped, that the run has not
        logged although it has logged others."""
        if self.snapshot is None:
            return ""
        compared = [c.comparison for c in self._conditions if c.comparison is not None]
        metrics = [c for c in compared if _position(c, self.snapshot) is None]
        return clean_line(unlogged_metrics(metrics, self.snapshot) or "", 300)


def _events(run_dir: RunDir, cursor: int = 0) -> list[StoredEvent]:
    """Return the events after ``cursor``; none while the run has no history yet."""
    try:
        with RunStore(run_dir) as store:
            return store.events(cursor)
    except NoHistoryError:
        return []


class WaitedRun(Struct, frozen=True, kw_only=True):
    """A run at the end of a wait."""

    id: str
    reason: str
    """A key of ``EXIT_CODES``."""
    sentence: str
    snapshot: RunSnapshot | None
    """None if it could not be read."""


class WaitResult(Struct, frozen=True, kw_only=True):
    """Why a wait has ended."""

    exit_code: int
    """The code of the worst reason; with ``any_run`` that of the best one."""
    waited_s: float
    runs: tuple[WaitedRun, ...]


def wait(
    runs: str | Sequence[str],
    until: str | Sequence[str] = ("ended",),
    *,
    for_at_most_s: float | None = None,
    any_run: bool = False,
    notice: Callable[[str], object] | None = None,
) -> WaitResult:
    """Sleep until each of the runs, or with ``any_run`` one, has ended or meets a condition.

    ``until`` has conditions such as ``step>=500``, ``val/loss<0.2``, ``nan`` and ``event:NAME``
    (``ltui wait --help``), of which one is enough. ``notice`` is called with a sentence about
    metrics that a run has not logged, as soon as it has logged others. Raises ``ProblemError`` for
    a wrong condition or name.
    """
    conditions = [parse_condition(text) for text in texts("until", until)]
    check("for_at_most_s", for_at_most_s, float, int, type(None))
    found = dict.fromkeys(find_runs(ltui_home(to_write=False), texts("runs", runs)))
    waiting = [_WaitedRun(run_dir, conditions) for run_dir in found]
    began = time.monotonic()
    deadline = began + (math.inf if for_at_most_s is None else for_at_most_s)
    noticed = set[str]()
    while True:
        queued = _queued(waiting)
        for run in waiting:
            run.look(queued)
            text = run.unlogged() if run.outcome is None else ""
            if notice is not None and text and run.run_dir.id not in noticed:
                noticed.add(run.run_dir.id)
                notice(f"{run.run_dir.id}: {text}")
        reasons = [None if run.outcome is None else run.outcome.reason for run in waiting]
        good = any(reason is not None and EXIT_CODES[reason] == EXIT_DONE for reason in reasons)
        left_s = deadline - time.monotonic()
        if None not in reasons or (any_run and good) or left_s <= 0:
            break
        time.sleep(min(POLL_INTERVAL_S, left_s))
    waited_s = time.monotonic() - began
    results = tuple(run.result(waited_s) for run in waiting)
    by_code = sorted(results, key=lambda run: list(EXIT_CODES).index(run.reason))
    code = EXIT_CODES[by_code[0 if any_run else -1].reason]
    return WaitResult(exit_code=code, waited_s=waited_s, runs=results)


def _queued(waiting: Sequence[_WaitedRun]) -> Mapping[str, str]:
    """Return what each run of the run queue waits for if it is waited for one of them."""
    home = next((r.run_dir.home for r in waiting if r.run_dir.queued_path.exists()), None)
    if home is None:
        return {}
    # Imported here: few runs are queued.
    from ltui.app.launch.queue_changes import reasons_to_wait

    return reasons_to_wait(home)


def events(run: str, since: int = 0, *, follow: bool = False) -> Iterator[StoredEvent]:
    """Yield what happened in a run after the event with the id ``since``.

    With ``follow``, events are yielded as they happen, until the run has ended.
    """
    check("since", since, int)
    return _new_events(find_run(ltui_home(to_write=False), run), since, follow=follow)


def _new_events(run_dir: RunDir, cursor: int, *, follow: bool) -> Iterator[StoredEvent]:
    unreadable_at = math.inf
    while True:
        # The state is read first, so that no event before the end is left out.
        try:
            live = follow and current_snapshot(run_dir).state in LIVE
            new = _events(run_dir, cursor)
        except ProblemError:
            unreadable_at = min(unreadable_at, time.monotonic())
            if not follow or time.monotonic() - unreadable_at > UNREADABLE_S:
                raise
            time.sleep(POLL_INTERVAL_S)
            continue
        unreadable_at = math.inf
        for event in new:
            cursor = event.id
            yield event
        if not live:
            return
        time.sleep(POLL_INTERVAL_S)
