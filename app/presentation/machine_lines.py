"""The machines of a run as plain lines, for ``ltui show`` and a run in the foreground. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ltui.app.presentation.machines import (
    LOCAL,
    NOT_REPORTING,
    clock_text,
    machine_names,
    machine_note,
    missing_machines,
    rank_labels,
    rank_range,
    rank_summary,
    ranks_by_machine,
    report_age_text,
)
from ltui.app.presentation.snapshot_text import (
    LOUD_RANK_STATES,
    rank_counts,
    ranks_text,
    slow_ranks,
)
from ltui.app.state_words import machine_state_word, waiting_reason
from ltui.training.state.run_snapshot import (
    LIVE,
    NodeSnapshot,
    NodeState,
    RankSnapshot,
    RunSnapshot,
)
from ltui.widgets.formats import duration, percent
from ltui.widgets.sanitise import clean_name


def machine_table(run: RunSnapshot) -> list[tuple[str, ...]]:
    """Return a row for each machine: name, ranks, state, slowest step, GPU use, last report."""
    names, live = machine_names(run), run.state in LIVE
    ranks = ranks_by_machine(run)
    return [
        (
            names[node.node],
            f"ranks {rank_range([r.rank for r in ranks[node.node]] or node.ranks)}",
            _state_text(node, ranks[node.node], live=live),
            _slowest_step_text(ranks[node.node]) if live else "",
            _gpu_text(run, node) if live else "",
            _report_text(node, live=live),
            clean_name(node.address or node.host or ""),
            ", ".join(part for part in (machine_note(node), clock_text(node.clock_skew_s)) if part),
        )
        for node in run.nodes
    ]


def machine_problem_lines(run: RunSnapshot) -> list[str]:
    """Return a line for each machine that does not report or has not joined yet."""
    names = machine_names(run)
    shown = [n for n in run.nodes if n.state in NOT_REPORTING or n.state is NodeState.JOINING]
    lines = []
    for node in shown:
        parts = [f"{names[node.node]}: {machine_state_word(node.state)}", machine_note(node)]
        lines.append("  ".join(part for part in parts if part))
    return lines


def listed_ranks(
    run: RunSnapshot, limit: int
) -> tuple[Sequence[RankSnapshot], tuple[RankSnapshot, ...]]:
    """Return the ranks to list and the others.

    If not all ranks of several machines can be listed, those that need help come first.
    """
    ranks: Sequence[RankSnapshot] = run.ranks
    if run.nodes and len(ranks) > limit:
        ranks = sorted(ranks, key=lambda rank: rank.state not in LOUD_RANK_STATES)
    return ranks[:limit], tuple(ranks[limit:])


def all_ranks_text(run: RunSnapshot) -> str:
    """Return the ranks by state: ``2 ranks ok``, ``1 STALLED, 3 ok``, ``8 ok, 8 no report``.

    Before the training begins, return what the ranks wait for, such as a machine that must join.
    """
    if missing_machines(run):
        return rank_summary(run)
    loud = any(rank.state in LOUD_RANK_STATES for rank in run.ranks)
    waits = "" if loud else waiting_reason(run)
    return waits or ranks_text(run.ranks, slow_ranks(run))


def padded_labels(run: RunSnapshot) -> dict[int, str]:
    """Return the labels ``gpu-b:12`` of all ranks in one width; empty on one machine."""
    labels = rank_labels(run)
    width = max(map(len, labels.values()), default=0)
    return {rank: label.ljust(width) for rank, label in labels.items()}


def _state_text(node: NodeSnapshot, ranks: Sequence[RankSnapshot], *, live: bool) -> str:
    quiet = node.state in (NodeState.CONNECTED, NodeState.ENDED)
    if (live and not quiet) or not ranks:
        return machine_state_word(node.state)
    return rank_counts(tuple(ranks))


def _slowest_step_text(ranks: Sequence[RankSnapshot]) -> str:
    slowest = max((rank.step_s for rank in ranks if rank.step_s), default=None)
    return "" if slowest is None else f"slowest step {duration(slowest)}"


def _gpu_text(run: RunSnapshot, node: NodeSnapshot) -> str:
    values = [
        gpu.utilisation_percent
        for gpu in run.gpus
        if gpu.node == node.node and gpu.utilisation_percent is not None and gpu.error is None
    ]
    return f"GPUs {percent(sum(values) / len(values) / 100)} busy" if values else ""


def _report_text(node: NodeSnapshot, *, live: bool) -> str:
    text = report_age_text(node, since_snapshot_s=0.0, live=live)
    if not text or text == LOCAL:
        return text
    return "no report yet" if node.link_age_s is None else f"last report {text} ago"
