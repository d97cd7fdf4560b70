"""Runs to compare, written through the real writer: a spec.yaml and a run.db each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ltui.training.config.run_spec import RunSpec
from ltui.training.shared.record_types import StepField
from ltui.training.state.run_snapshot import RunSnapshot, RunState
from ltui.training.store.history_writer import Batch, Cursor, StoreWriter
from ltui.training.store.run_directory import RunDir

BEGAN = 1.7e9
STEP_S = 0.01
BATCH = 32
EPOCH = 100
"""Steps of an epoch, after each of which ``val/acc`` is logged."""
CHUNK = 20_000


def config(*, lr: float, seed: int) -> dict[str, Any]:
    return {
        "seed_everything": seed,
        "model": {"class_path": "a.Net", "init_args": {"lr": lr, "width": 64}},
        "trainer": {"max_epochs": 30, "devices": 1},
    }


def losses(steps: int, *, lr: float = 0.1, seed: int = 0) -> list[float]:
    """The loss of each step."""
    noise = np.random.default_rng(seed).normal(0.0, 0.02, steps)
    values = 0.3 / (1 + 10 * lr) + np.exp(-np.arange(steps) * lr / (0.05 * 1000)) + noise
    return [float(value) for value in values]


def write_run(
    home: Path,
    run_id: str,
    values: Sequence[float],
    *,
    configuration: Mapping[str, Any] | None = None,
    command: tuple[str, ...] | None = None,
    metrics: Mapping[str, Mapping[int, float]] | None = None,
    state: RunState = RunState.FINISHED,
) -> RunDir:
    """Write a run of one rank whose losses are ``values``; ``metrics`` are values by step."""
    run_dir = RunDir(home / "runs" / run_id)
    run_dir.path.mkdir(parents=True)
    spec = RunSpec(
        id=run_id,
        name=run_id.rpartition("-")[0],
        created_at=BEGAN,
        cwd="/",
        python="python",
        preset=None if command else "digits",
        config=configuration,
        command=command,
    )
    run_dir.write_spec(spec)
    store = StoreWriter(run_dir.db_path)
    store.begin_attempt(1, started_at=BEGAN, boot_id="b", resumed_path=None, resumed_step=None)
    write_steps(store, values, metrics)
    ended = BEGAN + len(values) * STEP_S
    if state is not RunState.RUNNING:
        store.end_attempt(1, ended)
    store.write_snapshot(
        RunSnapshot(
            id=run_id,
            name=spec.name,
            state=state,
            preset=spec.preset,
            command=command,
            created_at=BEGAN,
            started_at=BEGAN,
            ended_at=ended,
            taken_at=ended,
            elapsed_s=len(values) * STEP_S,
            global_step=len(values),
            world_size=1,
        )
    )
    store.close()
    return run_dir


def write_steps(
    store: StoreWriter,
    values: Sequence[float],
    metrics: Mapping[str, Mapping[int, float]] | None = None,
    *,
    first: int = 0,
) -> None:
    """Write the steps after step ``first``."""
    samples = [
        (0, number, name, step, step // EPOCH, BEGAN + step * STEP_S, value)
        for name, by_step in (metrics or {}).items()
        for number, (step, value) in enumerate(by_step.items())
    ]
    for begin in range(first, len(values), CHUNK):
        last = min(len(values), begin + CHUNK)
        batch = Batch(
            steps=[(0, seq, _step_row(seq + 1, values[seq])) for seq in range(begin, last)],
            samples=[one for one in samples if begin < (one[3] or 0) <= last],
            cursors={0: Cursor(last)},
        )
        store.commit(1, batch)


def accuracies(values: Sequence[float]) -> dict[int, float]:
    """An accuracy for each epoch, from the loss of its last step."""
    return {step: math.exp(-values[step - 1]) for step in range(EPOCH, len(values) + 1, EPOCH)}


def write_seeds(home: Path, *, steps: int = 1500) -> list[RunDir]:
    """Write five runs: three seeds with one learning rate, two seeds with another one."""
    written = []
    for number, (lr, seed) in enumerate([(0.1, 1), (0.1, 2), (0.1, 3), (0.3, 1), (0.3, 2)]):
        values = losses(steps - 100 * number, lr=lr, seed=seed)
        written.append(
            write_run(
                home,
                f"{('brave', 'calm', 'deep', 'eager', 'fast')[number]}-owl-000{number}",
                values,
                configuration=config(lr=lr, seed=seed),
                metrics={"val/acc": accuracies(values)},
            )
        )
    return written


def _step_row(step: int, loss: float) -> list[float]:
    row = [math.nan] * len(StepField)
    row[StepField.GLOBAL_STEP] = step
    row[StepField.EPOCH] = (step - 1) // EPOCH
    row[StepField.SAMPLES] = BATCH
    row[StepField.LOSS] = loss
    row[StepField.STEP_S] = STEP_S
    row[StepField.MEMORY_PEAK_BYTES] = 2.0**30 + step
    row[StepField.WALL_S] = BEGAN + step * STEP_S
    return row
