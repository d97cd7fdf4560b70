"""Generated snapshots of a run that trains, as a supervisor would publish them."""

from __future__ import annotations

import random
from collections.abc import Iterator

from ltui.training.state.run_snapshot import (
    GpuSnapshot,
    MetricValue,
    RankSnapshot,
    RankState,
    RunSnapshot,
    RunState,
    Throughput,
    Verdict,
)

BEGAN = 1_800_000_000.0
PHASES = ("fetch", "forward", "backward", "optimizer")


def snapshots(
    ranks: int, count: int, *, period_s: float = 0.25, steps_per_s: float = 10.0
) -> Iterator[RunSnapshot]:
    """Yield ``count`` snapshots. A stall begins at half of them, and the last one is an end."""
    noise = random.Random(5)
    recent = [[noise.random() / 10 for _ in range(32)] for _ in range(ranks)]
    for number in range(count):
        at = BEGAN + number * period_s
        step = int(number * period_s * steps_per_s)
        new = step - int((number - 1) * period_s * steps_per_s)
        for times in recent:
            times.extend(noise.random() / 10 for _ in range(new))
            del times[: len(times) - 32]
        stalled = count // 2 <= number < count // 2 + 20
        verdict = Verdict(kind="hang", level="stalled", culprits=(0,), cause="rank 0 sleeps")
        yield RunSnapshot(
            id="brave-owl-3f2a",
            name="brave-owl",
            state=RunState.FINISHED if number == count - 1 else RunState.RUNNING,
            taken_at=at,
            world_size=ranks,
            global_step=step,
            elapsed_s=at - BEGAN,
            metrics={"val/loss": MetricValue(last=noise.random(), step=step)},
            throughput=Throughput(samples_per_s=noise.random() * 100),
            verdicts=(verdict,) if stalled else (),
            ranks=tuple(
                RankSnapshot(
                    rank=rank,
                    pid=4000 + rank,
                    host="box",
                    device=f"cuda:{rank % 8}",
                    state=RankState.OK,
                    phase=noise.choice(PHASES),
                    epoch=step // 1000,
                    batch=step % 1000,
                    global_step=step,
                    age_s=noise.random() / 10,
                    samples_per_s=64 * noise.random(),
                    step_s=noise.random() / 10,
                    data_wait_share=noise.random(),
                    recent_step_s=tuple(recent[rank]),
                    cpu_percent=100 + noise.random(),
                    rss_bytes=3 << 30,
                )
                for rank in range(ranks)
            ),
            gpus=tuple(
                GpuSnapshot(
                    index=index,
                    uuid=f"GPU-{index}",
                    name="NVIDIA H200",
                    utilisation_percent=float(noise.randrange(90, 100)),
                    memory_used_bytes=61 << 30,
                    memory_total_bytes=140 << 30,
                    power_w=600 + noise.random(),
                    ranks=(index,),
                    sampled_at=at,
                )
                for index in range(min(ranks, 8))
            ),
        )
