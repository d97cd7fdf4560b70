"""Make ``trainer.fit`` resume from the run's checkpoint if the script names none.

Lightning asks its checkpoint connector to load a path just after the ``setup`` hooks. Here the path
is inserted at that time, so the script needs no changed line. A script that passes ``ckpt_path``
itself keeps its own.

Weights-only loading is tried first. A checkpoint that contains other objects (for example a user's
hyperparameters) is loaded in full, but only from the run's own folder, where only this run writes.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ltui.training.rank.checkpoint_files import read_manifest
from ltui.training.rank.lightning_internals import checkpoint_connector, loaded_checkpoint
from ltui.training.rank.node_folders import own_path_in_broadcasts
from ltui.training.rank.resume.exact_state import ExactState
from ltui.training.rank.resume.receive_checkpoint import ReceivedCheckpoint

Report = Callable[..., None]
"""Sends an event: ``report(kind, text, **fields)``."""


def _manifest(checkpoint: Path) -> dict[str, Any]:
    return read_manifest(Path(f"{checkpoint}.json"))


def resume_from(
    trainer: Any,
    checkpoint: Path,
    report: Report,
    *,
    trusted: bool,
    exact: ExactState | None = None,
    received: ReceivedCheckpoint | None = None,
) -> None:
    """Make the ``fit`` that begins restore ``checkpoint``, and report it as an event.

    ``trusted`` allows unpickling any object. ``exact`` loads this rank's own state too.
    ``received`` gives each node the files if the run has several nodes.
    """
    connector = checkpoint_connector(trainer)
    start = connector.resume_start

    def resume_start(checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> None:
        connector.resume_start = start
        if checkpoint_path:
            text = f"The script resumes from {checkpoint_path}, so {checkpoint} was not used."
            report("note", text)
            start(checkpoint_path, *args, **kwargs)
            return
        path = checkpoint if received is None else received.receive()
        with nullcontext() if received is None else own_path_in_broadcasts(trainer.strategy, path):
            _load(start, path, report, trusted=trusted)
        state = loaded_checkpoint(connector) or _manifest(path)
        step, epoch = state.get("global_step", 0), state.get("epoch", 0)
        text = f"Resumed at step {step} from {checkpoint.name}."
        report("resumed", text, path=str(checkpoint), global_step=step, step=step, epoch=epoch)
        if exact is not None:
            exact.load(path)
        if received is not None:
            received.release()

    connector.resume_start = resume_start


def _load(start: Callable[..., None], checkpoint: Path, report: Report, *, trusted: bool) -> None:
    try:
        start(str(checkpoint))
    except pickle.UnpicklingError as refused:
        # Lightning 2.5 has no such argument; it loads checkpoints in full anyway.
        if not trusted or "weights_only" not in inspect.signature(start).parameters:
            raise
        text = (
            f"{checkpoint.name} contains more than weights ({_first_line(refused)}); it was "
            "loaded in full."
        )
        report("note", text)
        start(str(checkpoint), weights_only=False)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
