"""Text for the parts of a run snapshot: program, progress, metrics, ranks, checkpoints. Pure.

The command line, plain progress lines and the dashboard share these functions.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from difflib import get_close_matches

from ltui.app.presentation.metric_names import ordered_metrics
from ltui.app.state_words import open_verdicts, rank_note
from ltui.training.state.good_checkpoints import (
    FINITE,
    advice_before_nan,
    badness,
    nan_since,
    newest_checkpoint,
)
from ltui.training.state.metric_name_patterns import LEARNING_RATE, is_evaluation, is_training_loss
from ltui.training.state.run_snapshot import (
    LIVE,
    CheckpointInfo,
    GpuSnapshot,
    JobSnapshot,
    MetricValue,
    RankSnapshot,
    RankState,
    RunSnapshot,
    RunState,
)
from ltui.widgets import formats
from ltui.widgets.formats import NA, age, metric, percent
from ltui.widgets.sanitise import clean_line, clean_name

SAMPLES_PER_S, STEPS_PER_S = "samples/s", "steps/s"
_SAVED_WHEN = {
    "request": "saved on request",
    "stop": "saved at the stop",
    "end": "saved at the end",
    "best": "saved as the best",
}
"""Words for the reasons that a rank gives for a checkpoint."""
SUPERSEDED = "no longer part of the run"
"""Words for a checkpoint of steps that a resume from an earlier step has left."""
METRICS_SHOWN = 5
"""Maximum number of metrics in one line."""
PROGRAM_CHARACTERS = 60
"""Maximum characters of a command in a title."""
SLOW_WORD = "SLOW"
_METRIC_STOP = re.compile(r"when (.+) (?:<=|>=|<|>) \S+")
LOUD_RANK_STATES = frozenset({RankState.STALLED, RankState.DEAD})
"""States of ranks that need help; they are shown in capitals."""


def program_text(run: RunSnapshot) -> str:
    """Return the preset or the command of a run; empty if neither is known."""
    if run.preset:
        return run.preset
    return " ".join(run.command) if run.command else ""


def script_checkpoints_title(snapshot: RunSnapshot) -> str:
    """Return the heading of the list of checkpoints that ltui has not saved."""
    if snapshot.program is not None:
        return "files that the program saved with torch.save"
    return "checkpoints of the script's own callbacks"


def title(snapshot: RunSnapshot) -> str:
    """Return the name and the program of a run: ``brave-owl · quickstart``."""
    program = program_text(snapshot)
    name = clean_name(snapshot.name)
    return f"{name} · {clean_name(program, PROGRAM_CHARACTERS)}" if program else name


def position(snapshot: RunSnapshot) -> str:
    """Return ``epoch 3/30 step 1204/2930``; empty before the first step.

    Steps are plain digits, so that they can be pasted into ``--at-step``.
    """
    parts = []
    if snapshot.epoch is not None:
        parts.append(f"epoch {formats.step(shown_epoch(snapshot), total_epochs(snapshot))}")
    if snapshot.global_step is not None:
        parts.append(f"step {formats.step(snapshot.global_step, total_steps(snapshot))}")
    return "  ".join(parts)


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


def metrics_text(snapshot: RunSnapshot) -> str:
    """Return the validation metrics and the loss: ``val/acc 0.9510 train/loss 0.8412``.

    A run that logs no loss shows the other metrics that it logs.
    """
    ordered = ordered_metrics(snapshot)
    loss = next((name for name, _ in ordered if is_training_loss(name)), None)
    others = loss is None
    chosen = [
        (name, value)
        for name, value in ordered
        if is_evaluation(name) or name == loss or (others and not LEARNING_RATE.search(name))
    ]
    return "  ".join(f"{clean_name(n, 40)} {metric(v.last)}" for n, v in chosen[:METRICS_SHOWN])


def speed_text(snapshot: RunSnapshot) -> str:
    """Return ``2.1 k samples/s 4 % waiting for data``."""
    speed = snapshot.throughput
    parts = [current_rate(snapshot)] if current_rate(snapshot) else []
    if speed.data_wait_share is not None:
        parts.append(data_wait_text(speed.data_wait_share))
    return "  ".join(parts)


def rate(samples_per_s: float | None) -> str:
    """Return ``1 107 samples/s`` or ``31.4 k samples/s``: every throughput is written like this."""
    return formats.rate(samples_per_s, SAMPLES_PER_S)


def current_rate(snapshot: RunSnapshot) -> str:
    """Return ``1 107 samples/s``, or ``17.6 steps/s`` of a program whose samples are not known."""
    speed = snapshot.throughput
    if speed.samples_per_s is not None:
        return rate(speed.samples_per_s)
    return "" if speed.steps_per_s is None else formats.rate(speed.steps_per_s, STEPS_PER_S)


def data_wait_text(share: float) -> str:
    """Return ``4 % waiting for data``."""
    return f"{percent(share)} waiting for data"


def rank_line(snapshot: RunSnapshot, rank: RankSnapshot, label: str | None = None) -> str:
    """Return one rank as a line of columns. ``label``: its label on several machines."""
    step = "" if rank.global_step is None else f"step {rank.global_step}"
    note = rank_note(snapshot, rank)
    device = clean_name(rank.device or "")
    # A rank that has ended is in no phase, and its state says so.
    ended = rank.state is RankState.ENDED
    phase, since = ("", "") if ended else (clean_name(rank.phase or NA), age(rank.age_s))
    return (
        f"{label or f'r{rank.rank}':<4} {device:<7} {step:<12} {phase:<11} "
        f"{since:>7}  {rank_word(rank.state)}{f'  {note}' if note else ''}"
    )


def rank_word(state: RankState) -> str:
    """Return the state of a rank, in capitals if it needs help."""
    word: str = state.value
    return word.upper() if state in LOUD_RANK_STATES else word


def ranks_text(ranks: tuple[RankSnapshot, ...], slow: Collection[int] = ()) -> str:
    """Return ``2 ranks ok`` or ``1 STALLED, 3 ok``."""
    if not ranks:
        return ""
    if all(rank.state is RankState.UNKNOWN and rank.phase is None for rank in ranks):
        return "the ranks are starting"
    if len({rank.state for rank in ranks}) == 1 and not slow:
        return f"{len(ranks)} rank{'s' if len(ranks) > 1 else ''} {rank_word(ranks[0].state)}"
    return rank_counts(ranks, slow)


def rank_counts(ranks: tuple[RankSnapshot, ...], slow: Collection[int] = ()) -> str:
    """Return ``4 ok``; ranks that need help come first: ``1 STALLED, 3 ok``, ``1 SLOW, 1 ok``.

    ``slow``: ranks that move, but more slowly than the others.
    """
    moving = (RankState.OK, RankState.RUNNING)
    words = Counter(
        SLOW_WORD if rank.rank in slow and rank.state in moving else rank_word(rank.state)
        for rank in ranks
    )
    ordered = sorted(words.items(), key=lambda item: not item[0].isupper())
    return ", ".join(f"{number} {word}" for word, number in ordered)


def slow_ranks(snapshot: RunSnapshot) -> frozenset[int]:
    """Return the ranks of a live run that a verdict calls slow."""
    verdicts = open_verdicts(snapshot) if snapshot.state in LIVE else []
    return frozenset(rank for v in verdicts if v.level == "slow" for rank in v.culprits)


def stop_text(stop: str, metrics: Mapping[str, MetricValue]) -> str:
    """Return a scheduled stop; with a caution if the run has not logged its metric."""
    condition = _METRIC_STOP.fullmatch(stop)
    if condition is None or not metrics or condition[1] in metrics:
        return stop
    close = get_close_matches(condition[1], list(metrics), n=1)
    meant = f"; did you mean {close[0]}?" if close else ""
    return f"{stop} (the run has not logged {condition[1]}{meant})"


def checkpoint_text(checkpoint: CheckpointInfo, *, with_path: bool = False) -> str:
    """Return ``step 1204, finite, checksum ok, 1.2 MiB``.

    ``with_path`` gives ``step 1204, finite, checksum ok, saved on request, 1.2 MiB: /path``, for
    the command line.
    """
    checksum = {True: "checksum ok", False: "DAMAGED", None: "checksum not checked"}[checkpoint.ok]
    parts = [f"step {checkpoint.global_step}", weights_text(checkpoint), checksum]
    if checkpoint.superseded:
        parts.append(SUPERSEDED)
    if with_path and checkpoint.reason:
        parts.append(saved_when(checkpoint.reason))
    if checkpoint.size_bytes is not None:
        parts.append(formats.size(checkpoint.size_bytes))
    text = ", ".join(parts)
    return f"{text}: {clean_line(checkpoint.path)}" if with_path else text


def saved_when(reason: str) -> str:
    """Return when a checkpoint was saved: ``saved on request``."""
    return _SAVED_WHEN.get(reason) or clean_line(reason)


def weights_text(checkpoint: CheckpointInfo) -> str:
    """Return ``finite``, ``NaN weights`` or ``weights not checked``."""
    if checkpoint.weights is None:
        return "weights not checked"
    return FINITE if checkpoint.weights == FINITE else f"{clean_name(checkpoint.weights)} weights"


def newest_checkpoint_text(snapshot: RunSnapshot) -> str:
    """Return ``newest checkpoint: step 196, NaN weights, ...; the last one before the NaN ...``.

    Empty if there is no checkpoint.
    """
    newest = newest_checkpoint(snapshot.checkpoints)
    if newest is None:
        return ""
    text, since = checkpoint_text(newest), nan_since(snapshot.verdicts)
    if badness(newest, since) is not None:
        text += f"; {advice_before_nan(snapshot.checkpoints, since)}"
    return f"newest checkpoint: {text}"


def gpu_label(gpu: GpuSnapshot, machines: Mapping[int, str] | None = None) -> str:
    """Return the label of a GPU, or its index; ``gpu-b:0`` if there are names of machines."""
    label: str = clean_name(gpu.label or str(gpu.index))
    name = (machines or {}).get(gpu.node)
    return label if name is None else f"{name}:{label}"


def gpu_name(model: str | None) -> str:
    """Return the model of a GPU without the manufacturer: ``H100 80GB HBM3``."""
    return clean_name((model or NA).removeprefix("NVIDIA "))


def percent_of_time(value: float | None) -> str:
    """Return a percentage of the driver, 0 to 100, as ``41 %``."""
    return percent(None if value is None else value / 100)


def job_text(job: JobSnapshot) -> str:
    """Return ``12 on n[07-08], partition gpu``."""
    on = f" on {clean_name(job.node_names)}" if job.node_names else ""
    partition = f", partition {clean_name(job.partition)}" if job.partition else ""
    return f"{clean_name(job.id)}{on}{partition}"
