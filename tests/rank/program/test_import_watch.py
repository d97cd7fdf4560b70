"""Functions that are called when a module has been imported."""

from __future__ import annotations

import importlib
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from ltui.training.rank.program.program_hooks import ImportWatch

Watch = Callable[..., ImportWatch]


@pytest.fixture
def seen() -> list[str]:
    return []


@pytest.fixture
def watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: list[str]
) -> Iterator[Callable[[], ImportWatch]]:
    """Watch ``watched_module``, and note what its function saw in it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(sys.meta_path)

    def install() -> ImportWatch:
        def note(module: ModuleType) -> None:
            seen.append(module.VALUE)

        watch = ImportWatch([("watched_module", note)])
        watch.install()
        return watch

    yield install
    sys.meta_path[:] = before
    for name in ("watched_module", "other_module"):
        sys.modules.pop(name, None)


def write(folder: Path, text: str, name: str = "watched_module") -> None:
    (folder / f"{name}.py").write_text(text)
    importlib.invalidate_caches()


def test_a_module_is_seen_after_it_was_executed(
    watch: Watch, tmp_path: Path, seen: list[str]
) -> None:
    write(tmp_path, "VALUE = 'complete'")
    watch()
    module = importlib.import_module("watched_module")
    assert seen == ["complete"]
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert module.__spec__ is not None
    assert module.__spec__.loader is module.__loader__


def test_another_finder_may_ask_all_finders_too(
    watch: Watch, tmp_path: Path, seen: list[str]
) -> None:
    write(tmp_path, "VALUE = 'complete'")
    watch()
    watch()
    importlib.import_module("watched_module")
    assert seen == ["complete", "complete"]


def test_a_module_is_seen_again_when_it_is_reloaded(
    watch: Watch, tmp_path: Path, seen: list[str]
) -> None:
    write(tmp_path, "VALUE = 'complete'")
    watch()
    importlib.reload(importlib.import_module("watched_module"))
    assert seen == ["complete", "complete"]


def test_a_module_that_is_imported_already_is_seen_at_once(
    watch: Watch, tmp_path: Path, seen: list[str]
) -> None:
    write(tmp_path, "VALUE = 'before'")
    importlib.import_module("watched_module")
    watch()
    assert seen == ["before"]


def test_a_module_whose_import_goes_on_is_seen_later(
    watch: Watch, tmp_path: Path, seen: list[str]
) -> None:
    watches: list[ImportWatch] = []
    sys.other_module_hook = lambda: watches.append(watch())  # type: ignore[attr-defined]
    write(tmp_path, "import sys; sys.other_module_hook(); VALUE = 'complete'")
    importlib.import_module("watched_module")
    del sys.other_module_hook  # type: ignore[attr-defined]
    assert seen == []
    watches[0].catch_up()
    watches[0].catch_up()
    assert seen == ["complete"]


def test_an_error_of_the_function_does_not_reach_the_import(
    watch: Watch, tmp_path: Path, seen: list[str]
) -> None:
    write(tmp_path, "NOTHING = 1")
    watch()
    assert importlib.import_module("watched_module").NOTHING == 1
    assert seen == []


def test_an_error_of_the_module_is_that_of_its_import(
    watch: Watch, tmp_path: Path, seen: list[str]
) -> None:
    watch()
    with pytest.raises(ModuleNotFoundError, match="No module named 'watched_module'"):
        importlib.import_module("watched_module")
    write(tmp_path, "raise OSError('no device')")
    with pytest.raises(OSError, match="no device"):
        importlib.import_module("watched_module")
    assert seen == []
    (tmp_path / "watched_module.py").unlink()
    write(tmp_path, "VALUE = 'second attempt'")
    importlib.import_module("watched_module")
    assert seen == ["second attempt"]


def test_other_modules_of_an_archive_are_not_seen(
    watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: list[str]
) -> None:
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("watched_module.py", "VALUE = 'watched'")
        archive.writestr("other_module.py", "VALUE = 'other'")
    monkeypatch.syspath_prepend(str(tmp_path / "archive.zip"))
    watch()
    importlib.import_module("watched_module")
    importlib.import_module("other_module")
    assert seen == ["watched"]
