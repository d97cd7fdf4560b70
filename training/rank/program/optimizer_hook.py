"""The hook after each step of an optimizer, by which ltui follows a program without a Trainer.

This module does not import torch: torch itself loads it (``attach.py``).
"""

from __future__ import annotations

from collections.abc import Callable
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
