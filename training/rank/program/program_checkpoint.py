"""The checkpoints of a program that has said how to save and load what it trains.

A checkpoint is a folder which the program fills, a file of each rank with its random states and the
positions of its tracked loops, and the manifest (``checkpoint_files.py``). The ranks need no
collective for it: they agree by the same table as on everything else, so a rank that fails keeps
no other one waiting.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ltui.training.rank.coordination.save_checkpoint import (
    SaveResult,
    weights_in_files,
    write_state,
)
from ltui.training.rank.program.tracked_loop import stack
from ltui.training.rank.resume.plain_data import load_plain_data, read_random_states
from ltui.training.shared.checkpoint_files import (
    checkpoint_name,
    partial_path,
    publish_checkpoint,
    rank_file,
    remove,
    remove_unfinished,
)

_VERSION = 1
"""Version of a rank's own file."""

PathFunction = Callable[[Path], Any]
"""The program's ``save`` or ``load``, called with the folder of a checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """The checkpoint from which this rank has resumed."""

    path: Path
    global_step: int


class ProgramCheckpoint:
    """How one rank of a program saves and loads."""

    def __init__(
        self, save: PathFunction, load: PathFunction, rank: int, world_size: int, all_ranks: bool
    ) -> None:
        """``all_ranks``: every rank calls ``save``, because each has a part of the model."""
        self._save, self._load = save, load
        self._rank, self._world_size = rank, world_size
        self._all_ranks = all_ranks
        self.inexact: list[str] = []
        """What a resume could not restore, as middles of sentences."""
        self.resumed: Resumed | None = None

    def save(
        self,
        folder: Path,
        reason: str,
        global_step: int,
        agree: Callable[[bool], bool],
        manifest_fields: Mapping[str, Any],
    ) -> SaveResult:
        """Save a checkpoint. All ranks call it together. No error of the program is raised.

        ``agree(ok)`` waits for all ranks, and returns True if all of them passed True. Each rank
        calls it twice, whatever fails.
        """
        began = time.perf_counter()
        path = folder / checkpoint_name(global_step, reason)
        temporary, own_part = partial_path(path), partial_path(rank_file(path, self._rank))
        first, size = self._rank == 0, None
        error = _error_of(lambda: _prepare(folder, temporary)) if first else None
        if agree(error is None):
            error = _error_of(lambda: self._write(temporary, own_part, global_step))
        if agree(error is None) and first:
            weights = weights_in_files(temporary)
            checked: dict[str, Any] = {} if weights is None else {"weights": weights}
            try:
                path, size = publish_checkpoint(
                    temporary,
                    path,
                    self._world_size,
                    global_step=global_step,
                    epoch=None,
                    reason=reason,
                    torch=torch.__version__,
                    **checked,
                    **manifest_fields,
                )
            except OSError as failure:
                error = f"{type(failure).__name__}: {failure}"
        if first and size is None:
            remove_unfinished(path, temporary)
        seconds = time.perf_counter() - began
        return SaveResult(path=path, size_bytes=size, seconds=seconds, error=error)

    def _write(self, temporary: Path, own_part: Path, global_step: int) -> None:
        state = {
            "version": _VERSION,
            "world_size": self._world_size,
            "global_step": global_step,
            "random": read_random_states(_device()),
            "loops": stack.positions(),
        }
        if self._rank == 0 or self._all_ranks:
            self._save(temporary)
        if self._rank == 0 and not any(file.is_file() for file in temporary.rglob("*")):
            raise OSError("the program's save function wrote no file")
        write_state(own_part, state)

    def resume(self, path: Path) -> None:
        """Load the program's state and prepare its loops to continue.

        Raises what the program's ``load`` raises, and ``OSError``.
        """
        ranks = len(list(path.parent.glob(f"{path.name}.rank-*")))
        if not ranks or not path.is_dir():
            raise ValueError(f"{path.name} is no checkpoint of a program: it was saved otherwise")
        saved = _read_state(rank_file(path, self._rank % ranks))
        same_ranks = ranks == self._world_size
        if not same_ranks:
            self.inexact.append(
                f"it was saved by {ranks} ranks and continues with {self._world_size}"
            )
            # All ranks must share out the same order.
            saved["loops"] = _read_state(rank_file(path, 0))["loops"]
        self._load(path)
        stack.inexact = self.inexact.append
        stack.resume(saved["loops"], saved["random"], _device(), same_ranks=same_ranks)
        self.resumed = Resumed(path=path, global_step=saved["global_step"])


def _prepare(folder: Path, temporary: Path) -> None:
    """Create the empty folder that the program fills."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    remove(temporary)
    temporary.mkdir(mode=0o700)


def _error_of(action: Callable[[], None]) -> str | None:
    """Call ``action``. Return its error as text, because the other ranks wait for the answer."""
    try:
        action()
    except Exception as failure:  # noqa: BLE001
        return f"{type(failure).__name__}: {failure}"
    return None


def _read_state(file: Path) -> dict[str, Any]:
    saved = load_plain_data(file)
    if saved.get("version") != _VERSION:
        raise ValueError(f"{file.name} was saved by another version of ltui")
    return saved


def _device() -> torch.device | None:
    """Return the GPU of this rank, if it uses one."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.device("cuda", torch.cuda.current_device())
    return None
