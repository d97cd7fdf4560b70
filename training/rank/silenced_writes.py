"""Keep a program whose steps are executed again from writing what it has written before.

Its loggers write nothing, and its own checkpoints are not saved: it would replace newer ones by
older ones, or delete them. What else a program writes is not stopped; ``ltui rerun`` names it
before it starts (``app/actions/rerun_code.py``).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from ltui.training.rank.program.program_hooks import ImportWatch


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing, in place of a function that writes."""


class _SilentFileWriter:
    """In place of TensorBoard's ``FileWriter``, which creates a folder and an event file."""

    def __init__(self, log_dir: Any, *_: Any, **__: Any) -> None:
        self._log_dir = str(log_dir)

    def get_logdir(self) -> str:
        return self._log_dir

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing


def silence_program() -> None:
    """Silence the libraries that this process imports, and ``torch.save``."""

    def without_files(module: ModuleType) -> None:
        module.FileWriter = _SilentFileWriter  # type: ignore[attr-defined]

    def without_calls(path: str, names: str) -> Callable[[ModuleType], None]:
        def silence(module: ModuleType) -> None:
            for name in names.split():
                if hasattr(getattr(module, path), name):
                    setattr(getattr(module, path), name, _nothing)

        return silence

    ImportWatch(
        [
            ("torch.utils.tensorboard.writer", without_files),
            ("tensorboardX.writer", without_files),
            (
                "transformers.trainer",
                without_calls("Trainer", "_save_checkpoint save_model push_to_hub"),
            ),
        ]
    ).install()
    torch.save = _saving_nothing(torch.save)


def _saving_nothing(save: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``torch.save`` that writes no file outside of the folder of this run."""
    folder = os.path.realpath(os.environ["LTUI_RUN_DIR"])

    @functools.wraps(save)
    def saving(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(f, (str, os.PathLike)):
            path = os.path.realpath(os.fsdecode(f))
            if not path.startswith(f"{folder}{os.sep}"):
                print(f"ltui: {path} is not saved.", flush=True)
                return None
        return save(obj, f, *args, **kwargs)

    return saving


def silence_trainer(trainer: Any) -> None:
    """Silence the loggers and the checkpoint callbacks of a Lightning Trainer."""
    for logger in trainer.loggers:
        for name in ("log_metrics", "log_hyperparams", "log_graph", "save", "finalize"):
            setattr(logger, name, _nothing)
    for callback in trainer.callbacks:
        if any(base.__name__ == "Checkpoint" for base in type(callback).__mro__):
            for name in dir(callback):
                if name.startswith("on_") and not name.endswith("_checkpoint"):
                    setattr(callback, name, None)
    trainer.save_checkpoint = trainer.strategy.remove_checkpoint = _nothing
