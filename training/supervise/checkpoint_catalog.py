"""The checkpoints of a run: those of ltui with their verification, and those of the script."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ltui.training.state.good_checkpoints import newest_checkpoint
from ltui.training.state.run_snapshot import CheckpointInfo, RunSnapshot
from ltui.training.store.history_queries import Span
from ltui.training.store.run_checkpoints import list_checkpoints, verify

MAX_KEPT = 100
"""Maximum number of reported checkpoints that are kept."""
SECONDS_KEPT = 3
"""Number of checkpoints whose duration is kept. A single slow one must not count for ever."""
CHECK_S = 5.0
"""Seconds between two checks of which files are still there."""
BEST = "best by "


class CheckpointCatalog:
    """The checkpoints of one run.

    Sizes are checked when the folder is listed. Checksums are verified once each, in a thread.
    """

    def __init__(self, folder: Path, before: RunSnapshot | None = None) -> None:
        """``before`` is the last snapshot of the previous attempt."""
        self._folder = folder
        self.seconds = () if before is None else before.checkpoint_seconds
        """How long the last checkpoints took, oldest first."""
        self._spans: Sequence[Span] | None = None
        self._known: tuple[CheckpointInfo, ...] = ()
        self._checked: dict[tuple[str, float | None], bool] = {}
        self._stale = True
        self._checking: threading.Thread | None = None

    def saved(self, seconds: object) -> None:
        """Note that a checkpoint was saved, in ``seconds`` if that is known."""
        self._stale = True
        if isinstance(seconds, (int, float)):
            self.seconds = (*self.seconds, float(seconds))[-SECONDS_KEPT:]

    def set_spans(self, spans: Sequence[Span]) -> None:
        """Set the steps that count; checkpoints of other steps are marked as superseded."""
        self._spans, self._stale = spans, True

    def checkpoints(self) -> tuple[CheckpointInfo, ...]:
        """Return the checkpoints with the verification results so far, the least trained first."""
        if self._stale:
            self._stale = False
            self._known = tuple(list_checkpoints(self._folder, self._spans))
        self._start_next_check()
        return tuple(self._with_check(info) for info in self._known)

    def verified_checkpoints(self) -> tuple[CheckpointInfo, ...]:
        """List the folder and wait until the newest checkpoint is verified."""
        if self._checking is not None:
            self._checking.join()
        self._known = tuple(list_checkpoints(self._folder, self._spans))
        newest = newest_checkpoint(self._known)
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


class ScriptCheckpoints:
    """Keeps the reported files that still exist: a ModelCheckpoint deletes those it replaces."""

    def __init__(self, before: RunSnapshot | None = None) -> None:
        kept = () if before is None else before.script_checkpoints
        self._known: dict[str, CheckpointInfo] = {info.path: info for info in kept}
        self._checked_at: float | None = None

    def add(self, fields: Mapping[str, Any]) -> None:
        """Add one checkpoint, given the fields of its ``script_checkpoint`` event."""
        path = fields.get("path")
        if not isinstance(path, str):
            return
        if fields.get("best"):
            best = f"{BEST}{fields.get('metric')}"
            for other in self._known.values():
                if (other.reason or "").startswith(best):
                    reason = (other.reason or "").removeprefix(BEST)
                    self._known[other.path] = replace(other, reason=reason)
        self._known.pop(path, None)
        self._known[path] = CheckpointInfo(
            path=path,
            global_step=int(fields.get("global_step") or 0),
            epoch=fields.get("epoch"),
            reason=_reason(fields),
            saved_at=fields.get("t"),
            size_bytes=_size(path),
        )
        while len(self._known) > MAX_KEPT:
            del self._known[next(iter(self._known))]

    def existing(self, now_s: float) -> tuple[CheckpointInfo, ...]:
        """Return the checkpoints that still existed at the last check, the oldest first.

        Only files on this machine can be checked. Others are kept as reported.
        """
        if self._checked_at is None or abs(now_s - self._checked_at) >= CHECK_S:
            self._checked_at = now_s
            deleted = [p for p in self._known if "://" not in p and not Path(p).exists()]
            for path in deleted:
                del self._known[path]
        return tuple(self._known.values())


def _reason(fields: Mapping[str, Any]) -> str | None:
    metric, value = fields.get("metric"), fields.get("value")
    if metric and isinstance(value, (int, float)):
        return f"{BEST if fields.get('best') else ''}{metric} = {value:.4g}"
    return "last" if fields.get("last") else None


def _size(path: str) -> int | None:
    try:
        status = Path(path).stat()
    except OSError:
        return None
    # A sharded checkpoint is a folder, whose own size is meaningless.
    return None if Path(path).is_dir() else status.st_size
