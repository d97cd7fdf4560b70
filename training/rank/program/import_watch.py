"""Call functions when modules have been imported: a finder in front of those of ``sys.meta_path``.

It finds a module as the other finders do, and only adds a call behind the execution of the module.
An error of its own never reaches the program's import.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class ImportWatch:
    """Calls the function of each module in ``functions`` after every execution of that module."""

    def __init__(self, functions: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._functions = functions
        self._missed: set[str] = set()

    def install(self) -> None:
        """Watch imports from now on, and call the functions of modules that are imported already.

        The import of such a module may still go on, and then its function may fail: it is called
        again by ``catch_up``.
        """
        self._missed = self._functions.keys() & sys.modules.keys()
        sys.meta_path.insert(0, self)
        self.catch_up()

    def catch_up(self) -> None:
        """Call the functions that failed, because the import of their module went on."""
        for name in list(self._missed):
            self._call(name, sys.modules[name])

    def _call(self, name: str, module: ModuleType) -> None:
        with contextlib.suppress(Exception):  # another version of the module
            self._functions[name](module)
            self._missed.discard(name)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a watched module, whose loader calls the function. A hook of Python.

        Return None for any other module, and where something fails: then Python asks the other
        finders.
        """
        if name not in self._functions:
            return None
        with contextlib.suppress(Exception):
            for finder in sys.meta_path:
                spec = None if finder is self else finder.find_spec(name, path, target)
                if spec is not None:
                    self._extend(spec)
                    return spec
        return None

    def _extend(self, spec: ModuleSpec) -> None:
        """Let the loader call the function; the module keeps its own loader."""
        loader, execute = spec.loader, spec.loader.exec_module  # type: ignore[union-attr]

        def execute_and_call(module: ModuleType) -> None:
            execute(module)
            if module.__name__ == spec.name:  # a loader of an archive is that of many modules
                self._call(spec.name, module)

        loader.exec_module = execute_and_call  # type: ignore[method-assign, union-attr]
