"""``import ltui_rank``: what a PyTorch program may tell ltui, in two lines more.

    import ltui_rank as ltui

    ltui.on_checkpoint(save, load)       # stop with a checkpoint, and resume
    for batch in ltui.track(loader):     # ... at the same batch
        ...
        ltui.log(loss=loss)              # a metric

Outside of a run of ltui every function does nothing, at the cost of a call. Nothing but the
standard library is imported, so a program may keep these lines wherever it runs.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["log", "on_checkpoint", "track"]

_Loop = TypeVar("_Loop", bound=Iterable[Any])


def log(metrics: Mapping[str, Any] | None = None, **more: Any) -> None:
    """Log metrics by name at the present step: numbers, or tensors with one element.

    A tensor on a GPU is copied when the GPU reaches it; the call does not wait for that. Values
    that are no numbers are left out.
    """
    if (module := _module_of_run("logged_values")) is not None:
        module.logged_values.record({**(metrics or {}), **more})


def track(loop: _Loop, *, name: str = "") -> _Loop:
    """Return ``loop``, a loader or any other iterable, so that ltui knows where the program is.

    With ``on_checkpoint`` a stopped run continues within the loop: after the items whose turn was
    over. Loops may be nested (epochs, batches). If a program has several of them one after another,
    each needs its own ``name``.
    """
    module = _module_of_run("tracked_loop")
    return loop if module is None else module.TrackedLoop(loop, name)


def on_checkpoint(
    save: Callable[[Path], Any], load: Callable[[Path], Any], *, all_ranks: bool | None = None
) -> bool:
    """Let ltui save checkpoints of this program, and load the one from which the run resumes.

    Call it on every rank, after the model and the optimizer exist and before the loop.
    ``save(folder)`` writes what the program needs into the empty ``folder``. It is called at the
    end of a step: on rank 0 alone, or on every rank if the model is sharded (FSDP, DeepSpeed);
    ``all_ranks`` decides otherwise. If it raises, there is no checkpoint and training goes on.
    ``load(folder)`` is called at once, on every rank, if the run resumes; what it raises is raised
    here. Random states and the positions of tracked loops are saved and restored by ltui.

    Return True if ``load`` was called.
    """
    module = _module_of_run("program_rank")
    return False if module is None else bool(module.register(save, load, all_ranks))


def _module_of_run(name: str) -> Any:
    """Return a module that acts within a run; None outside, or if it cannot be used here."""
    if not (os.environ.get("LTUI_RUN_DIR") and os.environ.get("LTUI_RUN_ID")):
        return None
    try:
        return importlib.import_module(f"ltui.training.rank.program.{name}")
    except ImportError:  # for example without torch
        return None
