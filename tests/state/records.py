"""Records and pulses as ranks write them, for tests of the pure core."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np

from ltui.training.shared.record_types import Outcome, Phase, PulseState, RecordKind, StepField
from ltui.training.tensor_queue.queue_reader import Record

SECOND = 1_000_000_000


def step(global_step: int, t_s: float, **fields: float) -> Record:
    """The record of a step. ``fields``: its columns, with the names of ``StepField``."""
    row = np.full(len(StepField), math.nan)
    usual = {"epoch": 0, "batch": global_step, "samples": 32, "loss": 1.0, "stepped": 1}
    always = {"global_step": global_step, "wall_s": 1000 + t_s}
    for name, value in {**usual, **fields, **always}.items():
        row[StepField[name.upper()]] = value
    return Record(
        seq=global_step, kind=int(RecordKind.STEP), t_ns=round(t_s * SECOND), label=b"", array=row
    )


def steps(
    count: int, every_s: float, *, first: int = 1, start_s: float = 0.0, **fields: Any
) -> list[Record]:
    fields.setdefault("step_s", every_s)
    return [step(first + i, start_s + i * every_s, **fields) for i in range(count)]


def labelled(kind: RecordKind, label: dict[str, Any], values: Any = (), t_s: float = 0.0) -> Record:
    return Record(
        seq=0,
        kind=int(kind),
        t_ns=round(t_s * SECOND),
        label=json.dumps(label).encode(),
        array=np.asarray(values, dtype=np.float64),
    )


_PULSE = PulseState(
    pid=100, start_ticks=1, rank=0, local_rank=0, world_size=2, phase=Phase.FORWARD, epoch=0,
    batch=10, global_step=10, changed_ns=0, changed_wall_s=1000.0, outcome=Outcome.RUNNING,
    decision_done=0, telemetry_ok=True, restarts=0,
)  # fmt: skip


def pulse(rank: int, phase: Phase, changed_s: float = 0.0, **fields: Any) -> PulseState:
    return replace(
        _PULSE,
        rank=rank,
        local_rank=rank,
        phase=phase,
        changed_ns=round(changed_s * SECOND),
        changed_wall_s=1000 + changed_s,
        **fields,
    )
