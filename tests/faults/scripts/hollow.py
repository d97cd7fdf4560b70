"""Cuts the cost of ``import lightning`` from nine seconds to under four of processor time.

Most of it is what a two-layer network never needs: torch's compiler and, through torchmetrics,
torchvision and SciPy. ``hide`` puts empty packages in their place. Training, DDP, gloo, DataLoader
and everything that ltui hooks into are the real ones. ``ZOO_FULL_IMPORTS=1`` hides nothing.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Callable
from typing import Any

HIDDEN = ("torchvision", "scipy", "torch._dynamo", "torch._inductor")


class _Empty(type):
    """A class whose every attribute is a class like it; calling one does nothing."""

    def __getattr__(cls, name: str) -> Any:
        return _named(name)


def _named(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    return _Empty(name, (), {"__init__": lambda self, *args, **kwargs: None})


class _Hollow(types.ModuleType):
    """A package in which every name is an empty class."""

    def __getattr__(self, name: str) -> Any:
        made = _named(name)
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if any(name == hidden or name.startswith(f"{hidden}.") for hidden in HIDDEN):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Hollow(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""


def _as_it_is(function: Any = None, *args: Any, **kwargs: Any) -> Any:
    return function if function is not None else lambda f: f


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "disable": _as_it_is,
    "graph_break": lambda *args, **kwargs: None,
    "is_compiling": lambda: False,
    # The flight recorder calls it to record the call site of a collective.
    "stack_frames_for_code": lambda *args: None,
}
"""Functions of torch._dynamo that are called although nothing is compiled."""


def hide() -> None:
    """Hide modules; call it before torch is imported."""
    if os.environ.get("ZOO_FULL_IMPORTS", "0") in ("", "0"):
        sys.meta_path.insert(0, _Finder())
