"""Text for the parts of a run snapshot: program, progress, metrics, ranks, checkpoints. Pure.

The command line, plain progress lines and the dashboard share these functions.
"""

from __future__ import annotations

import math

from ltui.app.state_words import rank_note
from ltui.training.state.metric_name_patterns import (
    LEARNING_RATE,
    TRAIN_LOSS_NAMES,
    is_evaluation,
)
from ltui.training.state.run_snapshot import (
    CheckpointInfo,
    MetricValue,
    RankSnapshot,
    RankState,
    RunSnapshot,
    RunState,
)
from ltui.widgets import formats
from ltui.widgets.formats import NA, age, metric, percent, quantity
from ltui.widgets.sanitise import clean_line, clean_name

METRICS_SHOWN = 5
"""Maximum number of metrics in one line."""
LOUD_RANK_STATES = frozenset({RankState.STALLED, RankState.DEAD})
"""States of ranks that need help; they are shown in capitals."""


def program_text(run: RunSnapshot) -> str:
    """Return the preset or the command of a run; empty if neither is known."""
    if run.preset:
        return run.preset
    return " ".join(run.command) if run.command else ""


def title(snapshot: RunSnapshot) -> str:
    """Return the name and the program of a run: ``brave-owl · quickstart``."""
    program = program_text(snapshot)
    name = clean_name(snapshot.name)
    return f"{name} · {clean_name(program)[:60]}" if program else name


def position(snapshot: RunSnapshot) -> str:
    """Return ``epoch 3/30 step 1204/2930``; empty before the first step.

    Steps are plain digits, so that they can be pasted into ``--at-step``.
    """
    parts = []
    if snapshot.epoch is not None:
        parts.append(f"epoch {_out_of(shown_epoch(snapshot), total_epochs(snapshot))}")
    if snapshot.global_step is not None:
        parts.append(f"step {_out_of(snapshot.global_step, total_steps(snapshot))}")
    return "  ".join(parts)


def _out_of(done: int | None, total: int | None) -> str:
    return f"{done}" if total is None else f"{done}/{total}"


def shown_epoch(snapshot: RunSnapshot) -> int | None:
    """Return the epoch counted from 1, and never more than the last epoch."""
    if snapshot.epoch is None:
        return None
    shown = snapshot.epoch + 1
    total = total_epochs(snapshot)
    return shown if total is None else min(shown, total)


def total_epochs(snapshot: RunSnapshot) -> int | None:
    """Return the number of epochs, or None if it is not limited."""
    return snapshot.max_epochs if snapshot.max_epochs and snapshot.max_epochs > 0 else None


def total_steps(snapshot: RunSnapshot) -> int | None:
    """Return the number of steps, or None if it is not limited."""
    return snapshot.max_steps if snapshot.max_steps and snapshot.max_steps > 0 else None


def done_fraction(snapshot: RunSnapshot) -> float | None:
    """Return the completed fraction of the run, 0 to 1, or None if its length is unknown."""
    if snapshot.state is RunState.FINISHED:
        return 1.0
    total = total_steps(snapshot)
    if total and snapshot.global_step is not None:
        return min(1.0, snapshot.global_step / total)
    return None


def training_loss(snapshot: RunSnapshot) -> tuple[str, MetricValue] | None:
    """Return name and value of the training loss, whichever name the run uses."""
    for name in TRAIN_LOSS_NAMES:
        if name in snapshot.metrics:
            return name, snapshot.metrics[name]
    for name, value in snapshot.metrics.items():
        if "loss" in name and not is_evaluation(name):
            return name, value
    return None


def metrics_text(snapshot: RunSnapshot, limit: int = METRICS_SHOWN) -> str:
    """Return the loss and the validation metrics: ``train/loss 0.8412 val/acc 0.9510``.

    A run that logs no loss shows the other metrics that it logs.
    """
    loss = training_loss(snapshot)
    chosen = [loss] if loss else []
    by_name = sorted(snapshot.metrics.items())
    chosen += [(n, v) for n, v in by_name if is_evaluation(n)]
    if loss is None:
        chosen += [
            (n, v) for n, v in by_name if not is_evaluation(n) and not LEARNING_RATE.search(n)
        ]
    return "  ".join(f"{clean_name(n, 40)} {metric_value_text(v.last)}" for n, v in chosen[:limit])


def metric_value_text(value: float) -> str:
    """Return four significant digits; ``not finite`` for NaN and infinities."""
    return metric(value) if math.isfinite(value) else "not finite"


def speed_text(snapshot: RunSnapshot) -> str:
    """Return ``2.1 k samples/s 4 % waiting for data``."""
    speed = snapshot.throughput
    parts = []
    if speed.samples_per_s is not None:
        parts.append(quantity(speed.samples_per_s, "samples/s"))
    if speed.data_wait_share is not None:
        parts.append(f"{percent(speed.data_wait_share)} waiting for data")
    return "  ".join(parts)


def rank_line(snapshot: RunSnapshot, rank: RankSnapshot) -> str:
    """Return one rank as a line of columns."""
    step = "" if rank.global_step is None else f"step {rank.global_step}"
    note = rank_note(snapshot, rank)
    return (
        f"r{rank.rank:<3} {rank.device or '':<7} {step:<12} {rank.phase or NA:<11} "
        f"{age(rank.age_s):>7}  {rank_word(rank.state)}{f'  {note}' if note else ''}"
    )


def rank_word(state: RankState) -> str:
    """Return the state of a rank, in capitals if it needs help."""
    word: str = state.value
    return word.upper() if state in LOUD_RANK_STATES else word


def ranks_text(ranks: tuple[RankSnapshot, ...]) -> str:
    """Return ``2 ranks ok`` or ``3 ok, 1 STALLED``."""
    if not ranks:
        return ""
    if all(rank.state is RankState.UNKNOWN and rank.phase is None for rank in ranks):
        return "no telemetry from the script yet"
    states: dict[str, int] = {}
    for rank in ranks:
        states[rank_word(rank.state)] = states.get(rank_word(rank.state), 0) + 1
    if len(states) == 1:
        return f"{len(ranks)} rank{'s' if len(ranks) > 1 else ''} {next(iter(states))}"
    return ", ".join(f"{number} {state}" for state, number in states.items())


def checkpoint_text(checkpoint: CheckpointInfo, *, with_path: bool = False) -> str:
    """Return ``step 1 204, verified, 1.2 MiB``.

    ``with_path`` gives ``step 1204, verified, request, 1.2 MiB: /path``, for the command line: its
    step is plain digits, so that it can be pasted into another command.
    """
    damaged = "DAMAGED" if with_path else "damaged"
    step = checkpoint.global_step if with_path else formats.step(checkpoint.global_step)
    parts = [f"step {step}"]
    parts.append({True: "verified", False: damaged, None: "not verified"}[checkpoint.ok])
    if with_path and checkpoint.reason:
        parts.append(checkpoint.reason)
    if checkpoint.size_bytes is not None:
        parts.append(formats.size(checkpoint.size_bytes))
    text = ", ".join(parts)
    return f"{text}: {clean_line(checkpoint.path)}" if with_path else text
