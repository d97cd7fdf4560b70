"""Track the checkpoints that callbacks of the user's script save, as rank 0 reports them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ltui.training.state.run_snapshot import CheckpointInfo, RunSnapshot

MAX_KEPT = 100
"""Maximum number of reported checkpoints that are kept."""
CHECK_S = 5.0
"""Seconds between two checks of which files are still there."""
BEST = "best by "


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
