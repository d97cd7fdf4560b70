"""Last and best values, and marks of checkpoints, after a resume from an earlier step."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from ltui.training.lifecycle.resume_run import replaced_steps
from ltui.training.state.good_checkpoints import newest_checkpoint
from ltui.training.state.run_snapshot import MetricValue
from ltui.training.store.history_queries import StoredValues
from ltui.training.store.history_reader import RunStore
from ltui.training.store.history_writer import Batch, Sample, StoreWriter
from ltui.training.store.run_checkpoints import choose_checkpoint, list_checkpoints, saved_by
from tests.required import required
from tests.store.histories import begin, checkpoint, run_dir, steps, write


def logged(first: int, last: int, factor: float, rank: int = 0, name: str = "acc") -> Batch:
    rows: list[Sample] = [
        (rank, s, name, s, 0, 1.0, factor * s) for s in range(first, last + 1, 10)
    ]
    return Batch(samples=rows)


def stored(store: StoreWriter, begun: int | None = None) -> StoredValues:
    return store.stored_values(store.spans(begun))


def test_superseded_steps_have_no_best_and_no_last_value(tmp_path: Path) -> None:
    run = run_dir(tmp_path)
    store = StoreWriter(run.db_path)
    begin(store)
    write(store, 1, [steps(1, 242, factor=-1.0), logged(10, 240, 1.0)])
    begin(store, 2, resumed_step=50)
    # The attempt is live: nothing of the steps after its checkpoint counts.
    values = stored(store, 2)
    assert values[0]["acc"] == MetricValue(last=50, step=50, best_min=10, best_max=50)
    assert values[0][None] == MetricValue(last=-50, step=50, best_min=-50, best_max=-1)
    # It has ended before its first step: it has replaced none.
    assert stored(store)[0]["acc"] == MetricValue(last=240, step=240, best_min=10, best_max=240)
    write(store, 2, [steps(51, 92, factor=-0.5), logged(60, 90, 0.5)])
    values = stored(store)
    assert values[0]["acc"] == MetricValue(last=45, step=90, best_min=10, best_max=50)
    assert values[0][None] == MetricValue(last=-46, step=92, best_min=-50, best_max=-1)
    store.close()
    with RunStore(run) as history:  # the truth of exports
        rows = [row.value for row in history.export(["acc"])]
    assert (min(rows), max(rows), rows[-1]) == (10, 50, 45)  # type: ignore[type-var]


def test_values_are_of_the_lowest_rank_that_logs_and_survive_nan_and_infinity(
    tmp_path: Path,
) -> None:
    store = StoreWriter(run_dir(tmp_path).db_path)
    begin(store)
    odd: list[Sample] = [
        (1, 1, "odd", 1, 0, 1.0, 2.0),
        (1, 2, "odd", 2, 0, 1.0, math.inf),
        (1, 3, "odd", 3, 0, 1.0, math.nan),
    ]
    write(store, 1, [steps(1, 3), Batch(samples=odd), logged(10, 30, 1.0, rank=2, name="odd")])
    (rank,) = (rank for rank, values in stored(store).items() if "odd" in values)
    value = stored(store)[rank]["odd"]
    assert (rank, value.step, value.best_min, value.best_max) == (1, 3, 2.0, 2.0)
    assert math.isnan(value.last)
    store.close()


def test_steps_that_are_stored_only_as_windows_count(tmp_path: Path) -> None:
    store = StoreWriter(run_dir(tmp_path).db_path, keep_rows=500)
    begin(store)
    write(store, 1, [steps(n, n + 99) for n in range(1, 3000, 100)])
    loss = stored(store)[0][None]
    assert (loss.best_min, loss.best_max, loss.last) == (1, 3000, 3000)
    store.close()


def test_a_run_that_only_logs_values_keeps_those_of_every_attempt(tmp_path: Path) -> None:
    store = StoreWriter(run_dir(tmp_path).db_path)
    begin(store)
    write(store, 1, [logged(10, 30, 1.0)])
    begin(store, 2)
    assert stored(store, 2)[0]["acc"].best_max == 30
    store.close()


@pytest.mark.parametrize(("second", "newest"), [(92, 92), (None, 50)])
def test_a_resume_takes_the_newest_checkpoint_of_the_steps_that_count(
    tmp_path: Path, second: int | None, newest: int
) -> None:
    """Whether or not the attempt that went back to step 50 has saved a checkpoint itself."""
    run = run_dir(tmp_path)
    folder = run.checkpoints_dir
    checkpoint(folder, 50, 1.0, attempt=1, fit=1)
    checkpoint(folder, 242, 2.0, attempt=1, fit=1)
    if second is not None:
        checkpoint(folder, second, 3.0, attempt=2, fit=1)
    store = StoreWriter(run.db_path)
    begin(store)
    write(store, 1, [steps(1, 242)])
    begin(store, 2, resumed_step=50)
    if second is None:
        # Before its first step nothing is superseded, except for its own supervisor.
        for spans, step in ((None, 242), (store.spans(2), 50)):
            assert required(newest_checkpoint(list_checkpoints(folder, spans))).global_step == step
    write(store, 2, [steps(51, 95)])
    store.close()
    listed = list_checkpoints(folder)
    assert [c.global_step for c in listed if c.superseded] == [242]
    for found in (choose_checkpoint(folder).taken, newest_checkpoint(listed)):
        assert required(found).global_step == newest


def test_a_resume_from_a_checkpoint_that_the_run_had_left_returns_to_its_steps(
    tmp_path: Path,
) -> None:
    """The steps of the attempt between the two are no longer part of the run."""
    run = run_dir(tmp_path)
    for attempt, step in ((1, 50), (1, 242), (2, 92)):
        checkpoint(run.checkpoints_dir, step, float(step), attempt=attempt, fit=1)
    store = StoreWriter(run.db_path)
    begin(store)
    write(store, 1, [steps(1, 250)])
    begin(store, 2, resumed_step=50)
    write(store, 2, [steps(51, 92, factor=-1.0)])
    listed = {c.global_step: c for c in list_checkpoints(run.checkpoints_dir)}
    sentences = replaced_steps(run, listed.values())
    expected = "Steps 51 to 92 are then no longer part of the run's curves."
    assert sentences == {listed[50].path: expected, listed[242].path: expected}

    parent = saved_by(Path(listed[242].path))
    store.begin_attempt(
        3, started_at=1.0, boot_id="b", resumed_path=None, resumed_step=242, parent=parent
    )
    loss = stored(store, 3)[0][None]
    assert (loss.best_min, loss.best_max, loss.step) == (1, 242, 242)
    write(store, 3, [steps(243, 260)])
    store.close()
    with RunStore(run) as history:
        rows = [row.value for row in history.export(["train/loss"])]
        assert history.last_step() == 260
    assert rows == list(range(1, 261))
    left = [c.global_step for c in list_checkpoints(run.checkpoints_dir) if c.superseded]
    assert left == [92]
