"""Follow a run in the foreground: show it until it ends, and turn Ctrl-C into a stop, then a kill.

The run belongs to its supervisor, so it continues even if this process ends.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from ltui.app.command_output import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED
from ltui.app.foreground.progress_display import Display, display_for
from ltui.app.interrupt_signals import ReceivedSignals
from ltui.app.live.run_requests import send_request
from ltui.app.live.run_time import read_time
from ltui.app.presentation.notifications import started_line, stop_effect, stop_progress
from ltui.app.presentation.run_report import end_report
from ltui.app.presentation.time_view import BAR_CELLS, summary, time_bar
from ltui.app.state_words import FAILED, warning_line
from ltui.training.diagnosis.stack_frames import is_library_file
from ltui.training.lifecycle.run_status import resolve_snapshot
from ltui.training.problem import ProblemError
from ltui.training.shared.regular_files import read_end
from ltui.training.state.good_checkpoints import is_resumable
from ltui.training.state.run_snapshot import (
    LIVE,
    FreezeWarning,
    RankSnapshot,
    RunSnapshot,
    RunState,
)
from ltui.training.store.database_schema import StoreError
from ltui.training.store.history_reader import RunStore, StoredEvent
from ltui.training.store.open_history import wait_for_last_copy
from ltui.training.store.run_directory import RunDir
from ltui.widgets.sanitise import clean_line

POLL_INTERVAL_S = 0.25
"""Seconds between two reads of the run's state."""
UNREADABLE_S = 10.0
"""Seconds for which an unreadable history is tolerated."""
LINES_SHOWN = 20
"""Maximum number of lines of a traceback or log that are printed after a failure."""
CONSEQUENCE_LINES = 3
"""Maximum number of lines of an exception that only followed from another rank's death."""
END_BYTES = 16 * 1024
"""Number of bytes read from the end of a log."""
_EVERY_RANK = frozenset({"exception", "telemetry_off"})
"""Kinds of events that are printed for every rank."""
_ONCE = frozenset(
    {
        "checkpoint_saved",
        "checkpoint_failed",
        "paused",
        "continued",
        "disk",
        "stopped",
        "resumed",
        "note",
        "gpu_error",
        "mirror",
        "verdict",
        "verdict_over",
        "on_verdict",
        "stall_policy",
    }
)
"""Kinds of events that are printed only for rank 0 or the whole run."""


def follow_run(run_dir: RunDir, signals: ReceivedSignals, *, plain: bool) -> int:
    """Show a run that was just started until its end, and return the exit code of ``ltui run``.

    On a terminal the dashboard opens, unless ``plain`` is true.
    """
    if not plain and can_open_dashboard(os.environ):
        code = _watch_in_dashboard(run_dir, signals)
        if code is not None:
            return code
    display = display_for(sys.stdout, os.environ)
    try:
        return RunFollower(run_dir, display, signals).until_end()
    except BrokenPipeError:
        _print_still_running(run_dir)
        raise
    finally:
        display.close()


def can_open_dashboard(environment: Mapping[str, str]) -> bool:
    """Return whether this process has a terminal to read keys from and to draw on."""
    drawable = environment.get("TERM", "dumb") not in ("dumb", "")
    return drawable and sys.stdin.isatty() and sys.stdout.isatty()


def _watch_in_dashboard(run_dir: RunDir, signals: ReceivedSignals) -> int | None:
    """Return the exit code after the dashboard is left, or None if it failed.

    After a failure plain lines are shown instead.
    """
    # Local: plain lines do not need Textual.
    from ltui.app.foreground.run_in_dashboard import show_dashboard

    print(started_line(run_dir.id), flush=True)
    if not show_dashboard(run_dir, signals):
        return None
    snapshot = resolve_snapshot(run_dir)
    if snapshot.state in LIVE:
        _print_still_running(run_dir)
        return EXIT_DONE if signals.leave is None else 128 + signals.leave
    report = end_report(snapshot, time_rows(run_dir, snapshot))
    print("\n".join([*failure_lines(run_dir, snapshot), *report]))
    print(f"  To open its screen again: ltui attach {run_dir.id}")
    wait_for_last_copy(run_dir)
    return exit_code(snapshot, interrupted=signals.asked_to_stop)


