"""Names and states of the machines of a run on several machines, and labels of ranks. Pure.

On one machine ``RunSnapshot.nodes`` is empty, and the functions about machines return an empty
result. The second part has plain lines, for ``ltui show`` and a run in the foreground.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

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
    RankState,
    RunSnapshot,
)
from ltui.widgets import formats
from ltui.widgets.formats import duration
from ltui.widgets.sanitise import clean_line, clean_name
from ltui.widgets.view_models import LAUNCHER

MAX_NAME_CELLS = 16
"""Cells of a machine's name. Of a longer one the end is shown, which contains its number."""
LOCAL = "local"
"""Text in place of the age of the last report of the machine with the run directory."""
NORMAL_AGE_S = 2
"""Seconds below which the age of a report is normal."""
NO_REPORT = "no report"
"""State of a rank whose machine does not report."""
NOT_REPORTING = frozenset(
    {
        NodeState.SILENT,
        NodeState.UNREACHABLE,
        NodeState.FROZEN,
        NodeState.AGENT_DEAD,
        NodeState.GONE,
    }
)
"""States in which the values of a machine are those of its last report."""
QUIET_STATES = frozenset({NodeState.CONNECTED, NodeState.ENDED})
"""States of which nothing is to be said."""


def machine_names(run: RunSnapshot) -> dict[int, str]:
    """Return the names of the machines by number, short enough for labels, and still unique."""
    full = {node.node: clean_name(node.name or node.host or str(node.node)) for node in run.nodes}
    for shorten in (_without_domain, _cut):
        short = {number: shorten(name) for number, name in full.items()}
        if len(set(short.values())) == len(short):
            full = short
    return full


def _without_domain(name: str) -> str:
    first, _, rest = name.partition(".")
    # The parts of an address are no domain, and the suffix of a second agent stays.
    return name if not rest or first.isdigit() or "#" in rest else first


def _cut(name: str) -> str:
    return name if len(name) <= MAX_NAME_CELLS else f"…{name[1 - MAX_NAME_CELLS :]}"


def machine_count(run: RunSnapshot) -> str:
    """Return ``2 machines, 16 ranks``; empty on one machine."""
    if not run.nodes:
        return ""
    machines = f"{formats.count(len(run.nodes))} {'machine' if len(run.nodes) == 1 else 'machines'}"
    ranks = run.world_size or len(run.ranks)
    return f"{machines}, {formats.count(ranks)} {'rank' if ranks == 1 else 'ranks'}"


def missing_machines(run: RunSnapshot) -> str:
    """Return ``1 machine unreachable``; empty if all machines of a live run report."""
    counts = Counter(node.state for node in run.nodes if node.state in NOT_REPORTING)
    if run.state not in LIVE:
        return ""
    return ", ".join(
        f"{number} {'machine' if number == 1 else 'machines'} {state.value}"
        for state, number in counts.items()
    )


def rank_label(names: Mapping[int, str], node: int, rank: int) -> str:
    """Return ``gpu-b:12``, or ``r12`` on one machine."""
    name = names.get(node)
    return f"r{rank}" if name is None else f"{name}:{rank}"


def rank_labels(run: RunSnapshot) -> dict[int, str]:
    """Return the label ``machine:rank`` of each rank; empty on one machine."""
    if not run.nodes:
        return {}
    names, nodes = machine_names(run), nodes_of_ranks(run)
    return {rank: rank_label(names, nodes[rank], rank) for rank in sorted(nodes)}


def log_labels(run: RunSnapshot) -> dict[int, str]:
    """Return the labels of the logs of several machines by source; empty on one machine."""
    launchers = {LAUNCHER - node: name for node, name in machine_names(run).items()}
    return {**rank_labels(run), **launchers}


def nodes_of_ranks(run: RunSnapshot) -> dict[int, int]:
    """Return the number of the machine of each rank, also of ranks that have not reported yet."""
    nodes = {rank: node.node for node in run.nodes for rank in node.ranks}
    # Until a rank has reported, its own field is 0 whatever its machine is.
    return nodes | {r.rank: r.node for r in run.ranks if r.node or r.rank not in nodes}


