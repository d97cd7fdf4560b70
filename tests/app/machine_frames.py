"""Constructed frames of a run on several machines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from ltui.app.live.frame import Frame
from ltui.training.state.run_snapshot import (
    GpuSnapshot,
    NodeSnapshot,
    NodeState,
    RankSnapshot,
    RankState,
    RunSnapshot,
    Verdict,
)
from ltui.widgets.view_models import LogLine
from tests.app.frames import NOW, frame, gpu, gpu_past, rank, snapshot

STALL = Verdict(
    kind="stall",
    level="stalled",
    culprits=(11,),
    waiting=tuple(r for r in range(16) if r != 11),
    nodes=(1,),
    place="augment.py:88",
    cause="rank 11 on gpu-b waits for its data; the other 15 ranks wait for it",
    began=NOW - 8.2,
)


def machine(number: int, per_node: int = 8, **changes: Any) -> NodeSnapshot:
    return replace(
        NodeSnapshot(
            node=number,
            name=name_of(number),
            host=f"{name_of(number)}.cluster",
            address=f"10.0.{number // 250}.{number % 250 + 1}",
            state=NodeState.CONNECTED,
            ranks=tuple(range(number * per_node, (number + 1) * per_node)),
            link_age_s=None if number == 0 else 0.2,
            clock_skew_s=None if number == 0 else 0.01,
        ),
        **changes,
    )


def name_of(number: int) -> str:
    return f"gpu-{'abcdefghij'[number]}" if number < 10 else f"gpu-{number}"


def unreachable(number: int, seconds: float = 12.0, per_node: int = 8) -> NodeSnapshot:
    return machine(
        number,
        per_node,
        state=NodeState.UNREACHABLE,
        link_age_s=seconds,
        note=f"no answer from 10.0.0.{number + 1} for {seconds:.0f} s",
    )


def machine_rank(number: int, per_node: int, **changes: Any) -> RankSnapshot:
    local = number % per_node
    return rank(
        number,
        node=number // per_node,
        local_rank=local,
        device=f"cuda:{local}",
        host=f"{name_of(number // per_node)}.cluster",
        step_s=0.1 + 0.001 * (number % 5),
        **changes,
    )


def machine_gpu(number: int, per_node: int) -> GpuSnapshot:
    node, index = divmod(number, per_node)
    return gpu(index, node=node, uuid=f"GPU-{number}", ranks=(number,))


def machine_run(
    nodes: int = 2,
    per_node: int = 8,
    ranks: Mapping[int, Mapping[str, Any]] | None = None,
    machines: Mapping[int, NodeSnapshot] | None = None,
    **changes: Any,
) -> RunSnapshot:
    """Return a healthy run, with other values for some ``ranks`` and other ``machines``."""
    world = nodes * per_node
    return snapshot(
        **{
            "world_size": world,
            "nodes": tuple(
                (machines or {}).get(number) or machine(number, per_node) for number in range(nodes)
            ),
            "ranks": tuple(
                replace(machine_rank(number, per_node), **(ranks or {}).get(number, {}))
                for number in range(world)
            ),
            "gpus": tuple(machine_gpu(number, per_node) for number in range(world)),
            **changes,
        }
    )


def machine_frame(run: RunSnapshot | None = None, **changes: Any) -> Frame:
    run = run or machine_run()
    lines = tuple(
        LogLine(rank=i * 5 % max(1, len(run.ranks)), text=f"batch {i}: all is well")
        for i in range(40)
    )
    series = {g.number: gpu_past() for g in run.gpus} if len(run.gpus) <= 64 else {}
    values = {"snapshot": run, "gpu_series": series, "log": lines, "log_count": 40, **changes}
    return frame(**values)


def stalled_run() -> RunSnapshot:
    """Return a run in which rank 11 on gpu-b is stalled."""
    faults: dict[int, Mapping[str, Any]] = {
        number: {"state": RankState.WAITING, "age_s": 8.2} for number in range(16)
    }
    faults[11] = {"state": RankState.STALLED, "phase": "fetch data", "age_s": 8.2}
    return machine_run(ranks=faults, verdicts=(STALL,))


def large_run(nodes: int = 128, per_node: int = 8) -> RunSnapshot:
    """Return a run of many ranks: one stalled, one dead, one slow machine, one unreachable."""
    world = nodes * per_node
    faults: dict[int, Mapping[str, Any]] = {
        number: {"state": RankState.WAITING, "age_s": 8.2} for number in range(0, world, 3)
    }
    faults |= {number: {"step_s": 0.1 + 0.05 * (number % 8)} for number in range(400, 408)}
    faults |= {number: {"global_step": 1200 - number % 8} for number in range(480, 488)}
    faults[517] = {"state": RankState.STALLED, "phase": "fetch data", "age_s": 8.2}
    faults[90] = {"state": RankState.DEAD, "note": "killed by SIGKILL", "exit_code": -9}
    return machine_run(nodes, per_node, faults, {77: unreachable(77, per_node=per_node)})
