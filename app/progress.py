"""How a run in the foreground is shown: a live panel on a terminal, plain lines anywhere else.

Draws snapshots that it is handed. Clocks, signals and commands are ``app/foreground.py``'s.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, TextIO

from ltui.training.run.snapshot import (
    LIVE,
    Caution,
    MetricValue,
    RankSnapshot,
    RunSnapshot,
    RunState,
    Verdict,
)
from ltui.widgets.formats import NA, age, count, duration, metric, of, percent, quantity
from ltui.widgets.sanitise import clean_line, clean_name

if TYPE_CHECKING:
    from rich.live import Live

PLAIN_EVERY_S = 5.0
RANKS_SHOWN = 8
_LOSSES = ("train/loss", "train_loss", "loss")


class Display(Protocol):
    """Where the foreground shows a run."""

    def show(self, snapshot: RunSnapshot, now: float, hint: str) -> None:
        """The run as it is; ``now`` in monotonic seconds, ``hint`` says what Ctrl-C does."""

    def say(self, line: str) -> None:
        """A line that stays."""

    def close(self) -> None:
        """Leave the terminal as it was."""


def display_for(stream: TextIO, environment: Mapping[str, str]) -> Display:
    """The live panel where ``stream`` is a terminal that can draw one."""
    if stream.isatty() and environment.get("TERM", "dumb") not in ("dumb", ""):
        return LivePanel(stream)
    return PlainLines(stream)


# What is said, as text -------------------------------------------------------------------------


def title(snapshot: RunSnapshot) -> str:
    """``brave-owl · quickstart``."""
    what = snapshot.preset or " ".join(snapshot.command or ())
    name = clean_name(snapshot.name)
    return f"{name} · {clean_name(what)[:60]}" if what else name


def position(snapshot: RunSnapshot) -> str:
    """``epoch 3/30  step 1 204/2 930``; empty before the first step."""
    parts = []
    if snapshot.epoch is not None:
        parts.append(f"epoch {of(shown_epoch(snapshot), snapshot.max_epochs or None)}")
    if snapshot.global_step is not None:
        parts.append(f"step {of(snapshot.global_step, total_steps(snapshot))}")
    return "  ".join(parts)


def shown_epoch(snapshot: RunSnapshot) -> int | None:
    """The epoch counted from 1, and never past the last."""
    if snapshot.epoch is None:
        return None
    shown = snapshot.epoch + 1
    return min(shown, snapshot.max_epochs) if snapshot.max_epochs else shown


def total_steps(snapshot: RunSnapshot) -> int | None:
    return snapshot.max_steps if snapshot.max_steps and snapshot.max_steps > 0 else None


def share_done(snapshot: RunSnapshot) -> float | None:
    """0 to 1; None where the end is not known."""
    total = total_steps(snapshot)
    if total and snapshot.global_step is not None:
        return min(1.0, snapshot.global_step / total)
    return None


def loss_of(snapshot: RunSnapshot) -> tuple[str, MetricValue] | None:
    """The training loss under whichever name the run has."""
    for name in _LOSSES:
        if name in snapshot.metrics:
            return name, snapshot.metrics[name]
    for name, value in snapshot.metrics.items():
        if "loss" in name and not is_validation(name):
            return name, value
    return None


def is_validation(name: str) -> bool:
    return name.startswith(("val", "test"))


def metrics_text(snapshot: RunSnapshot, limit: int = 5) -> str:
    """``train/loss 0.8412  val/acc 0.9510``: the loss, then what validation gave."""
    loss = loss_of(snapshot)
    chosen = [loss] if loss else []
    chosen += [(n, v) for n, v in sorted(snapshot.metrics.items()) if is_validation(n)]
    return "  ".join(f"{clean_name(n, 40)} {metric(v.last)}" for n, v in chosen[:limit])


def speed_text(snapshot: RunSnapshot) -> str:
    """``2.1 k samples/s  4 % waiting for data``."""
    speed = snapshot.throughput
    parts = []
    if speed.samples_per_s is not None:
        parts.append(quantity(speed.samples_per_s, "samples/s"))
    if speed.data_wait_share is not None:
        parts.append(f"{percent(speed.data_wait_share)} waiting for data")
    return "  ".join(parts)


def rank_line(rank: RankSnapshot) -> str:
    """One rank, in columns."""
    step = "" if rank.global_step is None else f"step {count(rank.global_step)}"
    note = f"  {clean_line(rank.note, 80)}" if rank.note else ""
    return (
        f"r{rank.rank:<3} {rank.device or '':<7} {step:<12} {rank.phase or NA:<11} "
        f"{age(rank.age_s):>7}  {rank.state.value}{note}"
    )


def ranks_text(ranks: tuple[RankSnapshot, ...]) -> str:
    """``2 ranks ok`` or ``3 ok, 1 stalled``."""
    if not ranks:
        return ""
    states: dict[str, int] = {}
    for rank in ranks:
        states[rank.state.value] = states.get(rank.state.value, 0) + 1
    if len(states) == 1:
        return f"{len(ranks)} rank{'s' if len(ranks) > 1 else ''} {next(iter(states))}"
    return ", ".join(f"{number} {state}" for state, number in states.items())


def caution_line(caution: Caution) -> str:
    """``CAUTION: ranks have different batch counts ... Give every rank as many.``"""
    remedy = f" {clean_line(caution.remedy, 300)}" if caution.remedy else ""
    return f"CAUTION: {clean_line(caution.what, 500)}{remedy}"


def verdict_line(verdict: Verdict) -> str:
    """``STALLED: rank 2 waits for its DataLoader``."""
    remedy = f"  {clean_line(verdict.remedy, 200)}" if verdict.remedy else ""
    return f"{verdict.level.upper()}: {clean_line(verdict.cause, 300)}{remedy}"


def open_verdicts(snapshot: RunSnapshot) -> list[Verdict]:
    return [verdict for verdict in snapshot.verdicts if verdict.ended is None]


# Plain lines -----------------------------------------------------------------------------------


class PlainLines:
    """A line every few seconds, and at each change that matters."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last_at: float | None = None
        self._last_key: tuple[object, ...] = ()
        self._last_line = ""

    def show(self, snapshot: RunSnapshot, now: float, hint: str) -> None:  # noqa: ARG002
        key = (
            snapshot.state,
            snapshot.detail,
            snapshot.epoch,
            tuple((n, v.step) for n, v in snapshot.metrics.items() if is_validation(n)),
            # What is said of GPUs tells its age: that alone is no change.
            tuple((verdict.kind, verdict.culprits) for verdict in open_verdicts(snapshot)),
        )
        due = self._last_at is None or now - self._last_at >= PLAIN_EVERY_S
        line = plain_line(snapshot)
        if (key != self._last_key or due) and line != self._last_line:
            self._last_at, self._last_key, self._last_line = now, key, line
            self.say(line)

    def say(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.flush()


def plain_line(snapshot: RunSnapshot) -> str:
    """The whole run in one line."""
    parts = [
        duration(snapshot.elapsed_s) if snapshot.elapsed_s is not None else "",
        snapshot.state.value,
        clean_line(snapshot.detail, 300) if snapshot.detail else "",
        position(snapshot),
        metrics_text(snapshot),
        speed_text(snapshot) if snapshot.state is RunState.RUNNING else "",
        ranks_text(snapshot.ranks) if snapshot.state in LIVE else "",
        *(verdict_line(verdict) for verdict in open_verdicts(snapshot)),
    ]
    return "  ".join(part for part in parts if part)


# The live panel --------------------------------------------------------------------------------


class LivePanel:
    """A few lines at the bottom of the terminal, redrawn in place; what is said scrolls above."""

    def __init__(self, stream: TextIO) -> None:
        # Local: plain lines, in pipes and batch jobs, need no rich.
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=stream, highlight=False, markup=False, emoji=False)
        self._live: Live | None = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()

    def show(self, snapshot: RunSnapshot, now: float, hint: str) -> None:  # noqa: ARG002
        # Local: see above.
        from rich.text import Text

        if self._live is None:
            return
        lines = panel_lines(snapshot, hint, self._console.width)[: max(3, self._console.height - 1)]
        text = Text("\n", no_wrap=True, overflow="ellipsis").join(
            Text(line, style=style) for line, style in lines
        )
        self._live.update(text, refresh=True)

    def say(self, line: str) -> None:
        # `out` takes the text as it is: no markup, no wrapping at words.
        self._console.out(line, highlight=False)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


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
    """Text and style of each line."""
    lines = [(f"{title(snapshot)}  {snapshot.state.value}", _STATE_STYLES.get(snapshot.state, ""))]
    share = share_done(snapshot)
    done = "" if share is None else f"{bar(share, max(10, min(40, width - 60)))} {percent(share)}"
    times = [f"{duration(snapshot.elapsed_s)}"] if snapshot.elapsed_s is not None else []
    times += [f"{duration(snapshot.eta_s)} left"] if snapshot.eta_s is not None else []
    lines.append(("  ".join(p for p in (position(snapshot), done, *times) if p), ""))
    lines.append((metrics_text(snapshot), ""))
    lines.append((speed_text(snapshot), ""))
    if snapshot.detail:
        lines.append((clean_line(snapshot.detail, 300), "yellow"))
    lines += [
        (rank_line(rank), "" if rank.state.value in ("ok", "starting", "ended") else "yellow")
        for rank in snapshot.ranks[:RANKS_SHOWN]
    ]
    if len(snapshot.ranks) > RANKS_SHOWN:
        lines.append((f"and {ranks_text(snapshot.ranks[RANKS_SHOWN:])}", ""))
    for verdict in open_verdicts(snapshot):
        lines.append((verdict_line(verdict), "red" if verdict.level == "dead" else "yellow"))
    if snapshot.history_note:
        lines.append((clean_line(snapshot.history_note), "yellow"))
    lines.append((hint, "dim"))
    return [(line, style) for line, style in lines if line]


def bar(share: float, cells: int) -> str:
    """``▮▮▮▮▯▯▯▯▯▯``."""
    full = min(cells, max(0, int(share * cells)))
    return "▮" * full + "▯" * (cells - full)


def terminal_display() -> Display:
    """The display on this process's standard output."""
    return display_for(sys.stdout, os.environ)
