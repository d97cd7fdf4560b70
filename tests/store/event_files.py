"""Event files read back with TensorBoard's own reader, and what they should hold."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from ltui.training.store.history_reader import RunStore
from ltui.training.store.run_directory import RunDir

Scalar = tuple[int, float, float]
"""Step, wall time, value."""


def read_events(folder: Path) -> dict[str, list[Scalar]]:
    """Read all scalars of a folder with TensorBoard's own reader."""
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    ).EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    scalars = {tag: accumulator.Scalars(tag) for tag in accumulator.Tags()["scalars"]}
    # A tag whose values were all replaced by a later attempt stays in the list.
    return {
        tag: [(event.step, event.wall_time, event.value) for event in events]
        for tag, events in scalars.items()
        if events
    }


def single(value: float | None) -> float:
    """Return the value as a number of 32 bits, as event files store it."""
    import numpy as np

    return math.nan if value is None else float(np.float32(value))


def comparable(scalars: list[Scalar]) -> list[str]:
    """Return text that is equal for equal numbers and for NaN."""
    return [repr(scalar) for scalar in scalars]


def expected_events(run: RunDir, rank: int) -> dict[str, list[Scalar]]:
    """Return what the event file of a rank holds if nothing is missing or there twice."""
    expected: dict[str, list[Scalar]] = {}
    with RunStore(run) as store:
        for row in store.export(store.exported_names()):
            if row.rank == rank:
                scalar = (row.step, row.time or 0.0, single(row.value))
                expected.setdefault(row.metric, []).append(scalar)
    return expected


def assert_complete(run: RunDir, folder: Path, ranks: tuple[int, ...] = (0, 1)) -> None:
    """Compare the event files of a run with its history, value by value."""
    for rank in ranks:
        found = read_events(folder / f"rank-{rank}" if rank else folder)
        expected = expected_events(run, rank)
        assert found.keys() == expected.keys()
        for tag in expected:
            assert comparable(found[tag]) == comparable(expected[tag])
