"""Checkpoints and resume of Hugging Face's ``Trainer``, without a changed line.

A checkpoint of ltui contains one of the Trainer's own: model, optimizer, scheduler, random states
of each rank, ``trainer_state.json``. A resume passes it to ``train``, which skips the batches that
were used. The boundary of a step is where the Trainer itself would save, after it has logged and
evaluated. After the last step of an epoch that is after the hooks of the epoch's end, because the
Trainer resumes with the next epoch.

The Trainer has no public function that saves a whole checkpoint, so this module names the private
ones that it relies on: ``Trainer._save_checkpoint`` and ``Trainer._maybe_log_save_evaluate``, seen
in transformers 5.23. If one of them is missing, a run is stopped as any other program.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from ltui.training.rank.program.tracked_loop import stack

_MANY = 1_000_000
"""More epochs than this mean that the number of steps alone limits the training."""
_HOOKS = ("train", "_maybe_log_save_evaluate", "_save_checkpoint")


def adapt_trainer(module: ModuleType) -> None:
    """Let every ``Trainer`` of ``transformers.trainer`` save and resume."""
    trainer_class = module.Trainer
    if all(callable(getattr(trainer_class, name, None)) for name in _HOOKS):
        trainer_class.train = _resuming(trainer_class.train)
        trainer_class._maybe_log_save_evaluate = _passing_boundaries(
            trainer_class._maybe_log_save_evaluate
        )


class _Training:
    """The first training of this process. Later ones cannot be resumed, so they save nothing."""

    trainer: Any = None
    is_over = False


def _resuming(train: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``Trainer.train`` that begins with the run's checkpoint, if the run resumes."""

    @functools.wraps(train)
    def resuming(trainer: Any, checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        checkpoint = kwargs.pop("resume_from_checkpoint", checkpoint)
        if _Training.trainer is None:
            _Training.trainer = trainer
            checkpoint = _register(trainer) or checkpoint
        stack.library_ends_steps = True
        try:
            return train(trainer, checkpoint, *args, **kwargs)
        finally:
            stack.library_ends_steps = False
            _Training.is_over = True

    return resuming


def _register(trainer: Any) -> str | None:
    """Have ltui save checkpoints of ``trainer``. Return the folder from which it resumes."""
    # Imported here, because most processes that import the library do not train.
    from ltui.training.rank.program import program_rank

    folders: list[Path] = []
    if program_rank.is_registered():  # by the script
        return None
    program_rank.register(functools.partial(_save, trainer), folders.append, all_ranks=True)
    found = [path for folder in folders for path in folder.glob("checkpoint-*")]
    return str(found[0]) if found else None


def _save(trainer: Any, folder: Path) -> None:
    if _Training.is_over:
        raise ValueError("ltui saves only the first training of a script")
    with _changed(trainer.args, output_dir=str(folder), save_only_model=False, push_to_hub=False):
        trainer._save_checkpoint(trainer.model, trial=None)


@contextmanager
def _changed(arguments: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(arguments, name) for name in values if hasattr(arguments, name)}
    try:
        for name in before:
            setattr(arguments, name, values[name])
        yield
    finally:
        for name, value in before.items():
            setattr(arguments, name, value)


def _passing_boundaries(after_step: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``_maybe_log_save_evaluate`` with the boundary of the step behind it."""
    last_step = -1

    @functools.wraps(after_step)
    def passing(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal last_step
        result = after_step(trainer, *args, **kwargs)
        state = trainer.state
        # Called once after a step, and again after the last step of an epoch.
        again, last_step = state.global_step == last_step, state.global_step
        with contextlib.suppress(Exception):  # another version of the library
            _report_progress(state)
        ends_epoch = abs(state.epoch - round(state.epoch)) < 1e-9
        if again or not ends_epoch:
            stack.end_of_body()
        return result

    return passing


def _report_progress(state: Any) -> None:
    """Send the epoch of the next step, and once how long the training is."""
    # Imported here, because most processes that import the library do not train.
    from ltui.training.rank.program import program_rank

    epochs, steps = getattr(state, "num_train_epochs", 0), getattr(state, "max_steps", 0)
    program_rank.report_progress(
        epoch=int(state.epoch + 1e-9),
        left_steps=steps - state.global_step if steps > 0 else None,
        max_epochs=epochs if 0 < epochs < _MANY else None,
    )
