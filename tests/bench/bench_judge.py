"""What judging costs, and what a rank's heartbeat thread costs in a healthy run."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from pathlib import Path

from msgspec.structs import replace

from ltui.training.config.run_spec import StallPolicy
from ltui.training.diagnosis.evidence import HostEvidence, RankEvidence
from ltui.training.diagnosis.judge import judge
from ltui.training.diagnosis.judge_input import HealthHistory, JudgeInput
from ltui.training.rank.flight_recorder import MAX_ENTRIES
from ltui.training.rank.heartbeat_thread import HeartbeatThread
from ltui.training.shared.record_types import Phase
from ltui.training.state.record_fold import FoldState, fold
from ltui.training.state.run_snapshot import NodeSnapshot, NodeState
from ltui.training.tensor_queue.heartbeat_table import BEAT_S, TABLE_FILE_NAME, HeartbeatTable
from tests.bench.row import Row, row
from tests.diagnosis.recordings import load
from tests.state.records import pulse, steps

RANKS, ROUNDS = 256, 7
LARGE_RANKS, LARGE_NODES = 1024, 128
"""A large run on several machines."""


def _stalled(count: int = RANKS, nodes: tuple[NodeSnapshot, ...] = ()) -> float:
    """Seconds for one round over ranks of which one is stuck in its dataset, with evidence."""
    recorded = load("data_sleep")
    members = {"0": tuple(range(count))}
    ranks = {
        r: replace(
            _with_older_collectives(recorded.ranks[1 if r == 37 else 0]),
            rank=r,
            pid=1000 + r,
            still_s=8.0,
            groups=members,
        )
        for r in range(count)
    }
    evidence = replace(recorded, ranks=ranks)
    pulses = {
        r: dataclasses.replace(
            pulse(r, Phase.FETCH if r == 37 else Phase.BACKWARD, 0.0, batch=20),
            pid=1000 + r,
            changed_ns=evidence.taken_ns - 8_000_000_000,
        )
        for r in range(count)
    }
    state = _trained(count)
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        found = judge(
            JudgeInput(
                now_ns=evidence.taken_ns + 1_000_000_000,
                pulses=pulses,
                policy=StallPolicy(),
                fold=state,
                evidence=evidence,
                evidence_expected=True,
                now_s=evidence.taken_at,
                nodes=nodes,
            )
        )
        times.append(time.perf_counter() - began)
        assert [v.culprits for v in found.verdicts] == [(37,)]
    return statistics.median(times)


def _healthy(count: int, nodes: tuple[NodeSnapshot, ...]) -> float:
    """Seconds for one round over ranks that all train."""
    state = _trained(count)
    end = state.ranks[0].totals
    assert end is not None
    pulses = {r: pulse(r, Phase.FORWARD, end.t_ns / 1e9, batch=40) for r in range(count)}
    host = HostEvidence(memory_available_bytes=1 << 37, memory_total_bytes=1 << 38)
    history, times = HealthHistory(), []
    for round_number in range(ROUNDS):
        inputs = JudgeInput(
            now_ns=end.t_ns + 250_000_000 * round_number,
            pulses=pulses,
            policy=StallPolicy(),
            history=history,
            fold=state,
            cpu_delays=dict.fromkeys(pulses, 0.01),
            evidence_expected=True,
            now_s=1000.0,
            nodes=nodes,
            hosts={n.node: host for n in nodes},
        )
        began = time.perf_counter()
        found = judge(inputs)
        times.append(time.perf_counter() - began)
        history = found.history
        assert found.verdicts == ()
    return statistics.median(times)


def _trained(count: int) -> FoldState:
    """Return a fold in which every rank has completed the same steps."""
    one = fold(FoldState(), 0, steps(400, 0.05, fetch_s=0.005, forward_s=0.02)).ranks[0]
    return FoldState(ranks={rank: replace(one, rank=rank) for rank in range(count)})


def _with_older_collectives(evidence: RankEvidence) -> RankEvidence:
    """Return the evidence with as many collectives as a rank reports."""
    first, *_ = recorded = evidence.collectives
    missing = MAX_ENTRIES - len(recorded)
    older = (replace(first, seq=first.seq - i, retired=True) for i in range(missing, 0, -1))
    return replace(evidence, collectives=(*older, *recorded))


def _machines(nodes: int, ranks: int) -> tuple[NodeSnapshot, ...]:
    each = ranks // nodes
    return tuple(
        NodeSnapshot(
            node=node,
            name=f"node{node:03}",
            state=NodeState.CONNECTED,
            ranks=tuple(range(each * node, each * (node + 1))),
            link_age_s=0.2 if node else None,
        )
        for node in range(nodes)
    )


def _heartbeat() -> float:
    """Microseconds of one beat, on the rank's own processor time."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        (run_dir / "queue" / "1").mkdir(parents=True)
        heartbeat = HeartbeatThread(run_dir, 1, 0)
        times = []
        for _ in range(200):
            began = time.thread_time_ns()
            heartbeat._beat()
            times.append(time.thread_time_ns() - began)
        assert HeartbeatTable(run_dir / "queue" / "1").read()[0].beat_ns > 0, TABLE_FILE_NAME
    return statistics.median(times) / 1e3


def measure() -> list[Row]:
    beat_us = _heartbeat()
    nodes = _machines(LARGE_NODES, LARGE_RANKS)
    on_nodes = f"{LARGE_RANKS} ranks on {LARGE_NODES} machines"
    return [
        row(f"judging {RANKS} ranks, one stalled", _stalled() * 1e3, "ms", 200),
        row(f"judging {on_nodes}, healthy", _healthy(LARGE_RANKS, nodes) * 1e3, "ms", 250),
        row(f"judging {on_nodes}, one stalled", _stalled(LARGE_RANKS, nodes) * 1e3, "ms", 250),
        row("the heartbeat thread, one beat", beat_us, "us"),
        row("the heartbeat thread, share of a core", beat_us / BEAT_S / 1e4, "%", 0.1),
    ]
