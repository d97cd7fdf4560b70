"""Property test: healthy runs on several machines get no verdict, however late reports are."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from ltui.training.diagnosis.judge import Judgement
from ltui.training.diagnosis.judge_input import HealthHistory
from ltui.training.shared.record_types import Phase, PulseState
from ltui.training.state.record_fold import FoldState, fold
from ltui.training.state.run_snapshot import NodeSnapshot, NodeState, RankState
from tests.diagnosis.machines import at, machine
from tests.state.records import pulse, step

TICK_S = 0.25
PHASES = ((0.0, Phase.FETCH), (0.1, Phase.FORWARD), (0.4, Phase.BACKWARD), (0.9, Phase.OPTIMIZER))
"""Fraction of a step -> the phase that begins there."""


@dataclass(frozen=True)
class Link:
    """How reports of one machine arrive."""

    every_s: float
    """Seconds between two reports that arrive."""
    delay_s: float
    """Age of what a report contains when it arrives."""
    clock_error_s: float
    """Error of the estimate of the clock's offset."""
    skew_s: float


links = st.builds(
    Link,
    every_s=st.sampled_from([0.25, 0.5, 1.0, 1.8]),
    delay_s=st.floats(0.0, 0.2),
    clock_error_s=st.floats(-0.05, 0.05),
    skew_s=st.sampled_from([-90.0, 0.0, 90.0]),
)


class Run:
    """A run in which every step takes about as long on every rank, seen through links."""

    def __init__(self, nodes: list[Link], step_s: float, seed: int) -> None:
        self.links = [Link(TICK_S, 0.0, 0.0, 0.0), *nodes]
        self.ranks = 2 * len(self.links)
        noise = random.Random(seed)
        self.ends_s = [step_s * 0.0]
        while self.ends_s[-1] < 120.0:
            self.ends_s.append(self.ends_s[-1] + step_s * noise.uniform(0.9, 1.1))
        self.fold = FoldState()
        self.folded = [0] * len(self.links)
        self.received_s = [0.0] * len(self.links)

    def place(self, at_s: float) -> tuple[int, Phase, float]:
        """Return the step that runs at a time, its phase and when the phase began."""
        number = next(i for i, end in enumerate(self.ends_s) if end > at_s)
        begin, end = self.ends_s[number - 1], self.ends_s[number]
        fraction, phase = [p for p in PHASES if begin + p[0] * (end - begin) <= at_s][-1]
        return number, phase, begin + fraction * (end - begin)

    def receive(self, node: int, now_s: float) -> float:
        """Take the report of a machine if one arrives; return the time that it shows."""
        link = self.links[node]
        if now_s - self.received_s[node] >= link.every_s:
            self.received_s[node] = now_s
        shown_s = max(0.01, self.received_s[node] - link.delay_s)
        number, _, _ = self.place(shown_s)
        first = self.folded[node] + 1
        rows = [
            step(i, self.ends_s[i], step_s=self.ends_s[i] - self.ends_s[i - 1], batch=i - 1,
                 fetch_s=0.01, forward_s=0.3 * (self.ends_s[i] - self.ends_s[i - 1]))
            for i in range(first, number)
        ]  # fmt: skip
        for rank in (2 * node, 2 * node + 1) if rows else ():
            self.fold = fold(self.fold, rank, rows)
        self.folded[node] = max(self.folded[node], number - 1)
        return shown_s

    def pulse(self, rank: int, shown_s: float) -> PulseState:
        link = self.links[rank // 2]
        number, phase, began_s = self.place(shown_s)
        made = pulse(
            rank, phase, began_s + link.clock_error_s, batch=number - 1, global_step=number - 1
        )
        return replace(made, changed_wall_s=1000 + began_s + link.skew_s)

    def judged(self, now_s: float, history: HealthHistory) -> Judgement:
        nodes, pulses = list[NodeSnapshot](), dict[int, PulseState | None]()
        for node, link in enumerate(self.links):
            shown_s = self.receive(node, now_s)
            ranks = (2 * node, 2 * node + 1)
            pulses |= {r: self.pulse(r, shown_s) for r in ranks}
            age_s = now_s - self.received_s[node]
            late = NodeState.SILENT if age_s > 1.0 else NodeState.CONNECTED
            nodes.append(machine(node, ranks, age_s, state=late, clock_skew_s=link.skew_s))
        return at(
            now_s, pulses, tuple(nodes), fold=self.fold, history=history, evidence_expected=True
        )


@settings(max_examples=10)
@given(
    st.lists(links, min_size=1, max_size=3),
    st.sampled_from([0.05, 0.4, 1.5, 3.0]),
    st.integers(0, 1000),
)
def test_a_healthy_run_gets_no_verdict(nodes: list[Link], step_s: float, seed: int) -> None:
    run, history, now_s = Run(nodes, step_s, seed), HealthHistory(), 5.0
    while now_s < 30.0:
        now_s += TICK_S
        judgement = run.judged(now_s, history)
        history = judgement.history
        assert judgement.verdicts == ()
        assert set(judgement.states.values()) == {RankState.OK}
