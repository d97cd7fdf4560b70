"""Displays for a run in the foreground without the dashboard: a live panel, or plain lines.

A display only draws the snapshots that it gets. Clocks, signals and commands are in
``app/foreground/follow_run.py``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, TextIO

from ltui.app.presentation.machines import (
    all_ranks_text,
    listed_ranks,
    machine_count,
    machine_problem_lines,
    missing_machines,
    padded_labels,
)
from ltui.app.presentation.snapshot_text import (
    done_fraction,
    metrics_text,
    position,
    rank_line,
    ranks_text,
    speed_text,
    title,
)
from ltui.app.state_words import is_blocked, needs_help, open_verdicts, state_word, verdict_line
from ltui.training.state.metric_name_patterns import is_evaluation
from ltui.training.state.run_snapshot import LIVE, RankState, RunSnapshot, RunState
from ltui.widgets.formats import duration, percent
from ltui.widgets.sanitise import clean_line

if TYPE_CHECKING:
    from rich.live import Live

PLAIN_EVERY_S = 60.0
"""Maximum seconds between two plain lines while only the step changes."""
PLAIN_EPOCH_S = 10.0
"""Minimum seconds between two plain lines about new epochs and validation metrics."""
RANKS_SHOWN = 8
"""Maximum number of ranks with a line of their own."""


class Display(Protocol):
    """A display of a run in the foreground."""

    def update(self, snapshot: RunSnapshot, now: float, hint: str) -> None:
        """Show the snapshot. ``now`` is monotonic seconds; ``hint`` describes the effect of
        Ctrl-C."""

    def print_line(self, line: str) -> None:
        """Print a line that stays on the terminal."""

    def close(self) -> None:
        """Restore the terminal."""


def display_for(stream: TextIO, environment: Mapping[str, str]) -> Display:
    """Return a live panel if ``stream`` is a terminal that can draw one, else plain lines."""
    if stream.isatty() and environment.get("TERM", "dumb") not in ("dumb", ""):
        return LivePanel(stream)
    return PlainLines(stream)


# Plain lines -----------------------------------------------------------------------------------


class PlainLines:
    """Prints a line for each change of state, for each new epoch, and at least once a minute."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last_at = -math.inf
        self._last_state: tuple[object, ...] = ()
        self._last_progress: tuple[object, ...] = ()
        self._last_line = ""

    def update(self, snapshot: RunSnapshot, now: float, hint: str) -> None:  # noqa: ARG002
        # Numbers in the detail count seconds: a new number alone is no change.
        detail = re.sub(r"\d+", "", snapshot.detail or "")
        machines = tuple(node.state for node in snapshot.nodes)
        state = (state_word(snapshot), snapshot.state, snapshot.attempt, detail, machines)
        validated = {n: v.step for n, v in snapshot.metrics.items() if is_evaluation(n)}
        progress = (snapshot.epoch, tuple(validated.items()))
        waited_s = now - self._last_at
        due = (
            state != self._last_state
            or (progress != self._last_progress and waited_s >= PLAIN_EPOCH_S)
            or waited_s >= PLAIN_EVERY_S
        )
        line = plain_line(snapshot)
        if due and line != self._last_line:
            self._last_at, self._last_line = now, line
            self._last_state, self._last_progress = state, progress
            self.print_line(line)

    def print_line(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.flush()


def plain_line(snapshot: RunSnapshot) -> str:
    """Return the whole run in one line."""
    word, detail = state_word(snapshot), _extra_detail(snapshot)
    moving = snapshot.state is RunState.RUNNING and not is_blocked(snapshot)
    ranks = all_ranks_text(snapshot) if snapshot.state in LIVE else ""
    parts = [
        elapsed_text(snapshot.elapsed_s),
        word,
        detail,
        position(snapshot),
        metrics_text(snapshot),
        speed_text(snapshot) if moving else "",
        "" if ranks in detail else ranks,
        machine_count(snapshot) if snapshot.state in LIVE else "",
        missing_machines(snapshot),
    ]
    return "  ".join(part for part in parts if part)


def elapsed_text(elapsed_s: float | None) -> str:
    """Return whole seconds as ``18 s`` or ``12 m 08 s``; empty in the first second."""
    if elapsed_s is None or elapsed_s < 1:
        return ""
    seconds = round(elapsed_s)
    return f"{seconds} s" if seconds < 60 else duration(float(seconds))


def _extra_detail(snapshot: RunSnapshot) -> str:
    """Return the detail if it contains more than the state and the step, which are shown next to
    it."""
    detail = clean_line(snapshot.detail, 300) if snapshot.detail else ""
    plain = rf"{snapshot.state.value}( at step {snapshot.global_step})?\.?"
    return "" if re.fullmatch(plain, detail, re.IGNORECASE) else detail


# The live panel --------------------------------------------------------------------------------


class LivePanel:
    """Draws a few lines at the bottom of the terminal in place. Messages scroll above them."""

    def __init__(self, stream: TextIO) -> None:
        # Local: plain lines, as in pipes and batch jobs, do not need rich.
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=stream, highlight=False, markup=False, emoji=False)
        self._live: Live | None = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()

    def update(self, snapshot: RunSnapshot, now: float, hint: str) -> None:  # noqa: ARG002
        # Local: see above.
        from rich.text import Text

        if self._live is None:
            return
        lines = panel_lines(snapshot, hint, self._console.width)[: max(3, self._console.height - 1)]
        text = Text("\n", no_wrap=True, overflow="ellipsis").join(
            Text(line, style=style) for line, style in lines
        )
        self._live.update(text, refresh=True)

    def print_line(self, line: str) -> None:
        # `out` prints the text unchanged, without markup and without wrapping.
        self._console.out(line, highlight=False)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


