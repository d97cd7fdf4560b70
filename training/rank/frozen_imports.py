"""Let every Python process of a run use the frozen copy of its code.

The ``sitecustomize`` of the rank package calls ``use_copy`` in each interpreter of the run, also in
workers that ``spawn`` or ``forkserver`` start late. A finder in front of all others finds modules
as they do, with the copy in place of the original folder. So it does not matter how a module is
found: by the folder of the script, the working directory, ``PYTHONPATH``, or an editable
installation. A script that was started by its original path, such as by a line of a shell script,
starts again from the copy.

Uses the standard library only, and must be light: it runs at every start of an interpreter. What a
copy has is described in ``training/lifecycle/freeze_code.py``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_file_location
from typing import Any

COPY_VARIABLE, ROOT_VARIABLE = "LTUI_CODE_COPY", "LTUI_CODE_ROOT"
"""Folder of the copy, and the original folder that it is a copy of."""
_WITH_VALUE = ("W", "X")
"""Options of Python whose value may be the next word."""


def use_copy() -> None:
    """Import the copies of modules in this process, if the code of its run is frozen."""
    copy, root = os.environ.get(COPY_VARIABLE), os.environ.get(ROOT_VARIABLE)
    if not copy or not root:
        return
    if not os.path.isfile(f"{copy}.json"):
        raise FrozenFileMissingError(f"{copy} is gone")
    finder = CopyFinder(copy, root)
    sys.meta_path.insert(0, finder)
    words = list(getattr(sys, "orig_argv", ()))
    place = script_place(words)
    try:
        script = None if place is None else finder.copied(words[place], is_code=True)
    except FrozenFileMissingError as error:
        print(f"ltui: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    if place is not None and script is not None:
        words = [sys.executable, *words[1:place], script, *words[place + 1 :]]
        os.execv(sys.executable, words)  # noqa: S606  (the words are those of this process)


def script_place(words: Sequence[str]) -> int | None:
    """Return the place of the script in a command line of Python; None if it runs no script."""
    place = 1
    while place < len(words) and words[place].startswith("-"):
        word = words[place]
        if word in ("-", "--") or word.startswith("--"):
            return None
        for index, letter in enumerate(word[1:], start=2):
            if letter in "cm":
                return None
            if letter in _WITH_VALUE:
                place += index == len(word)
                break
        place += 1
    return place if place < len(words) else None


class FrozenFileMissingError(Exception):
    """A file of the copy is gone: its original may have changed. No ``ImportError``, for which a
    program may have another module."""


class CopyFinder:
    """Finds modules as the other finders do, with the copy in place of the original folder."""

    def __init__(self, copy: str, root: str) -> None:
        self._copy, self._root = os.path.realpath(copy), os.path.realpath(root)
        self._real: dict[str, str] = {}
        self._folders: dict[str, str] = {}
        self._frozen: frozenset[str] | None = None
        """Names of the files of the copy; None before one of them is missed."""
        self._looked_for: set[str] = set()
        """Names that other finders look for now: one of them may ask all finders, too."""

    def copied(self, path: str, *, is_code: bool = False) -> str | None:
        """Return the path of the copy of a file or folder; None if there is none.

        Raises ``FrozenFileMissingError`` instead if ``is_code``, and the file was in the copy.
        """
        try:
            folder, name = os.path.split(os.path.abspath(path))
        except OSError:  # the working directory is gone
            return None
        real = self._real.get(folder)
        if real is None:
            real = self._real[folder] = os.path.realpath(folder)
        path = os.path.join(real, name)
        if _is_below(path, self._copy) or not _is_below(path, self._root):
            return None
        copied = self._copy + path[len(self._root) :]
        if os.path.exists(copied):
            return copied
        if is_code:
            self._check_missing(copied)
        return None

    def _check_missing(self, copied: str) -> None:
        if self._frozen is None:
            with open(f"{self._copy}.json", encoding="utf-8") as file:
                self._frozen = frozenset(json.load(file)["files"])
        if os.path.relpath(copied, self._copy) in self._frozen:
            raise FrozenFileMissingError(f"the frozen code lacks {copied}")

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        """Return the spec of a module, with the files of the copy. A hook of Python."""
        if name in self._looked_for:
            return None
        self._looked_for.add(name)
        try:
            folders = self._with_copies(sys.path if path is None else path)
            for finder in [*sys.meta_path]:
                # The original file may be gone by now.
                given = folders if finder is PathFinder else path
                find = getattr(finder, "find_spec", None)
                spec = None if find is None else find(name, given, target)
                if spec is not None:
                    return self._from_copy(spec)
            more = [
                self._root + folder[len(self._copy) :]  # what the copy lacks
                for folder in folders
                if _is_below(folder, self._copy)
            ]
            if path is None:  # what the finder of an editable installation does not find any more
                more += [self._copy, os.path.join(self._copy, "src")]
            spec = PathFinder.find_spec(name, more, target)
            return None if spec is None else self._from_copy(spec)
        finally:
            self._looked_for.discard(name)

    def _from_copy(self, spec: ModuleSpec) -> ModuleSpec:
        found = spec.submodule_search_locations
        places = None if found is None else self._with_copies(found)
        place = spec.origin if spec.has_location else None
        origin = self.copied(place, is_code=True) if place else None
        if origin is not None:
            new = spec_from_file_location(spec.name, origin, submodule_search_locations=places)
            return spec if new is None else new
        if places is not None and places != [*(found or ())]:
            spec.submodule_search_locations = places
        return spec

    def _with_copies(self, folders: Sequence[str]) -> list[str]:
        places = []
        for folder in folders:
            place = self._folders.get(folder)
            if place is None:
                place = self.copied(folder) or folder
                if os.path.isabs(folder):
                    self._folders[folder] = place
            places.append(place)
        return places


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + os.sep)
