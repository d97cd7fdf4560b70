"""Which checkpoints of a run are whole: read from their manifests, without torch.

The manifest ``NAME.ckpt.json`` is written after the checkpoint itself, so a checkpoint without one
was never completed. Checksums of large files take seconds; sizes are looked at for free.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ltui.training.state.run_snapshot import CheckpointInfo

_CHUNK_BYTES = 4 << 20
_OURS = re.compile(
    r"(?P<name>step-\d{8,}-[a-z]+(-\d+)?\.ckpt)(\.rank-\d{5})?"
    r"|(?P<dot>\.)step-\d{8,}-[a-z]+(-\d+)?\.ckpt(\.json|\.rank-\d{5})?\.part"
)
"""Files that a rank writes before the manifest, as ``rank/coordination/checkpoint_files.py`` names
them."""


def list_checkpoints(folder: Path) -> list[CheckpointInfo]:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeChoice:
    """Which checkpoint a resume takes, and which newer ones it passes over."""

    taken: CheckpointInfo | None
    skipped: tuple[tuple[str, str], ...] = ()
    """(file name, why), the newest first."""

    def skip_reasons(self) -> list[str]:
        return [f"{name} {why}" for name, why in self.skipped]


def choose_checkpoint(folder: Path) -> ResumeChoice:
    """The checkpoint that the last attempt got furthest with, of those that are whole, and what was
    found wrong with later ones.

    Of the last attempt first: after a resume from an earlier step, the later steps of the attempt
    before are no longer part of the run. No clock is asked, as clocks are set back.
    """
    found = list_checkpoints(folder)
    unfinished = [(_changed_at(path), path.name) for path in _without_manifest(folder, found)]
    skipped: list[tuple[str, str]] = []
    taken: CheckpointInfo | None = None
    for info in sorted(found, key=_progress, reverse=True):
        why = damage_of(info)
        if why is None:
            taken = replace(info, ok=True)
            break
        skipped.append((Path(info.path).name, why))
    since = 0.0 if taken is None else _changed_at(Path(f"{taken.path}.json"))
    late = [name for at, name in sorted(unfinished, reverse=True) if at > since]
    skipped = [*((name, "was never completed") for name in late), *skipped]
    return ResumeChoice(taken=taken, skipped=tuple(skipped))


def checkpoint_to_resume(folder: Path) -> CheckpointInfo | None:
    """The checkpoint to resume from."""
    return choose_checkpoint(folder).taken


def furthest_checkpoint(folder: Path) -> CheckpointInfo | None:
    """The checkpoint to resume from, if it is whole: its checksums are not looked at."""
    known = [info for info in list_checkpoints(folder) if info.ok is not False]
    return max(known, key=_progress, default=None)


def import_checkpoint(info: CheckpointInfo, folder: Path) -> CheckpointInfo:
    """Another run's checkpoint in ``folder``, as the one that a run begins from.

    Files are linked where they can be: neither run changes them, and each may be deleted alone.
    Raises ``OSError``, or ``ValueError`` for a manifest that can't be read.
    """
    source = Path(info.path)
    manifest = json.loads(Path(f"{source}.json").read_text(encoding="utf-8"))
    target = folder / f"step-{info.global_step:08d}-from.ckpt"
    beside = {}
    for name, facts in (manifest.get("beside") or {}).items():
        own = name.replace(source.name, target.name, 1)
        _link_or_copy(source.parent / name, folder / own)
        beside[own] = facts
    _link_or_copy(source, target)
    # Of no attempt of this run: whatever it saves itself is newer.
    manifest.update(file=target.name, beside=beside, attempt=0, reason="from")
    Path(f"{target}.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    return replace(info, path=str(target), reason="from")


def _link_or_copy(source: str | Path, target: str | Path) -> None:
    if Path(source).is_dir():
        shutil.copytree(source, target, copy_function=_link_or_copy)
        return
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
    os.chmod(target, 0o600)


def damage_of(info: CheckpointInfo) -> str | None:
    """What keeps a checkpoint from being resumed from; None where it is whole. Reads all of it."""
    path = Path(info.path)
    try:
        manifest = json.loads(Path(f"{path}.json").read_text(encoding="utf-8"))
        parts = list(_parts(path, manifest))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "has a manifest that cannot be read"
    if not parts:
        return "has a manifest that names no file"
    for file, digest, size in parts:
        part = "" if file == path else f" of {file.name}"
        try:
            if file.stat().st_size != size:
                return f"is truncated: {file.stat().st_size} of {size} bytes{part}"
            if _sha256(file) != digest:
                return f"has a different checksum than its manifest{part}"
        except FileNotFoundError:
            return f"is gone{part}"
        except OSError as error:
            return f"cannot be read{part} ({error.strerror})"
    return None


def _without_manifest(folder: Path, found: list[CheckpointInfo]) -> list[Path]:
    """Files of checkpoints whose saving did not come to an end."""
    known = {info.path for info in found}
    try:
        names = [*folder.glob("*.ckpt"), *folder.glob(".*.ckpt.part")]
    except OSError:
        return []
    return [path for path in names if str(path) not in known]


def remove_unfinished(folder: Path) -> list[str]:
    """Remove what a killed rank left of checkpoints that were never completed; the names.

    Only files that ltui's ranks write, and only while none of them is alive. A checkpoint that has
    a manifest stays, whole or not.
    """
    removed = []
    try:
        paths = sorted(folder.iterdir())
    except OSError:
        return []
    for path in paths:
        found = _OURS.fullmatch(path.name)
        if found is None or (not found["dot"] and (folder / f"{found['name']}.json").exists()):
            continue
        with contextlib.suppress(OSError):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
            removed.append(path.name)
    return removed


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _progress(info: CheckpointInfo) -> tuple[int, int, int, float]:
    """Attempt, ``fit`` of the script, step; the clock counts only where those are not told."""
    try:
        manifest = json.loads(Path(f"{info.path}.json").read_text(encoding="utf-8"))
        attempt, fit = int(manifest.get("attempt") or 0), int(manifest.get("fit") or 0)
    except (OSError, ValueError, TypeError, AttributeError):
        return (0, 0, 0, 0.0)
    return (attempt, fit, info.global_step if attempt else 0, info.saved_at or 0.0)


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
