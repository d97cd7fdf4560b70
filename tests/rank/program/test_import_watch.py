"""Functions that are called when a module has been imported."""

from __future__ import annotations

import importlib
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ltui.training.rank.program.program_hooks import ImportWatch


class Watched:
    """``watched_module`` in ``folder``, and what the function of its watches saw in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: list[str] = []

    def write(self, text: str) -> None:
        (self.folder / "watched_module.py").write_text(text)
        importlib.invalidate_caches()

    def install(self) -> ImportWatch:
        watch = ImportWatch([("watched_module", lambda module: self.seen.append(module.VALUE))])
        watch.install()
        return watch


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(sys.meta_path)
    yield Watched(tmp_path)
    sys.meta_path[:] = before
    for name in ("watched_module", "other_module"):
        sys.modules.pop(name, None)


def test_a_module_is_seen_after_it_was_executed(watched: Watched) -> None:
    watched.write("VALUE = 'complete'")
    watched.install()
    module = importlib.import_module("watched_module")
    assert watched.seen == ["complete"]
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert module.__spec__ is not None
    assert module.__spec__.loader is module.__loader__


def test_another_finder_may_ask_all_finders_too(watched: Watched) -> None:
    watched.write("VALUE = 'complete'")
    watched.install()
    watched.install()
    importlib.import_module("watched_module")
    assert watched.seen == ["complete", "complete"]


def test_a_module_is_seen_again_when_it_is_reloaded(watched: Watched) -> None:
    watched.write("VALUE = 'complete'")
    watched.install()
    importlib.reload(importlib.import_module("watched_module"))
    assert watched.seen == ["complete", "complete"]


def test_a_module_that_is_imported_already_is_seen_at_once(watched: Watched) -> None:
    watched.write("VALUE = 'before'")
    importlib.import_module("watched_module")
    watched.install()
    assert watched.seen == ["before"]


def test_a_module_whose_import_goes_on_is_seen_later(watched: Watched) -> None:
    watches: list[ImportWatch] = []
    sys.other_module_hook = lambda: watches.append(watched.install())  # type: ignore[attr-defined]
    watched.write("import sys; sys.other_module_hook(); VALUE = 'complete'")
    importlib.import_module("watched_module")
    del sys.other_module_hook  # type: ignore[attr-defined]
    assert watched.seen == []
    watches[0].catch_up()
    watches[0].catch_up()
    assert watched.seen == ["complete"]


def test_an_error_of_the_function_does_not_reach_the_import(watched: Watched) -> None:
    watched.write("NOTHING = 1")
    watched.install()
    assert importlib.import_module("watched_module").NOTHING == 1
    assert watched.seen == []


def test_an_error_of_the_module_is_that_of_its_import(watched: Watched) -> None:
    watched.install()
    with pytest.raises(ModuleNotFoundError, match="No module named 'watched_module'"):
        importlib.import_module("watched_module")
    watched.write("raise OSError('no device')")
    with pytest.raises(OSError, match="no device"):
        importlib.import_module("watched_module")
    assert watched.seen == []
    (watched.folder / "watched_module.py").unlink()
    watched.write("VALUE = 'second attempt'")
    importlib.import_module("watched_module")
    assert watched.seen == ["second attempt"]


def test_other_modules_of_an_archive_are_not_seen(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(watched.folder / "archive.zip", "w") as archive:
        archive.writestr("watched_module.py", "VALUE = 'watched'")
        archive.writestr("other_module.py", "VALUE = 'other'")
    monkeypatch.syspath_prepend(str(watched.folder / "archive.zip"))
    watched.install()
    importlib.import_module("watched_module")
    importlib.import_module("other_module")
    assert watched.seen == ["watched"]
