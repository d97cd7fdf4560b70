"""Machines and ranks of simulated runs on several machines, for tests of the judge."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ltui.training.config.run_spec import StallPolicy
from ltui.training.diagnosis.judge import Judgement, judge
from ltui.training.diagnosis.judge_input import HealthHistory, JudgeInput
from ltui.training.shared.record_types import PulseState
from ltui.training.state.record_fold import FoldState, fold
from ltui.training.state.run_snapshot import NodeSnapshot, NodeState
from tests.state.records import SECOND, steps

NAMES = "abcdefgh"


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
    """Judge a run at ``now_s``."""
    by_rank = pulses if isinstance(pulses, Mapping) else {p.rank: p for p in pulses if p}
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
