"""Checkpoints of a run: which ones exist and which are complete. Reads manifests, without torch.

The manifest ``NAME.ckpt.json`` is written after the checkpoint itself, so a checkpoint without one
was never completed. Checksums of large files take seconds; sizes cost nothing.
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
_RANK_FILE = re.compile(
    r"(?P<name>step-\d{8,}-[a-z]+(-\d+)?\.ckpt)(\.rank-\d{5})?"
    r"|(?P<dot>\.)(step-\d{8,}-[a-z]+(-\d+)?\.ckpt(\.json|\.rank-\d{5}|\.node-\d{5})?\.part"
    r"|seen-by-ranks-[0-9a-f]{32})"
)
"""Names of the files that a rank writes before the manifest (``rank/checkpoint_files.py``)."""


_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError)
"""Errors of a manifest that is missing, is not JSON or lacks a key."""


def list_checkpoints(folder: Path) -> list[CheckpointInfo]:
    """Return every checkpoint that has a manifest, the one with the fewest steps first.

    ``ok`` is False if a file is missing or has another size. Otherwise it is None, because only
    ``verify`` reads checksums.
    """
    infos = [info for path in _manifest_paths(folder) if (info := _read_manifest(path)) is not None]
    return sorted(infos, key=lambda info: (info.global_step, info.saved_at or 0.0))


def verify(info: CheckpointInfo) -> CheckpointInfo:
    """Return ``info`` with ``ok`` set from size and checksum; this reads the whole checkpoint."""
    return replace(info, ok=damage_of(info) is None)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeChoice:
    """The checkpoint that a resume uses, and the newer ones that it skips."""

    taken: CheckpointInfo | None
    skipped: tuple[str, ...] = ()
    """One text for each skipped checkpoint: file name and reason, the newest first."""


def choose_checkpoint(folder: Path) -> ResumeChoice:
    """Return the undamaged checkpoint with the most progress, and why later ones are skipped.

    Checkpoints of the last attempt come first: after a resume from an earlier step, the later
    steps of the previous attempt are no longer part of the run. Timestamps are not compared,
    because clocks may be set back.
    """
    infos = list_checkpoints(folder)
    unfinished = [(_modified_at(path), path.name) for path in _without_manifest(folder, infos)]
    skipped: list[str] = []
    taken: CheckpointInfo | None = None
    for info in sorted(infos, key=_progress_key, reverse=True):
        reason = damage_of(info)
        if reason is None:
            taken = replace(info, ok=True)
            break
        skipped.append(f"{Path(info.path).name} {reason}")
    since = 0.0 if taken is None else _modified_at(Path(f"{taken.path}.json"))
    newer = [name for at, name in sorted(unfinished, reverse=True) if at > since]
    unfinished_texts = [f"{name} was never completed" for name in newer]
    return ResumeChoice(taken=taken, skipped=(*unfinished_texts, *skipped))


def checkpoint_to_resume(folder: Path) -> CheckpointInfo | None:
    """Return the checkpoint to resume from; this verifies it."""
    return choose_checkpoint(folder).taken


def furthest_checkpoint(folder: Path) -> CheckpointInfo | None:
    """Return the checkpoint with the most progress, without verifying its checksums."""
    infos = [info for info in list_checkpoints(folder) if info.ok is not False]
    return max(infos, key=_progress_key, default=None)


def import_checkpoint(info: CheckpointInfo, folder: Path) -> CheckpointInfo:
    """Import another run's checkpoint into ``folder``, as the one that a new run starts from.

    Files are hard-linked if possible: no run changes them, and each run may be deleted alone.
    Raise ``OSError``, or ``ValueError`` for a manifest that cannot be read.
    """
    source = Path(info.path)
    manifest = _load_manifest(source)
    target = folder / f"step-{info.global_step:08d}-from.ckpt"
    other_files = {}
    for name, facts in (manifest.get("beside") or {}).items():
        own_name = name.replace(source.name, target.name, 1)
        _link_or_copy(source.parent / name, folder / own_name)
        other_files[own_name] = facts
    _link_or_copy(source, target)
    # Attempt 0 is older than every attempt of this run, so its own checkpoints are newer.
    manifest.update(file=target.name, beside=other_files, attempt=0, reason="from")
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
    """Return why a checkpoint cannot be used, None if it can; reads the whole checkpoint."""
    path = Path(info.path)
    try:
        parts = list(_file_facts(path, _load_manifest(path)))
    except _UNREADABLE:
        return "has a manifest that cannot be read"
    if not parts:
        return "has a manifest that names no file"
    for file, digest, size in parts:
        part = "" if file == path else f" of {file.name}"
        try:
            if not file.is_file():
                return f"is gone{part}"
            if file.stat().st_size != size:
                return f"is truncated: {file.stat().st_size} of {size} bytes{part}"
            if _sha256(file) != digest:
                return f"has a different checksum than its manifest{part}"
        except FileNotFoundError:
            return f"is gone{part}"
        except OSError as error:
            return f"cannot be read{part} ({error.strerror})"
    return None


def _without_manifest(folder: Path, infos: list[CheckpointInfo]) -> list[Path]:
    """Return the files of checkpoints that were never completed."""
    completed = {info.path for info in infos}
    try:
        names = [*folder.glob("*.ckpt"), *folder.glob(".*.ckpt.part")]
    except OSError:
        return []
    return [path for path in names if str(path) not in completed]


def remove_unfinished(folder: Path) -> list[str]:
    """Remove the files of checkpoints that were never completed; return their names.

    Call this only while no rank is alive. Only files that ltui's ranks write are removed. A
    checkpoint that has a manifest stays, even if it is damaged.
    """
    removed = []
    try:
        paths = sorted(folder.iterdir())
    except OSError:
        return []
    for path in paths:
        match = _RANK_FILE.fullmatch(path.name)
        if match is None or (not match["dot"] and (folder / f"{match['name']}.json").exists()):
            continue
        with contextlib.suppress(OSError):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
            removed.append(path.name)
    return removed


def _modified_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _progress_key(info: CheckpointInfo) -> tuple[int, int, int, float]:
    """Return a sort key: attempt, number of the script's ``fit`` call, step, time.

    The time counts only for manifests without an attempt.
    """
    try:
        manifest = _load_manifest(info.path)
        attempt, fit = int(manifest.get("attempt") or 0), int(manifest.get("fit") or 0)
    except _UNREADABLE:
        return (0, 0, 0, 0.0)
    return (attempt, fit, info.global_step if attempt else 0, info.saved_at or 0.0)


def _manifest_paths(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.glob("*.ckpt.json") if not path.name.startswith(".")]
    except OSError:
        return []


def _read_manifest(manifest_path: Path) -> CheckpointInfo | None:
    path = manifest_path.with_suffix("")
    try:
        manifest = _load_manifest(path)
        return CheckpointInfo(
            path=str(path),
            global_step=int(manifest["global_step"]),
            epoch=manifest.get("epoch"),
            ok=None if _sizes_match(path, manifest) else False,
            reason=manifest.get("reason"),
            saved_at=manifest.get("saved_at"),
            size_bytes=manifest.get("size_bytes"),
        )
    except FileNotFoundError:
        return None
    except _UNREADABLE:
        return CheckpointInfo(path=str(path), global_step=0, ok=False)


def _load_manifest(checkpoint: Path | str) -> dict[str, Any]:
    """Return the manifest of a checkpoint. Raise one of ``_UNREADABLE``."""
    manifest: dict[str, Any] = json.loads(Path(f"{checkpoint}.json").read_text(encoding="utf-8"))
    return manifest


def _file_facts(path: Path, manifest: dict[str, Any]) -> Iterator[tuple[Path, str, int]]:
    """Yield (file, checksum, size) of every file of the checkpoint."""
    if "files" in manifest:
        for name, facts in manifest["files"].items():
            yield path / name, facts["sha256"], int(facts["size_bytes"])
    else:
        yield path, manifest["sha256"], int(manifest["size_bytes"])
    for name, facts in (manifest.get("beside") or {}).items():
        yield path.parent / name, facts["sha256"], int(facts["size_bytes"])


def _sizes_match(path: Path, manifest: dict[str, Any]) -> bool:
    parts = list(_file_facts(path, manifest))
    return bool(parts) and all(
        file.is_file() and file.stat().st_size == size for file, _, size in parts
    )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
