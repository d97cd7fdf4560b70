"""Event files that follow a run, read back with TensorBoard's own reader."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ltui.training.store.export_files import FollowedEvents, event_file_name, export_events
from ltui.training.store.history_queries import ExportRow
from ltui.training.store.history_writer import StoreWriter
from ltui.training.store.run_directory import RunDir
from tests.small_disk import fill, mount_small_disk, unmount
from tests.store.event_files import assert_complete, read_events
from tests.store.histories import begin, run_dir, steps
from tests.store.test_export_formats import samples

pytest.importorskip("tensorboard")
BEGAN = 50.0


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return run_dir(tmp_path)


@pytest.fixture
def store(run: RunDir) -> Iterator[StoreWriter]:
    writer = StoreWriter(run.db_path)
    begin(writer)
    yield writer
    writer.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "mirror"


def followed(folder: Path) -> FollowedEvents:
    return FollowedEvents(folder, BEGAN, "mirror")


def test_new_values_are_appended(run: RunDir, store: StoreWriter, folder: Path) -> None:
    events = followed(folder)
    store.commit(1, steps(1, 5))
    events.update(run)
    assert [step for step, _, _ in read_events(folder)["train/loss"]] == [1, 2, 3, 4, 5]
    size = (folder / event_file_name(BEGAN)).stat().st_size
    events.update(run)
    assert (folder / event_file_name(BEGAN)).stat().st_size == size, "nothing is new"
    store.commit(1, steps(6, 10))
    store.commit(1, steps(1, 10, rank=1))
    store.commit(1, samples(2, 8))
    events.update(run)
    assert_complete(run, folder)


def test_an_attempt_replaces_the_steps_that_it_repeats(
    run: RunDir, store: StoreWriter, folder: Path
) -> None:
    events = followed(folder)
    store.commit(1, steps(1, 10))
    store.commit(1, steps(1, 10, rank=1))
    store.commit(1, samples(1, 10))
    events.update(run)
    begin(store, 2, resumed_step=6)
    events.update(run)
    assert len(read_events(folder)["train/loss"]) == 10, "no step was trained yet"
    store.commit(2, steps(7, 12, factor=3.0))
    events.update(run)
    assert_complete(run, folder)
    begin(store, 3, resumed_step=0)
    store.commit(3, steps(1, 4, factor=5.0))
    events.update(run)
    assert_complete(run, folder, ranks=(0,))
    assert read_events(folder / "rank-1") == {}


@pytest.mark.parametrize("resumed", [(8, 5), (5, 8)])
def test_another_process_continues_after_two_attempts(
    run: RunDir, store: StoreWriter, folder: Path, resumed: tuple[int, int]
) -> None:
    store.commit(1, steps(1, 10))
    store.commit(1, samples(1, 10))
    followed(folder).update(run)
    for attempt, step in enumerate(resumed, start=2):
        begin(store, attempt, resumed_step=step)
        store.commit(attempt, steps(step + 1, step + 5, factor=float(attempt)))
    followed(folder).update(run)
    followed(folder).update(run)
    assert_complete(run, folder, ranks=(0,))


def test_a_record_that_was_cut_off_is_written_again(
    run: RunDir, store: StoreWriter, folder: Path
) -> None:
    store.commit(1, steps(1, 5))
    followed(folder).update(run)
    path = folder / event_file_name(BEGAN)
    os.truncate(path, path.stat().st_size - 7)
    store.commit(1, steps(6, 8))
    followed(folder).update(run)
    assert_complete(run, folder, ranks=(0,))


def test_the_file_of_a_complete_export_is_replaced(
    run: RunDir, store: StoreWriter, folder: Path
) -> None:
    export_events([ExportRow("train/loss", 1, 0, 1.0, 0, 99.0)], folder, BEGAN)
    store.commit(1, steps(1, 5))
    followed(folder).update(run)
    assert_complete(run, folder, ranks=(0,))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk_leaves_a_file_that_can_be_continued(
    run: RunDir, store: StoreWriter, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    mount_small_disk(disk, 4)
    try:
        store.commit(1, steps(1, 5))
        events = followed(disk)
        events.update(run)
        ballast = fill(disk)
        store.commit(1, steps(6, 500))
        with pytest.raises(OSError, match="No space left"):
            events.update(run)
        assert len(read_events(disk)["train/loss"]) == 5
        ballast.unlink()
        followed(disk).update(run)
        assert_complete(run, disk, ranks=(0,))
    finally:
        unmount(disk)