class RunFollower:
    """Follows one run on one display."""

    def __init__(self, run_dir: RunDir, display: Display, signals: ReceivedSignals) -> None:
        self._run_dir = run_dir
        self._display = display
        self._signals = signals
        self._last_event = 0
        self._printed_warnings: set[tuple[int, FreezeWarning]] = set()
        self._printed_notes: set[tuple[int, str, str]] = set()
        self._began_at = time.time()

    def until_end(self) -> int:
        """Show the run until its end, and return the exit code of the command."""
        self._display.print_line(started_line(self._run_dir.id))
        promised = ""
        while True:
            snapshot = self._read_snapshot()
            if (effect := _ctrl_c_effect(snapshot)) != promised and snapshot.state in LIVE:
                promised = effect
                self._display.print_line(f"{effect}; closing the terminal leaves it running.")
            self._print_events()
            self._print_warnings(snapshot)
            if snapshot.state not in LIVE:
                return self._report_end(snapshot)
            self._display.update(snapshot, time.monotonic(), self._hint(snapshot))
            if self._signals.leave is not None:
                self._display.close()
                _print_still_running(self._run_dir)
                return 128 + self._signals.leave
            self._handle_interrupts(snapshot)
            time.sleep(POLL_INTERVAL_S)

    def _read_snapshot(self) -> RunSnapshot:
        """Return the run's snapshot. If the history cannot be read, wait for a short time."""
        deadline = time.monotonic() + UNREADABLE_S
        while True:
            try:
                return resolve_snapshot(self._run_dir)
            except ProblemError:
                if time.monotonic() >= deadline or self._signals.leave is not None:
                    _print_still_running(self._run_dir)
                    raise
                time.sleep(POLL_INTERVAL_S)

    def _hint(self, snapshot: RunSnapshot) -> str:
        if self._signals.handled_interrupts == 0:
            return f"{_ctrl_c_effect(snapshot)}; closing the terminal leaves it running"
        return _stopping(snapshot) if self._signals.handled_interrupts == 1 else "killing"

    def _handle_interrupts(self, snapshot: RunSnapshot) -> None:
        request = self._signals.next_request()
        if request is None:
            return
        killing = request["cmd"] == "kill"
        what = "killing the run" if killing else _stopping(snapshot)
        self._display.print_line(f"Ctrl-C: {what}.")
        try:
            send_request(self._run_dir, request)
        except ProblemError as error:
            # The run may have ended just now; the next snapshot shows it.
            self._display.print_line(str(error))

    def _print_events(self) -> None:
        for event in events_after(self._run_dir, self._last_event):
            self._last_event = event.id
            if event.t < self._began_at or (line := event_line(event)) is None:
                continue
            # Several ranks may report the same event, each with its own number.
            key = (event.attempt, event.kind, re.sub(r" on rank \d+", "", event.text))
            if event.kind != "note" or key not in self._printed_notes:
                self._printed_notes.add(key)
                self._display.print_line(line)

    def _print_warnings(self, snapshot: RunSnapshot) -> None:
        for caution in snapshot.cautions:
            if (snapshot.attempt, caution) not in self._printed_warnings:
                self._printed_warnings.add((snapshot.attempt, caution))
                self._display.print_line(warning_line(caution))

    def _report_end(self, snapshot: RunSnapshot) -> int:
        self._display.close()
        report = end_report(snapshot, time_rows(self._run_dir, snapshot))
        for line in [*failure_lines(self._run_dir, snapshot), *report]:
            self._display.print_line(line)
        wait_for_last_copy(self._run_dir)
        return exit_code(snapshot, interrupted=self._signals.asked_to_stop)


def _ctrl_c_effect(snapshot: RunSnapshot) -> str:
    return f"Ctrl-C {stop_effect(snapshot)}"


def _stopping(snapshot: RunSnapshot) -> str:
    return f"{stop_progress(snapshot)}; press Ctrl-C again to kill at once"


def exit_code(snapshot: RunSnapshot, *, interrupted: bool = False) -> int:
    """Return 0 for a finished run, 3 for a stopped and resumable one, 1 otherwise.

    ``interrupted``: this user has stopped it by one Ctrl-C. That is no failure, even without a
    checkpoint, so it is 0, as that of ``ltui stop``.
    """
    if snapshot.state is RunState.FINISHED:
        return EXIT_DONE
    if snapshot.state is RunState.STOPPED and is_resumable(snapshot):
        return EXIT_STOPPED
    return EXIT_DONE if snapshot.state is RunState.STOPPED and interrupted else EXIT_FAILED


def events_after(run_dir: RunDir, after: int = 0) -> list[StoredEvent]:
    """Return the events after that id; none while the history cannot be read."""
    try:
        with RunStore(run_dir) as store:
            return store.events(after)
    except StoreError:
        return []


