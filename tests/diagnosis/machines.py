"""Machines, ranks and evidence of simulated runs, for tests of the judge."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from ltui.training.config.run_spec import StallPolicy
from ltui.training.diagnosis.evidence import (
    Evidence,
    Frame,
    ProcessActivity,
    RankEvidence,
    ThreadStack,
)
from ltui.training.diagnosis.judge import Judgement, judge
from ltui.training.diagnosis.judge_input import HealthHistory, JudgeInput
from ltui.training.shared.record_types import PulseState
from ltui.training.state.record_fold import FoldState, fold
from ltui.training.state.run_snapshot import NodeSnapshot, NodeState
from tests.state.records import SECOND, steps

NAMES = "abcdefgh"
ALL_REDUCE = Frame(
    file="/env/site-packages/torch/distributed/distributed_c10d.py",
    line=3000,
    function="all_reduce",
)
DATASET = Frame(file="/home/user/data.py", line=7, function="__getitem__")


def machine(node: int, ranks: Iterable[int], age_s: float | None = 0.2, **fields: Any):
    """Return a connected machine named by a letter; node 0 has no link."""
    return NodeSnapshot(
        node=node,
        name=NAMES[node],
        host=NAMES[node],
        ranks=tuple(ranks),
        link_age_s=None if node == 0 else age_s,
        **{"state": NodeState.CONNECTED, **fields},
    )


def two_machines(age_s: float = 0.2, state: NodeState = NodeState.CONNECTED, **fields: Any):
    """Return machine a with ranks 0 and 1, and machine b with ranks 2 and 3."""
    return (machine(0, (0, 1)), machine(1, (2, 3), age_s, state=state, **fields))


@functools.cache
def trained(ranks: int = 4, step_s: float = 0.1) -> FoldState:
    """Return a fold after twenty steps of each rank."""
    state = FoldState()
    for rank in range(ranks):
        state = fold(state, rank, steps(20, step_s))
    return state


def at(
    now_s: float,
    pulses: Iterable[PulseState | None] | Mapping[int, PulseState | None],
    nodes: tuple[NodeSnapshot, ...] = (),
    **more: Any,
) -> Judgement:
    """Judge a run at ``now_s``. Evidence is expected if there is some."""
    by_rank = pulses if isinstance(pulses, Mapping) else {p.rank: p for p in pulses if p}
    more.setdefault("evidence_expected", more.get("evidence") is not None)
    return judge(
        JudgeInput(
            now_ns=round(now_s * SECOND),
            now_s=more.pop("wall_s", 1000 + now_s),
            pulses=by_rank,
            nodes=nodes,
            policy=StallPolicy(),
            history=more.pop("history", HealthHistory()),
            fold=more.pop("fold", None) or trained(),
            **more,
        )
    )


# -- evidence --------------------------------------------------------------------------------------


def stack(*frames: Frame) -> ThreadStack:
    """Return the stack of a main thread, innermost frame first."""
    return ThreadStack(name="MainThread", main=True, frames=frames)


def process(pid: int = 100, **fields: Any) -> ProcessActivity:
    """Return a process that did nothing for two seconds."""
    nothing = {"state": "S", "interval_s": 2.0, "cpu_share": 0.0, "switches": 0}
    return ProcessActivity(pid=pid, **{**nothing, **fields})


def frozen(rank: int, *frames: Frame, **fields: Any) -> RankEvidence:
    """Return a rank whose process does nothing, in these frames."""
    of_rank = {"stacks": (stack(*frames),), "process": process(100 + rank), **fields}
    return RankEvidence(rank=rank, pid=100 + rank, alive=True, **of_rank)


def evidence_of(*ranks: RankEvidence, taken_s: float = 10.0) -> Evidence:
    """Return the evidence of these ranks."""
    by_rank = {rank.rank: rank for rank in ranks}
    return Evidence(taken_at=1000 + taken_s, taken_ns=round(taken_s * SECOND), ranks=by_rank)


def with_rank(evidence: Evidence, rank: int, **fields: Any) -> Evidence:
    """Return the evidence with other values of one rank."""
    changed = replace(evidence.ranks[rank], **fields)
    return replace(evidence, ranks={**evidence.ranks, rank: changed})


def with_each(evidence: Evidence, **fields: Any) -> Evidence:
    """Return the evidence with these values of every rank."""
    ranks = {rank: replace(of_rank, **fields) for rank, of_rank in evidence.ranks.items()}
    return replace(evidence, ranks=ranks)
