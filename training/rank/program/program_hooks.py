"""The hooks by which ltui follows a program without a Trainer: after steps, and after imports.

This module does not import torch: torch itself loads it (``attach.py``).
"""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

KERAS = "keras.src.backend.torch"
"""The module that Keras 3 imports if torch is its backend."""

_handle: Any = None
_after_step: Callable[[Any, Any, Any], None]


def call_after_steps(function: Callable[[Any, Any, Any], None]) -> None:
    """Call ``function`` after each step of an optimizer, and no other that was passed before.

    The hook itself stays in its place: torch calls the hooks while it iterates over them, and a
    change of their number then would be an error of the user's script.
    """
    global _handle, _after_step
    _after_step = function
    if _handle is None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        _handle = register_optimizer_step_post_hook(_hook)


def _hook(optimizer: Any, args: Any, kwargs: Any) -> None:
    _after_step(optimizer, args, kwargs)


def ignore_step(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
    """Do nothing after a step."""


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that compiled code may call without compiling it, which takes seconds."""
    import torch  # torch itself imports this module

    excluded: Callable[..., Any] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return excluded


Function = tuple[str, Callable[[ModuleType], None]]
"""The name of a module, and a function to call with the module."""


class ImportWatch:
    """Calls ``functions``, each after every execution of the module of that name.

    It is a finder in front of those of ``sys.meta_path``, which finds a module as the others do. An
    error of its own never reaches the program's import.
    """

    def __init__(self, functions: Iterable[Function]) -> None:
        self._functions: dict[str, list[Function]] = {}
        for function in functions:
            self._functions.setdefault(function[0], []).append(function)
        self._missed: list[tuple[Function, ModuleType]] = []
        self._looked_for: set[str] = set()
        """Names that other finders look for now; a finder of this kind asks all finders, too."""

    def install(self) -> None:
        """Watch imports from now on, and call the functions of modules that are imported already.

        The import of such a module may still go on, and then its function may fail: it is called
        again by ``catch_up``.
        """
        imported = self._functions.keys() & sys.modules.keys()
        self._missed = [(f, sys.modules[name]) for name in imported for f in self._functions[name]]
        sys.meta_path.insert(0, self)
        self.catch_up()

    def catch_up(self) -> None:
        """Call the functions that failed, because the import of their module went on."""
        self._missed = [missed for missed in self._missed if not _call(*missed)]

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a watched module, whose loader calls the function. A hook of Python.

        Return None for any other module, and where something fails: then Python asks the other
        finders.
        """
        if name not in self._functions or name in self._looked_for:
            return None
        self._looked_for.add(name)
        try:
            for finder in sys.meta_path:
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    self._extend(spec)
                    return spec
        except Exception:  # noqa: BLE001  (the other finders raise it themselves)
            return None
        finally:
            self._looked_for.discard(name)
        return None

    def _extend(self, spec: ModuleSpec) -> None:
        """Let the loader call the function; the module keeps its own loader."""
        loader, execute = spec.loader, spec.loader.exec_module  # type: ignore[union-attr]

        def execute_and_call(module: ModuleType) -> None:
            execute(module)
            if module.__name__ == spec.name:  # a loader of an archive is that of many modules
                for function in self._functions[spec.name]:
                    _call(function, module)

        loader.exec_module = execute_and_call  # type: ignore[method-assign, union-attr]


def _call(function: Function, module: ModuleType) -> bool:
    """Call the function. Return False if it fails, as with another version of the module."""
    try:
        function[1](module)
    except Exception:  # noqa: BLE001  (an error must not reach the program's import)
        return False
    return True


def mark_process(library: str) -> None:
    """Tell the supervisor that this process has imported a library, by an empty file.

    ``training`` in its place says that it trains without being a rank.
    """
    folder = Path(os.environ["LTUI_RUN_DIR"], "queue", os.environ["LTUI_ATTEMPT"])
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / f"{library}-{os.getpid()}.imported").touch(mode=0o600)


def call_at_exit(function: Callable[[], None]) -> None:
    """Call ``function`` when this process ends by itself."""
    if multiprocessing.parent_process() is None:
        atexit.register(function)
    else:  # a child of multiprocessing ends without the functions of atexit
        multiprocessing.util.Finalize(None, function, exitpriority=0)