_QUIET_RANK_STATES = frozenset(
    {RankState.OK, RankState.RUNNING, RankState.STARTING, RankState.ENDED}
)
_STATE_STYLES = {
    RunState.RUNNING: "bold",
    RunState.STOPPING: "yellow",
    RunState.PAUSING: "yellow",
    RunState.PAUSED: "yellow",
    RunState.FAILED: "red",
    RunState.CRASHED: "red",
    RunState.LOST: "red",
}


def panel_lines(snapshot: RunSnapshot, hint: str, width: int) -> list[tuple[str, str]]:
    """Return the text and the style of each line of the panel."""
    style = "bold red" if needs_help(snapshot) else _STATE_STYLES.get(snapshot.state, "")
    lines = [(f"{title(snapshot)}  {state_word(snapshot)}", style)]
    share = done_fraction(snapshot)
    progress = (
        "" if share is None else f"{bar(share, max(10, min(40, width - 60)))} {percent(share)}"
    )
    times = [f"{duration(snapshot.elapsed_s)}"] if snapshot.elapsed_s is not None else []
    times += [f"{duration(snapshot.eta_s)} left"] if snapshot.eta_s is not None else []
    lines.append(("  ".join(p for p in (position(snapshot), progress, *times) if p), ""))
    lines.append((metrics_text(snapshot), ""))
    lines.append((speed_text(snapshot), ""))
    if snapshot.detail:
        lines.append((clean_line(snapshot.detail, 300), "yellow"))
    lines.append((machine_count(snapshot), ""))
    lines += [(line, "yellow") for line in machine_problem_lines(snapshot)]
    shown, hidden = listed_ranks(snapshot, RANKS_SHOWN)
    labels = padded_labels(snapshot)
    lines += [
        (
            rank_line(snapshot, rank, labels.get(rank.rank)),
            "" if rank.state in _QUIET_RANK_STATES else "yellow",
        )
        for rank in shown
    ]
    if hidden:
        lines.append((f"and {ranks_text(hidden)}", ""))
    for verdict in open_verdicts(snapshot):
        lines.append((verdict_line(verdict), "red" if verdict.level == "dead" else "yellow"))
    if snapshot.history_note:
        lines.append((clean_line(snapshot.history_note), "yellow"))
    lines.append((hint, "dim"))
    return [(line, style) for line, style in lines if line]


def bar(fraction: float, cells: int) -> str:
    """Return a progress bar: ``▮▮▮▮▯▯▯▯▯▯``."""
    full = min(cells, max(0, int(fraction * cells)))
    return "▮" * full + "▯" * (cells - full)