def event_line(event: StoredEvent) -> str | None:
    """Return the line for an event of a live run, or None for an event that the panel shows
    anyway."""
    text = clean_line(event.text, 400)
    if event.kind in _EVERY_RANK:
        return f"rank {event.rank}: {text}"
    if event.kind == "verdict":
        remedy = (event.data.get("verdict") or {}).get("remedy")
        return f"{text}  {clean_line(str(remedy), 300)}" if remedy else text
    if event.kind == "note" or (event.kind in _ONCE and event.rank in (0, None)):
        return text
    return None


def time_rows(run_dir: RunDir, snapshot: RunSnapshot) -> list[tuple[str, str]]:
    """Return rows that say where the time of a run went; none if that is not known."""
    try:
        ledger = read_time(run_dir, snapshot).ledger
    except ProblemError:
        return []
    if ledger.goodput is None:
        return []
    return [("", time_bar(ledger.run, BAR_CELLS)), ("", summary(ledger))]


def failure_lines(run_dir: RunDir, snapshot: RunSnapshot) -> list[str]:
    """Return why the run failed: the first exception of any rank, or the end of a log.

    An exception that followed from another rank's death is named as a consequence.
    """
    if snapshot.state not in FAILED:
        return []
    raised = [
        event
        for event in events_after(run_dir)
        if event.kind == "exception" and event.attempt == snapshot.attempt
    ]
    if raised:
        first = min(raised, key=lambda event: event.t)
        trace = str(first.data.get("traceback") or first.text)
        trace = _without_library_calls(trace, first.data.get("torch_dir"))
        if followed_a_death(snapshot, first.rank):
            lines = _last_lines(trace)[-CONSEQUENCE_LINES:]
            return ["", f"rank {first.rank} raised this as a consequence:", *lines]
        return ["", f"rank {first.rank} failed first:", *_last_lines(trace)]
    for path in _likely_logs(run_dir, snapshot):
        lines = _last_lines(read_end(path, END_BYTES))
        if lines:
            return ["", f"last lines of {path}:", *lines]
    return []


def followed_a_death(snapshot: RunSnapshot, rank: int | None) -> bool:
    """Return whether a verdict says that the rank failed because another rank had died."""
    dead = [verdict for verdict in snapshot.verdicts if verdict.level == "dead"]
    return any(str(rank) in (verdict.evidence.get("consequences") or {}) for verdict in dead)


def _likely_logs(run_dir: RunDir, snapshot: RunSnapshot) -> list[Path]:
    """Return the logs of the ranks at fault, then of the engine, then of all other ranks."""

    def suspicion(rank: RankSnapshot) -> int:
        # The engine ends the others with SIGTERM once one has failed.
        failed = rank.exit_code not in (None, 0, -signal.SIGTERM)
        return 0 if rank.note and failed else 1 if failed else 2

    by_guilt = sorted(snapshot.ranks, key=lambda rank: (suspicion(rank), rank.rank))
    guilty = [rank for rank in by_guilt if suspicion(rank) < 2]
    paths = [run_dir.rank_log_path(snapshot.attempt, rank.rank) for rank in by_guilt]
    engine = run_dir.engine_log_path(snapshot.attempt)
    return [*paths[: len(guilty)], engine, *paths[len(guilty) :]]


def _last_lines(text: str) -> list[str]:
    lines = [clean_line(line, 400) for line in text.splitlines() if line.strip()]
    return [f"  {line}" for line in lines[-LINES_SHOWN:]]


def _without_library_calls(trace: str, torch_dir: object) -> str:
    """Return a traceback in which ``...`` stands for calls in libraries, unless all are."""
    frames = re.split(r'(?m)^(?=\s+File ")', trace)
    shown: list[str] = []
    for number, frame in enumerate(frames):
        file = re.match(r'\s+File "([^"]+)"', frame)
        library = file is not None and is_library_file(file[1], torch_dir)
        if not library or number == len(frames) - 1:
            shown.append(frame)
        elif not shown[-1].endswith("...\n"):
            shown.append("  ...\n")
    return "".join(shown)


def _print_still_running(run_dir: RunDir) -> None:
    try:
        keeps_running = f"{run_dir.id} keeps running. To watch it: ltui attach {run_dir.id}"
        print(keeps_running, file=sys.stderr, flush=True)
    except OSError:
        # The terminal is closed, which is the reason for leaving.
        return
