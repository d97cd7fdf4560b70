"""Scripted snapshots for ``ltui demo nodes``: machines that train, and typical problems.

All values are functions of the seconds since the start. There is no process, GPU or connection:
nothing here describes the machine on which the demo runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from msgspec import Struct

from ltui.training.gpu.reading import THERMAL
from ltui.training.state.run_snapshot import (
    GpuSnapshot,
    MetricValue,
    NodeSnapshot,
    NodeState,
    RankSnapshot,
    RankState,
    RunSnapshot,
    RunState,
    Throughput,
    Verdict,
)
from ltui.training.state.verdicts import VerdictKind
from ltui.widgets import formats

PERIOD_S = 180
"""Seconds after which the script repeats."""
STALL_S = (20, 50)
"""Seconds between which one rank of the second machine waits for its data."""
SLOW_S = (70, 95)
"""Seconds between which a hot GPU slows down one rank of the third machine, or of the last."""
CUT_S = (110, 150)
"""Seconds between which the last machine cannot be reached. It keeps training."""
SILENT_AFTER_S, UNREACHABLE_AFTER_S = 3, 6
STEP_S = 0.125
SAMPLES_PER_STEP = 256
"""Samples of one rank in one step."""
PHASES = ("fetch data", "forward", "backward", "optimizer")
LABEL = "simulated machines, ranks and GPUs, not those of this machine"


class Cluster(Struct, frozen=True):
    """Number of the simulated machines, and of ranks and GPUs on each."""

    nodes: int = 4
    gpus_per_node: int = 8

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def stalled_rank(self) -> int:
        """The rank that waits for its data."""
        return min(1, self.nodes - 1) * self.gpus_per_node + min(3, self.gpus_per_node - 1)

    @property
    def slow_rank(self) -> int:
        """The rank with the hot GPU."""
        return min(2, self.nodes - 1) * self.gpus_per_node + min(1, self.gpus_per_node - 1)

    def ranks_of(self, node: int) -> tuple[int, ...]:
        first = node * self.gpus_per_node
        return tuple(range(first, first + self.gpus_per_node))


def name_of(node: int) -> str:
    """Return ``sim-a`` for machine 0, and ``sim-26`` for machine 26."""
    return f"sim-{chr(ord('a') + node)}" if node < 26 else f"sim-{node}"


def _within(span: tuple[int, int], seconds: float) -> float | None:
    """Return the seconds since the begin of a span of the script; None outside of it."""
    at = seconds % PERIOD_S
    return at - span[0] if span[0] <= at < span[1] else None


def steps_at(seconds: float) -> int:
    """Return the steps that were taken until then. During the stall there are none."""
    stalled_s = STALL_S[1] - STALL_S[0]
    rounds, at = divmod(seconds, PERIOD_S)
    lost = rounds * stalled_s + min(max(0.0, at - STALL_S[0]), stalled_s)
    return math.floor((seconds - lost) / STEP_S)


def snapshot_at(cluster: Cluster, seconds: float, started_at: float) -> RunSnapshot:
    """Return the snapshot of the simulated run ``seconds`` after its start, in unix time."""
    steps = steps_at(seconds)
    stalled_s = _within(STALL_S, seconds)
    rate = cluster.world_size * SAMPLES_PER_STEP / STEP_S
    return RunSnapshot(
        id="simulated",
        name="simulated",
        preset="ltui demo nodes",
        state=RunState.RUNNING,
        detail=LABEL,
        created_at=started_at,
        started_at=started_at,
        world_size=cluster.world_size,
        epoch=steps // 1000,
        global_step=steps,
        elapsed_s=seconds,
        metrics={"train/loss": MetricValue(last=loss_at(steps), step=steps)},
        throughput=Throughput(
            samples_per_s=None if stalled_s is not None else rate,
            best_samples_per_s=rate,
            data_wait_share=0.04,
        ),
        ranks=tuple(_ranks(cluster, seconds, steps)),
        nodes=tuple(_node(cluster, node, seconds) for node in range(cluster.nodes)),
        gpus=tuple(_gpus(cluster, seconds, started_at)),
        verdicts=tuple(_verdicts(cluster, seconds, started_at)),
        taken_at=started_at + seconds,
    )


def loss_at(step: float) -> float:
    """Return the training loss at a step."""
    return 2.1 * math.exp(-step / 900) + 0.3 + 0.05 * math.sin(step * 12.9898)


# -- parts of a snapshot ---------------------------------------------------------------------------


def _node(cluster: Cluster, node: int, seconds: float) -> NodeSnapshot:
    # Addresses that are reserved for documentation.
    address = f"192.0.2.{node % 250 + 1}"
    cut_s, state = _cut_s(cluster, node, seconds), NodeState.CONNECTED
    note: str | None = None
    link_age_s = None if node == 0 else 0.1 + 0.05 * (node % 3)
    if cut_s is not None:
        link_age_s = cut_s
        state = NodeState.SILENT if cut_s >= SILENT_AFTER_S else state
        if cut_s >= UNREACHABLE_AFTER_S:
            state = NodeState.UNREACHABLE
            note = f"no answer from {address} for {math.floor(cut_s)} s"
    return NodeSnapshot(
        node=node,
        name=name_of(node),
        host=name_of(node),
        address=address,
        state=state,
        ranks=cluster.ranks_of(node),
        link_age_s=link_age_s,
        clock_skew_s=None if node == 0 else 0.004 * node,
        note=note,
    )


def _cut_s(cluster: Cluster, node: int, seconds: float) -> float | None:
    """Return the seconds since the link to a machine was cut; None if it is not cut."""
    is_cut = node == cluster.nodes - 1 and node > 0
    return _within(CUT_S, seconds) if is_cut else None


def _ranks(cluster: Cluster, seconds: float, steps: int) -> Iterator[RankSnapshot]:
    stalled_s = _within(STALL_S, seconds)
    slow = _within(SLOW_S, seconds) is not None
    phase_age_s = seconds * 8 % 1 * STEP_S
    for rank in range(cluster.world_size):
        node, local_rank = divmod(rank, cluster.gpus_per_node)
        cut_s = _cut_s(cluster, node, seconds)
        # The values of a machine that does not report stay as they were.
        own_steps = max(0, steps - math.floor((cut_s or 0.0) / STEP_S))
        step_s = STEP_S * (2.2 if slow and rank == cluster.slow_rank else 1 + 0.01 * (rank % 7))
        state, phase, age_s = RankState.OK, PHASES[(own_steps + rank // 3) % 4], phase_age_s
        if stalled_s is not None:
            state = RankState.WAITING if stalled_s > 3 else RankState.OK
            phase, age_s = "backward", stalled_s
            if rank == cluster.stalled_rank:
                state, phase = (RankState.STALLED if stalled_s > 3 else RankState.OK), "fetch data"
        yield RankSnapshot(
            rank=rank,
            local_rank=local_rank,
            node=node,
            host=name_of(node),
            device=f"cuda:{local_rank}",
            gpu_uuid=_uuid(rank),
            state=state,
            phase=phase,
            epoch=own_steps // 1000,
            batch=own_steps % 1000,
            global_step=own_steps,
            age_s=age_s if cut_s is None else cut_s,
            samples_per_s=None if stalled_s is not None else SAMPLES_PER_STEP / STEP_S,
            step_s=step_s,
            recent_step_s=tuple(
                step_s * (1 + 0.15 * math.sin((own_steps + n) * 1.7 + rank)) for n in range(12)
            ),
        )


def _gpus(cluster: Cluster, seconds: float, started_at: float) -> Iterator[GpuSnapshot]:
    slow = _within(SLOW_S, seconds) is not None
    stalled = _within(STALL_S, seconds) is not None
    for rank in range(cluster.world_size):
        node, index = divmod(rank, cluster.gpus_per_node)
        # The values of a machine that does not report stay as they were.
        second = math.floor(seconds - (_cut_s(cluster, node, seconds) or 0.0))
        hot = slow and rank == cluster.slow_rank
        busy = 100.0 if stalled else 93 + 5 * math.sin(second / 5 + rank)
        if stalled and rank == cluster.stalled_rank:
            busy = 0.0
        yield GpuSnapshot(
            index=index,
            node=node,
            uuid=_uuid(rank),
            name="NVIDIA H100 80GB HBM3",
            ranks=(rank,),
            utilisation_percent=float(round(busy)),
            memory_used_bytes=61 * 10**9,
            memory_total_bytes=85_520_809_984,
            power_w=110.0 if stalled else 560 + 60 * math.sin(second / 4 + rank),
            power_limit_w=700.0,
            temperature_c=88 if hot else round(62 + 4 * math.sin(second / 20 + rank)),
            slowdown_temperature_c=89.0,
            sm_clock_mhz=870 if hot else 1980,
            throttle_reasons=(THERMAL,) if hot else (),
            sampled_at=started_at + second,
        )


def _uuid(rank: int) -> str:
    return f"GPU-5eed0000-0000-4000-8000-{rank:012}"


def _verdicts(cluster: Cluster, seconds: float, started_at: float) -> Iterator[Verdict]:
    now, last = started_at + seconds, cluster.nodes - 1
    stalled_s, slow_s = _within(STALL_S, seconds), _within(SLOW_S, seconds)
    cut_s = _cut_s(cluster, last, seconds)
    if stalled_s is not None and stalled_s >= 3:
        rank = cluster.stalled_rank
        node = rank // cluster.gpus_per_node
        waiting = tuple(other for other in range(cluster.world_size) if other != rank)
        others = f"; the other {len(waiting)} ranks wait in all_reduce" if waiting else ""
        yield Verdict(
            kind=VerdictKind.WORKER_FROZEN,
            level="stalled",
            culprits=(rank,),
            waiting=waiting,
            nodes=(node,),
            place="augment.py:88",
            cause=f"rank {rank} on {name_of(node)} waits for a DataLoader worker{others}",
            began=now - stalled_s,
        )
    if slow_s is not None and slow_s >= 5:
        rank = cluster.slow_rank
        node, index = divmod(rank, cluster.gpus_per_node)
        yield Verdict(
            kind=VerdictKind.STRAGGLER,
            level="slow",
            culprits=(rank,),
            nodes=(node,),
            cause=(
                f"rank {rank} on {name_of(node)} takes 2.2 times as long as the others for a step: "
                f"its GPU {name_of(node)}:{index} is slowed down by heat"
            ),
            began=now - slow_s,
            evidence={"gpus": [index]},
        )
    if cut_s is not None and cut_s >= UNREACHABLE_AFTER_S:
        machine = name_of(last)
        yield Verdict(
            kind=VerdictKind.NODE_UNREACHABLE,
            level="warning",
            nodes=(last,),
            place=f"machine {machine}",
            cause=(
                f"machine {machine} does not answer: the link is cut or it is down; "
                f"{formats.rank_words(cluster.ranks_of(last))} cannot be observed"
            ),
            remedy=f"Check the link and whether {machine} runs (ping, ssh).",
            began=now - cut_s,
        )
