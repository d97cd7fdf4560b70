"""The list of runs with its index: what is read again, and what damage does."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from ltui.app.runs import run_index, run_list
from ltui.app.runs.filter_runs import run_filter
from ltui.app.runs.run_entry import RunEntry
from ltui.app.runs.run_fields import value_of
from ltui.app.runs.run_index import INDEX_NAME, VERSION
from ltui.app.runs.run_list import RunList
from ltui.training.lifecycle.run_status import resolve_snapshot
from ltui.training.state.run_snapshot import Event, RunSnapshot
from ltui.training.store.history_writer import Batch, StoreWriter
from ltui.training.store.labels_file import change_labels
from ltui.training.store.run_directory import RunDir, disk_use
from tests.stored_runs import stored_run

IDS = ("calm-fox-1a2b", "old-pine-3c4d", "brave-owl-5e6f")


@pytest.fixture
def home(private_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # The files of a test are younger than a clock is coarse.
    monkeypatch.setattr(run_list, "SETTLED_S", 0.0)
    for run_id in IDS:
        metrics = {"val/loss": 0.5, "nan": float("nan")}
        stored_run(private_home, run_id, metrics=metrics, config={"trainer": {"max_epochs": 3}})
    return private_home


@pytest.fixture
def reads() -> list[str]:
    """Ids of the runs whose history was read."""
    return []


@pytest.fixture
def opened(home: Path, reads: list[str]) -> Iterator[Callable[[], RunList]]:
    """Open the list of runs anew, as another start of ltui does."""
    lists: list[RunList] = []

    def read(run_dir: RunDir) -> RunSnapshot:
        reads.append(run_dir.id)
        return resolve_snapshot(run_dir)

    def another() -> RunList:
        lists.append(RunList(home, read))
        return lists[-1]

    yield another
    for runs in lists:
        runs.close()


def summaries(runs: RunList) -> list[object]:
    return [entry.summary for entry in runs.poll()]


def with_id(entries: Iterable[RunEntry], run_id: str) -> RunEntry:
    (entry,) = [entry for entry in entries if entry.id == run_id]
    return entry


def test_an_ended_run_is_read_once_for_all_starts(
    home: Path, opened: Callable[[], RunList], reads: list[str]
) -> None:
    first = opened().poll()
    assert sorted(reads) == sorted(IDS)
    again = opened()
    assert again.poll() == again.poll()
    assert sorted(reads) == sorted(IDS)
    before = {entry.id: entry for entry in first}
    for entry in again.poll():
        assert entry.summary == before[entry.id].summary
        assert entry.metrics.value("val/loss") == 0.5
        assert str(entry.metrics.value("nan")) == "nan"
        assert again.head(entry) == opened().head(before[entry.id])
    assert stat.S_IMODE((home / INDEX_NAME).stat().st_mode) == 0o600


def test_a_run_that_changed_is_read_again_and_a_deleted_one_is_gone(
    home: Path, opened: Callable[[], RunList], reads: list[str]
) -> None:
    opened().poll()
    reads.clear()
    change_labels(RunDir(home / "runs" / IDS[0]), lambda labels: replace(labels, star=True))
    (starred,) = [entry for entry in opened().poll() if entry.labels.star]
    assert reads == [IDS[0]]
    assert starred.id == IDS[0]
    os.rename(home / "runs" / IDS[1], home / "runs" / ".deleted")
    assert len(opened().poll()) == 2
    with closing(sqlite3.connect(home / INDEX_NAME)) as connection:
        assert connection.execute("SELECT count(*) FROM runs").fetchone() == (2,)


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _overwrite(path: Path) -> None:
    path.write_bytes(b"no database, but as long as one. " * 300)


def _zero_middle(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096:] = bytes(len(data) - 4096)
    path.write_bytes(data)


def _other_types(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        (packed,) = connection.execute("SELECT row FROM runs WHERE id = ?", (IDS[0],)).fetchone()
        row = msgspec.msgpack.decode(packed)
        row["summary"] = [[value] for value in row["summary"]]
        connection.execute(
            "UPDATE runs SET row = ? WHERE id = ?", (msgspec.msgpack.encode(row), IDS[0])
        )


def _no_text(path: Path) -> None:
    path.write_bytes(
        path.read_bytes().replace(b"CREATE TABLE heads", b"CREATE TABLE \xac\xac \xac\xac")
    )


def _sql(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


HARMS: dict[str, Callable[[Path], None]] = {
    **{harm.__name__: harm for harm in (Path.unlink, _cut, _overwrite, _zero_middle)},
    **{harm.__name__: harm for harm in (_other_types, _no_text)},
    "other version": lambda path: _sql(path, f"PRAGMA user_version = {VERSION + 1}"),
    "other rows": lambda path: _sql(
        path,
        f"UPDATE runs SET row = '], [' WHERE id = '{IDS[0]}'",
        f"UPDATE runs SET metrics = x'00' WHERE id = '{IDS[1]}'",
    ),
    "deep row": lambda path: _sql(
        path, f"UPDATE runs SET row = x'{'91' * 200_000}' WHERE id = '{IDS[0]}'"
    ),
    "table gone": lambda path: _sql(path, "DROP TABLE runs"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_index_is_built_again(
    home: Path, opened: Callable[[], RunList], reads: list[str], harm: str
) -> None:
    whole = summaries(opened())
    HARMS[harm](home / INDEX_NAME)
    reads.clear()
    assert summaries(opened()) == whole
    assert reads
    reads.clear()
    assert summaries(opened()) == whole
    assert not reads


def test_two_versions_of_ltui_at_once(
    opened: Callable[[], RunList], monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = opened()
    whole = summaries(newer)
    for version in (VERSION - 1, VERSION, VERSION - 1):
        monkeypatch.setattr(run_index, "VERSION", version)
        assert summaries(opened()) == summaries(newer) == whole


def test_a_damaged_run_is_listed_and_stops_nothing(
    home: Path, opened: Callable[[], RunList]
) -> None:
    bad = RunDir(home / "runs" / IDS[0])
    bad.db_path.unlink()
    bad.spec_path.write_text("version: 99\n")
    for runs in (opened(), opened()):
        entry = with_id(runs.poll(), IDS[0])
        assert entry.summary is None
        assert "newer" in (entry.problem or "")
        assert len(runs.poll()) == 3


@pytest.mark.parametrize(
    "changes",
    [{"epoch": 2**64 - 1}, {"exit_code": 10**20}, {"metrics": {"loss\ud800": 0.5}}],
    ids=["epoch", "exit code", "metric"],
)
def test_a_run_that_the_index_cannot_hold_is_read_anew_and_stops_nothing(
    home: Path, opened: Callable[[], RunList], reads: list[str], changes: dict[str, Any]
) -> None:
    bad = stored_run(home, "wild-elk-7a8b", **changes)
    assert len(opened().poll()) == len(IDS) + 1
    reads.clear()
    assert len(opened().poll()) == len(IDS) + 1
    assert reads == [bad.id]


def test_without_an_index_runs_are_shown_as_they_are_read(opened: Callable[[], RunList]) -> None:
    runs = opened()
    assert len(runs.poll(0.0)) == 1
    assert runs.unread == 2
    assert len(runs.poll(0.0)) == 2
    assert len(runs.poll(0.0)) == 3
    assert runs.unread == 0


def test_a_run_that_is_not_read_in_time_stays_in_the_list_as_it_was(
    home: Path, opened: Callable[[], RunList]
) -> None:
    """The cursor would move to another run if its run were gone for a moment."""
    runs = opened()
    assert len(runs.poll()) == 3
    for run_id in IDS:
        change_labels(RunDir(home / "runs" / run_id), lambda labels: replace(labels, star=True))
    entries = runs.poll(0.0)
    assert {entry.id for entry in entries} == set(IDS)
    assert sum(entry.labels.star for entry in entries) == 1
    assert runs.unread == 2
    assert all(entry.labels.star for entry in runs.poll())


def test_a_home_that_cannot_be_written_is_listed(
    home: Path, opened: Callable[[], RunList], monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / INDEX_NAME).mkdir()
    assert len(opened().poll()) == 3


def test_disk_use_and_settings_are_read_once_for_each_version_of_the_files(
    home: Path, opened: Callable[[], RunList], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []

    def measure(folder: Path) -> int:
        measured.append(folder.name)
        return disk_use(folder)

    monkeypatch.setattr(run_list, "disk_use", measure)
    first = opened()
    calm = with_id(first.complete(first.poll(), ("size",)), IDS[0])
    assert sorted(measured) == sorted(IDS)
    assert calm.size_bytes == disk_use(calm.run_dir.path)
    measured.clear()
    again = opened()
    for runs in (first, again):
        again_calm = with_id(runs.complete(runs.poll(), ("size",)), IDS[0])
        assert again_calm.size_bytes == calm.size_bytes
    assert not measured
    (calm.run_dir.path / "checkpoints" / "step-9").write_bytes(bytes(100_000))
    for runs in (again, opened()):
        grown = with_id(runs.complete(runs.poll(), ("size",)), IDS[0])
        assert (grown.size_bytes or 0) >= (calm.size_bytes or 0) + 100_000
    assert measured == [IDS[0]]


def test_damaged_values_of_the_index_are_read_again(
    home: Path, opened: Callable[[], RunList]
) -> None:
    names = ("size", "config.max_epochs")
    first = opened()
    whole = first.complete(first.poll(), names)
    for value in ('"big"', "[", "{}"):
        with closing(sqlite3.connect(home / INDEX_NAME)) as connection, connection:
            connection.execute("UPDATE slow_values SET value = ? WHERE kind = 'size'", (value,))
            connection.execute("UPDATE slow_values SET value = '3.5' WHERE kind = 'settings'")
        again = opened()
        found = again.complete(again.poll(), names)
        assert [run.size_bytes for run in found] == [run.size_bytes for run in whole]
        assert [run.settings for run in found] == [run.settings for run in whole]


def test_slow_values_that_take_too_long_come_with_later_calls(
    home: Path, opened: Callable[[], RunList]
) -> None:
    runs = opened()
    entries = runs.poll()
    assert runs.complete(entries, ("name", "val/loss")) == entries
    runs.complete(entries, ("size",), 0.0)
    assert runs.incomplete == 3
    runs.complete(entries, ("size",))
    assert runs.incomplete == 0
    assert all(run.size_bytes for run in runs.complete(entries, ("size",), 0.0))


def test_settings_come_from_the_specification_and_a_damaged_one_has_none(
    home: Path, opened: Callable[[], RunList]
) -> None:
    RunDir(home / "runs" / IDS[1]).spec_path.write_text("version: 99\n")
    edited = stored_run(home, "edited-elk-aaaa", command=("python", "train.py"))
    edited.spec_path.write_text(edited.spec_path.read_text().replace("- python\n", "- 1\n"))
    for runs in (opened(), opened()):
        entries = runs.complete(runs.poll(), ("config.max_epochs",))
        values = {run.id: value_of(run, "config.max_epochs") for run in entries}
        assert values == {IDS[0]: 3.0, IDS[1]: None, IDS[2]: 3.0, edited.id: None}


def test_hyperparameters_are_settings_with_their_short_names(
    home: Path, opened: Callable[[], RunList]
) -> None:
    command = ("python", "train.py", "--lr", "1e-1", "--batch-size", "8")
    reported = {"lr": 0.1, "batch_size": 8, "width": 32, "amp": True}
    script = stored_run(home, "script-owl-aaaa", command=command, reported=reported)
    config = {"model": {"init_args": {"lr": 0.5}}}
    preset = stored_run(home, "preset-owl-bbbb", config=config, reported={"lr": 9, "depth": 4})
    for runs in (opened(), opened()):
        every = runs.complete(runs.poll(), ("config.lr",))
        settings = {run.id: run.settings for run in every}
        assert settings[script.id] == {
            "command": "python train.py",
            "lr": "0.1",
            "batch-size": "8",
            "width": "32",
            "amp": "true",
        }
        assert settings[preset.id] == {"model.lr": "0.5", "depth": "4"}
        with_width = [run.id for run in every if run_filter("config.width>=32", 0.0)(run)]
        assert with_width == [script.id]
    # A program that has reported more since is read again.
    event = Event(rank=0, seq=1, t=1.0, kind="hyperparameters", text="", data={"values": {"lr": 2}})
    writer = StoreWriter(script.db_path)
    writer.commit(1, Batch(events=[event]))
    writer.close()
    runs = opened()
    again = with_id(runs.complete(runs.poll(), ("config.lr",)), script.id)
    assert again.settings["lr"] == "2"


def test_ended_runs_are_listed_and_shown_without_numpy(private_home: Path) -> None:
    """It would take a third of the time of these commands."""
    stored_run(private_home, "calm-fox-0001")
    program = (
        "import sys; from ltui.app.cli import main\n"
        "for words in ('runs', 'runs --json', 'show last'): main(words.split())\n"
        "print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    *shown, modules = done.stdout.splitlines()
    assert sum("calm-fox" in line for line in shown) >= 3
    assert "sqlite3" in modules.split()
    assert "numpy" not in modules.split()
