"""The record of a run's past snapshots: the format of its files.

Files of the folder ``past`` are named ``MILLISECONDS-LEVEL.past``. Each begins with ``MAGIC`` and
holds frames: a header (``FRAME``) and a document, MessagePack compressed by zlib. A document is the
whole value of ``{"snapshot": ..., "logs": {file name: bytes}}`` or its changes since the frame
before. Every file begins with a whole one, so each can be read alone, and a file that was cut can
be read up to the cut. The oldest files are thinned: those of level 1 have fewer
snapshots, those of level 2 fewer still.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ltui.training.state.run_snapshot import RunSnapshot
from ltui.training.store.run_directory import RunDir

MAGIC = b"ltui past 1\n"
SUFFIX = ".past"
FRAME = struct.Struct("<IIdB")
"""CRC-32 of the rest of the frame, bytes of the compressed document, unix time, 1 if whole."""
_REPLACED, _MAPPING, _LIST, _SHIFTED = range(4)
UNCHANGED = object()
"""What ``changes`` returns for equal values."""
NO_CHANGE = [_MAPPING, {}, []]
"""A frame of a document that equals the one before."""


def past_folder(run_dir: RunDir) -> Path:
    """Return the folder of the record of a run. It need not exist."""
    return run_dir.path / "past"


def document_of(snapshot: RunSnapshot, logs: Mapping[str, int]) -> dict[str, Any]:
    """Return what a frame holds. ``logs``: the bytes of each log at this time, by file name."""
    return {"snapshot": msgspec.to_builtins(snapshot, str_keys=True), "logs": dict(logs)}


def changes(before: Any, now: Any) -> Any:
    """Return what turns ``before`` into ``now``, for ``apply``; ``UNCHANGED`` without a change."""
    if before is now or (type(before) is type(now) and before == now):
        return UNCHANGED
    if isinstance(before, dict) and isinstance(now, dict):
        parts = {k: changes(before[k], v) if k in before else [0, v] for k, v in now.items()}
        changed = {k: part for k, part in parts.items() if part is not UNCHANGED}
        return [_MAPPING, changed, [key for key in before if key not in now]]
    if isinstance(before, (list, tuple)) and isinstance(now, (list, tuple)) and before and now:
        if isinstance(now[0], dict):
            pairs = ((i, changes(before[i], v)) for i, v in enumerate(now) if i < len(before))
            inner = {i: part for i, part in pairs if part is not UNCHANGED}
            return [_LIST, inner, list(now[len(before) :]), len(now)]
        if now[0] in before:
            dropped = before.index(now[0])
            kept = len(before) - dropped
            if list(before[dropped:]) == list(now[:kept]):
                return [_SHIFTED, dropped, list(now[kept:])]
    return [_REPLACED, now]


def apply(before: Any, change: Any) -> Any:
    """Return the value after ``change``. Raise one of ``WRONG_CONTENT`` if it does not fit."""
    kind, *rest = change
    if kind == _REPLACED:
        return rest[0]
    if kind == _MAPPING:
        changed, removed = rest
        value = {key: v for key, v in before.items() if key not in removed}
        for key, part in changed.items():
            value[key] = apply(before.get(key), part)
        return value
    if kind == _LIST:
        inner, added, length = rest
        values = [apply(v, inner[i]) if i in inner else v for i, v in enumerate(before)]
        return [*values, *added][:length]
    if kind == _SHIFTED:
        dropped, added = rest
        return [*before[dropped:], *added]
    raise ValueError(f"an unknown change {kind!r}")


def frame(at: float, document: Any, *, whole: bool) -> bytes:
    """Return a frame. Raise one of ``WRONG_CONTENT`` for values that cannot be stored."""
    # Level 1: four times as fast as the default, and a tenth larger.
    packed = zlib.compress(msgspec.msgpack.encode(document), 1)
    header = FRAME.pack(0, len(packed), at, whole)[4:]
    return struct.pack("<I", zlib.crc32(packed, zlib.crc32(header))) + header + packed
