"""Catalog of a run's checkpoints, with their verification results."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

from ltui.training.state.run_snapshot import CheckpointInfo
from ltui.training.store.checkpoint_manifest import list_checkpoints, verify


class CheckpointCatalog:
    """The checkpoints of one run.

    Sizes are checked when the folder is listed. Checksums are verified once each, in a thread.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: tuple[CheckpointInfo, ...] = ()
        self._checked: dict[tuple[str, float | None], bool] = {}
        self._stale = True
        self._checking: threading.Thread | None = None

    def invalidate(self) -> None:
        """List the folder again at the next call of ``checkpoints``."""
        self._stale = True

    def checkpoints(self) -> tuple[CheckpointInfo, ...]:
        """Return the checkpoints with the verification results so far, the least trained first."""
        if self._stale:
            self._stale = False
            self._known = tuple(list_checkpoints(self._folder))
        self._start_next_check()
        return tuple(self._with_check(info) for info in self._known)

    def verified_checkpoints(self) -> tuple[CheckpointInfo, ...]:
        """List the folder and wait until the checkpoint that was saved last is verified."""
        if self._checking is not None:
            self._checking.join()
        self._known = tuple(list_checkpoints(self._folder))
        newest = max(self._known, key=lambda c: c.saved_at or 0.0, default=None)
        if newest is not None and newest.ok is None:
            self._check(newest)
        return tuple(self._with_check(info) for info in self._known)

    def _with_check(self, info: CheckpointInfo) -> CheckpointInfo:
        checked = self._checked.get((info.path, info.saved_at))
        return info if info.ok is False or checked is None else replace(info, ok=checked)

    def _start_next_check(self) -> None:
        if self._checking is not None and self._checking.is_alive():
            return
        for info in reversed(self._known):
            if info.ok is None and (info.path, info.saved_at) not in self._checked:
                self._checking = threading.Thread(target=self._check, args=(info,), daemon=True)
                self._checking.start()
                return

    def _check(self, info: CheckpointInfo) -> None:
        key = (info.path, info.saved_at)
        if key not in self._checked:
            self._checked[key] = verify(info).ok is True
