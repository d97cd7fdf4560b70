"""Constructed frames: a run as its feed would show it, at one moment."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from msgspec.structs import replace

from ltui.app.live.frame import Frame
from ltui.app.live.gpu_history import GpuSeries
from ltui.training.state.gpu_values import GPU_READINGS
from ltui.training.state.run_snapshot import (
    CheckpointInfo,
    GpuSnapshot,
    MetricValue,
    RankSnapshot,
    RankState,
    RunSnapshot,
    RunState,
    Throughput,
)
from ltui.training.store.curve_reader import Curve
from ltui.widgets.tone import Tone
from ltui.widgets.view_models import LogLine

NOW = 1_800_000_000.0


def curve(values: Any, *, first: int = 1, per_epoch: int = 100, step_s: float = 0.1) -> Curve:
    mean = np.asarray(values, dtype=np.float64)
    steps = np.arange(first, first + len(mean), dtype=np.float64)
    return Curve(
        steps=steps,
        epochs=np.floor((steps - 1) / per_epoch),
        times=NOW - 60 + steps * step_s,
        mean=mean,
        low=mean,
        high=mean,
        count=np.ones(len(mean)),
    )


def loss_curve(points: int = 400) -> Curve:
    noise = np.random.default_rng(7).normal(0, 0.08, points)
    return curve(2.3 * np.exp(-np.arange(points) / 150) + 0.15 + noise * 0.5)


def rank(number: int, **changes: Any) -> RankSnapshot:
    return replace(
        RankSnapshot(
            rank=number, local_rank=number, pid=4000 + number, host="box", device=f"cuda:{number}",
            state=RankState.OK, phase="backward", epoch=2, batch=4, global_step=1204, age_s=0.012,
            samples_per_s=7800.0, step_s=0.1, data_wait_share=0.04,
            recent_step_s=tuple(0.1 + 0.01 * (i % 3) for i in range(32)),
            cpu_percent=104.0, rss_bytes=3 << 30,
        ),
        **changes,
    )  # fmt: skip


def gpu(index: int, **changes: Any) -> GpuSnapshot:
    return replace(
        GpuSnapshot(
            index=index, uuid=f"GPU-{index}", name="NVIDIA H200", utilisation_percent=98.0,
            memory_used_bytes=61 << 30, memory_total_bytes=140 << 30, power_w=612.0,
            power_limit_w=700.0, temperature_c=64.0, sm_clock_mhz=1980.0, ranks=(index,),
            sampled_at=NOW - 0.5,
        ),
        **changes,
    )  # fmt: skip


def snapshot(**changes: Any) -> RunSnapshot:
    return replace(
        RunSnapshot(
            id="brave-owl-3f2a", name="brave-owl", state=RunState.RUNNING, preset="cifar10-cnn",
            attempt=2, created_at=NOW - 60, started_at=NOW - 60, world_size=4, epoch=2,
            global_step=1204, max_steps=2930, max_epochs=30, elapsed_s=502.0, eta_s=728.0,
            metrics={
                "train/loss": MetricValue(last=0.41, step=1204, best_min=0.3, best_max=2.4),
                "val_acc": MetricValue(last=0.93, step=1200, best_min=0.2, best_max=0.93),
            },
            throughput=Throughput(
                samples_per_s=31_400.0, best_samples_per_s=32_000.0, steps_per_s=9.8,
                data_wait_share=0.04, fetch_share=0.04, forward_share=0.31, backward_share=0.58,
                optimizer_share=0.07,
            ),
            ranks=tuple(rank(i) for i in range(4)),
            gpus=tuple(gpu(i) for i in range(4)),
            checkpoints=(
                CheckpointInfo(
                    path="/c/step-1000.ckpt", global_step=1000, epoch=2, ok=True,
                    reason="periodic", saved_at=NOW - 20, size_bytes=1 << 20,
                ),
            ),
        ),
        **changes,
    )  # fmt: skip


def gpu_past(values: Any = (0.9, 0.95, 0.98, 0.97)) -> GpuSeries:
    readings = [
        {"utilisation_percent": 100 * v, "power_w": 600 * v, "temperature_c": 60.0} for v in values
    ]
    rows = tuple(gpu_row(NOW - len(values) + i, **reading) for i, reading in enumerate(readings))
    return GpuSeries(rows, tuple(values)[-12:], tuple(values)[-60:])


def gpu_row(at: float, **readings: float) -> tuple[float, ...]:
    """A row of ``GpuSeries``."""
    return at, *(readings.get(name, math.nan) for name in GPU_READINGS)


def frame(**changes: Any) -> Frame:
    total = curve(np.full(100, 31_000.0) + 400 * np.sin(np.arange(100) / 5), step_s=0.5)
    return replace(
        Frame(
            snapshot=snapshot(),
            now=NOW,
            supervisor_answers=True,
            snapshot_at=NOW - 0.4,
            last_record_at=NOW - 0.1,
            curves={
                "train/loss": loss_curve(),
                "val_loss": curve([2.0, 1.2, 0.7, 0.5], first=100),
            },
            curve_names=("step/lr", "train/loss", "val_acc", "val_loss"),
            rates={None: total},
            gpu_series={i: gpu_past() for i in range(4)},
            curves_version=1,
            log=log_lines(40),
            log_count=40,
        ),
        **changes,
    )


def log_lines(count: int) -> tuple[LogLine, ...]:
    return tuple(LogLine(rank=i % 4, text=f"epoch 2 batch {i}: all is well") for i in range(count))


ERROR_LINE = LogLine(rank=1, text="RuntimeError: size mismatch", tone=Tone.BAD)