def ranks_by_machine(run: RunSnapshot) -> dict[int, list[RankSnapshot]]:
    """Return the ranks of each machine, in order of rank; machines without ranks included."""
    nodes = nodes_of_ranks(run)
    grouped: dict[int, list[RankSnapshot]] = {node.node: [] for node in run.nodes}
    for rank in sorted(run.ranks, key=lambda r: r.rank):
        grouped.setdefault(nodes[rank.rank], []).append(rank)
    return grouped


def rank_summary(run: RunSnapshot) -> str:
    """Return ``1 STALLED, 7 waiting, 8 no report``: the ranks of all machines by state."""
    if run.state not in LIVE:
        return rank_counts(run.ranks)
    nodes = nodes_of_ranks(run)
    silent = {node.node for node in run.nodes if node.state in NOT_REPORTING}
    known = tuple(r for r in run.ranks if r.state is RankState.DEAD or nodes[r.rank] not in silent)
    unknown = len(run.ranks) - len(known)
    parts = [rank_counts(known, slow_ranks(run)), f"{unknown} {NO_REPORT}" if unknown else ""]
    return ", ".join(part for part in parts if part)


def rank_range(ranks: Collection[int]) -> str:
    """Return ``0-7``; ``8 ranks`` if they do not follow each other."""
    ordered = sorted(ranks)
    if not ordered:
        return "no rank"
    if len(ordered) == 1:
        return str(ordered[0])
    if ordered[-1] - ordered[0] == len(ordered) - 1:
        return f"{ordered[0]}-{ordered[-1]}"
    return f"{len(ordered)} ranks"


def report_age_text(node: NodeSnapshot, *, since_snapshot_s: float, live: bool) -> str:
    """Return the age of the last report: ``< 2 s``, ``12 s``, ``local``, ``none`` before it.

    A normal age is not given exactly, because it would change with every frame.
    """
    if not live:
        return ""
    if node.link_age_s is None:
        return LOCAL if node.node == 0 else "none"
    age_s = node.link_age_s + max(0.0, since_snapshot_s)
    return f"< {NORMAL_AGE_S} s" if age_s < NORMAL_AGE_S else formats.age(float(int(age_s)))


def machine_utilisation(run: RunSnapshot) -> dict[int, float]:
    """Return the mean utilisation of the GPUs of each machine, 0 to 1."""
    values: dict[int, list[float]] = {}
    for gpu in run.gpus:
        if gpu.utilisation_percent is not None and gpu.error is None:
            values.setdefault(gpu.node, []).append(gpu.utilisation_percent / 100)
    return {node: sum(parts) / len(parts) for node, parts in values.items()}


def machine_note(node: NodeSnapshot) -> str:
    """Return the reason for the state of a machine; empty if it reports normally."""
    return clean_line(node.note, 120) if node.note else ""


def clock_text(skew_s: float | None) -> str:
    """Return ``clock 90 s ahead``; empty if the clock of a machine is right to a second."""
    if skew_s is None or abs(skew_s) < 1:
        return ""
    return f"clock {formats.age(abs(round(skew_s)))} {'ahead' if skew_s > 0 else 'behind'}"


def machine_table(run: RunSnapshot) -> list[tuple[str, ...]]:
    """Return a row for each machine: name, ranks, state, slowest step, GPU use, last report."""
    names, live = machine_names(run), run.state in LIVE
    ranks, use = ranks_by_machine(run), machine_utilisation(run)
    return [
        (
            names[node.node],
            f"ranks {rank_range([r.rank for r in ranks[node.node]] or node.ranks)}",
            _state_text(node, ranks[node.node], live=live),
            _slowest_step_text(ranks[node.node]) if live else "",
            f"GPUs {formats.percent(use[node.node])} busy" if live and node.node in use else "",
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
    if (live and node.state not in QUIET_STATES) or not ranks:
        return machine_state_word(node.state)
    return rank_counts(tuple(ranks))


def _slowest_step_text(ranks: Sequence[RankSnapshot]) -> str:
    slowest = max((rank.step_s for rank in ranks if rank.step_s), default=None)
    return "" if slowest is None else f"slowest step {duration(slowest)}"


def _report_text(node: NodeSnapshot, *, live: bool) -> str:
    text = report_age_text(node, since_snapshot_s=0.0, live=live)
    if not text or text == LOCAL:
        return text
    return "no report yet" if node.link_age_s is None else f"last report {text} ago"
