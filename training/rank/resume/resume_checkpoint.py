"""Make ``trainer.fit`` go on from the run's checkpoint where the script names none.

Lightning asks its checkpoint connector to load a path just after the ``setup`` hooks; here the
path is put in at that moment, so the script needs no changed line. A script that passes
``ckpt_path`` itself keeps its own.

Weights-only loading is tried first. Where a checkpoint holds other objects (a user's
hyperparameters, say), it is loaded in full, but only from the run's own folder, where nobody but
this run writes.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ltui.training.rank.resume.exact_state import ExactState

Tell = Callable[..., None]


def fit_number(checkpoint: Path) -> int:
    """Which ``fit`` of the script the checkpoint was saved in, as its manifest says; 1 by
    default."""
    try:
        manifest = json.loads(Path(f"{checkpoint}.json").read_text())
        return int(manifest.get("fit", 1))
    except (OSError, ValueError, AttributeError):
        return 1


def resume_from(
    trainer: Any, checkpoint: Path, tell: Tell, *, trusted: bool, exact: ExactState | None = None
) -> None:
    """Have the coming ``fit`` restore ``checkpoint``. ``tell(kind, text, **fields)`` reports it."""
    connector = trainer._checkpoint_connector
    start = connector.resume_start

    def resume_start(checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> None:
        connector.resume_start = start
        if checkpoint_path:
            text = f"The script resumes from {checkpoint_path}, so {checkpoint} was not used."
            tell("note", text)
            start(checkpoint_path, *args, **kwargs)
            return
        _load(start, checkpoint, tell, trusted=trusted)
        state = connector._loaded_checkpoint
        step, epoch = state.get("global_step", 0), state.get("epoch", 0)
        text = f"Resumed at step {step} from {checkpoint.name}."
        tell("resumed", text, path=str(checkpoint), global_step=step, step=step, epoch=epoch)
        if exact is not None:
            exact.read(checkpoint)

    connector.resume_start = resume_start


def _load(start: Callable[..., None], checkpoint: Path, tell: Tell, *, trusted: bool) -> None:
    try:
        start(str(checkpoint))
    except pickle.UnpicklingError as refused:
        if not trusted:
            raise
        text = (
            f"{checkpoint.name} holds more than weights ({_first_line(refused)}); loaded in full."
        )
        tell("note", text)
        start(str(checkpoint), weights_only=False)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
