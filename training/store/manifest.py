"""Which checkpoints of a run are whole: read from their manifests, without torch.

The manifest ``NAME.ckpt.json`` is written after the checkpoint itself, so a checkpoint without one
was never completed. Checksums of large files take seconds; sizes are looked at for free.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ltui.training.run.snapshot import CheckpointInfo

_CHUNK_BYTES = 4 << 20


def checkpoints(folder: Path) -> list[CheckpointInfo]:
    """Every checkpoint with a manifest, the least trained first.

    ``ok`` is False where the file is missing or of another size, and None where only its checksum
    is left to be looked at (``verify``).
    """
    found = [info for path in _manifests(folder) if (info := _read(path)) is not None]
    return sorted(found, key=lambda info: (info.global_step, info.saved_at or 0.0))


def verify(info: CheckpointInfo) -> CheckpointInfo:
    """``info`` with ``ok`` decided by size and checksum; reads the whole file."""
    path = Path(info.path)
    try:
        manifest = json.loads(Path(f"{path}.json").read_text(encoding="utf-8"))
        ok = _sizes_fit(path, manifest) and all(
            _sha256(file) == digest for file, digest, _ in _parts(path, manifest)
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        ok = False
    return replace(info, ok=ok)


def newest_whole(folder: Path, attempt_order: bool = True) -> CheckpointInfo | None:
    """The checkpoint to resume from: the last one saved that is whole.

    The last saved, not the furthest: after a resume from an earlier step, the later steps of the
    attempt before are no longer part of the run.
    """
    candidates = [info for info in checkpoints(folder) if info.ok is not False]
    key = _saved_at if attempt_order else _step
    for info in sorted(candidates, key=key, reverse=True):
        if verify(info).ok:
            return replace(info, ok=True)
    return None


def _saved_at(info: CheckpointInfo) -> tuple[float, int]:
    return (info.saved_at or 0.0, info.global_step)


def _step(info: CheckpointInfo) -> tuple[float, int]:
    return (float(info.global_step), 0)


def _manifests(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.glob("*.ckpt.json") if not path.name.startswith(".")]
    except OSError:
        return []


def _read(manifest_path: Path) -> CheckpointInfo | None:
    path = manifest_path.with_suffix("")
    try:
        manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
        return CheckpointInfo(
            path=str(path),
            global_step=int(manifest["global_step"]),
            epoch=manifest.get("epoch"),
            ok=None if _sizes_fit(path, manifest) else False,
            reason=manifest.get("reason"),
            saved_at=manifest.get("saved_at"),
            size_bytes=manifest.get("size_bytes"),
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return CheckpointInfo(path=str(path), global_step=0, ok=False)


def _parts(path: Path, manifest: dict[str, Any]) -> Iterator[tuple[Path, str, int]]:
    """(file, checksum, size) of everything that the checkpoint consists of."""
    if "files" in manifest:
        for name, facts in manifest["files"].items():
            yield path / name, facts["sha256"], int(facts["size_bytes"])
    else:
        yield path, manifest["sha256"], int(manifest["size_bytes"])
    for name, facts in (manifest.get("beside") or {}).items():
        yield path.parent / name, facts["sha256"], int(facts["size_bytes"])


def _sizes_fit(path: Path, manifest: dict[str, Any]) -> bool:
    parts = list(_parts(path, manifest))
    return bool(parts) and all(
        file.is_file() and file.stat().st_size == size for file, _, size in parts
    )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
