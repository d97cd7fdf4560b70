"""Checkpoints that are whole or absent: temporary name, flush, rename, manifest.

``step-00001204-stop.ckpt`` and, written last, ``step-00001204-stop.ckpt.json``: a file without a
manifest, or one whose size or checksum differs, is never resumed from. A sharded checkpoint is a
directory; its manifest lists the checksum of every file. Beside it lies a small file of each rank
with what is the rank's own (``exact.py``), listed in the manifest too.

Every rank calls ``save`` at the same place and passes the same collectives whatever fails:
Lightning's own ``save_checkpoint`` leaves the other ranks in a barrier when rank 0's disk is full,
so its parts are called here one by one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ltui.training.rank.channel import lightning_version
from ltui.training.rank.exact import rank_file

MANIFEST_VERSION = 1
_SPARE_BYTES = 16 << 20
_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """How saving went on this rank: ``error`` is None where it went well."""

    path: Path
    size_bytes: int | None = None
    seconds: float = 0.0
    error: str | None = None


def checkpoint_name(global_step: int, reason: str) -> str:
    return f"step-{global_step:08d}-{reason}.ckpt"


def save(
    trainer: Any,
    folder: Path,
    reason: str,
    *,
    attempt: int,
    fit: int,
    amend: Callable[[dict[str, Any]], None] | None = None,
    rank_state: Callable[[], dict[str, Any]] | None = None,
) -> Saved:
    """Write one checkpoint; all ranks call it together. Raises nothing that a disk can cause.

    ``amend`` may change the dumped dictionary before it is written. ``rank_state`` gives what this
    rank keeps for itself.
    """
    began = time.perf_counter()
    step, epoch = trainer.global_step, trainer.current_epoch
    path = folder / checkpoint_name(step, reason)
    temporary = folder / f".{path.name}.part"
    error: str | None = None
    own_part = _part_of(rank_file(path, trainer.global_rank))
    ranks = trainer.world_size if rank_state is not None else 0
    try:
        state = None if rank_state is None else rank_state()
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(False)
        if amend is not None:
            amend(checkpoint)
        if trainer.is_global_zero:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _remove(temporary)
            require_space(folder, bytes_of(checkpoint))
        trainer.strategy.save_checkpoint(checkpoint, str(temporary))
        if state is not None:
            _write_state(own_part, state)
    except Exception as failure:  # noqa: BLE001  (the barrier below must be reached by every rank)
        error = f"{type(failure).__name__}: {failure}"
        _remove(own_part)
    trainer.strategy.barrier("ltui checkpoint")
    size: int | None = None
    if trainer.is_global_zero:
        try:
            if error is None:
                versions = {"torch": torch.__version__, "lightning": lightning_version(trainer)}
                size = _publish(
                    temporary,
                    path,
                    ranks,
                    global_step=step,
                    epoch=epoch,
                    reason=reason,
                    attempt=attempt,
                    fit=fit,
                    **versions,
                )
        except OSError as failure:
            error = f"{type(failure).__name__}: {failure}"
        if error is not None:
            for part in (temporary, *folder.glob(f".{path.name}.rank-*.part")):
                _remove(part)
    return Saved(path=path, size_bytes=size, seconds=time.perf_counter() - began, error=error)


def _part_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")


def _write_state(part: Path, state: dict[str, Any]) -> None:
    # Every rank writes, and the first to come makes the folder.
    part.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with part.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def _publish(temporary: Path, path: Path, ranks: int, **facts: Any) -> int:
    """Flush, checksum, rename, then the manifest. Returns the size in bytes."""
    manifest_path = Path(f"{path}.json")
    manifest_path.unlink(missing_ok=True)
    beside = _publish_states(path, ranks)
    files = {}
    for file in _files(temporary):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
        files[str(file.relative_to(temporary))] = (_sha256(file), file.stat().st_size)
    if path.is_dir():
        shutil.rmtree(path)
    os.rename(temporary, path)
    _fsync_folder(path.parent)
    size = sum(size for _, size in files.values())
    manifest = {
        "version": MANIFEST_VERSION,
        "file": path.name,
        "sha256": files["."][0] if "." in files else None,
        "size_bytes": size,
        "saved_at": time.time(),
        "beside": beside,
        **facts,
    }
    if path.is_dir():
        manifest["files"] = {
            name: {"sha256": digest, "size_bytes": bytes_}
            for name, (digest, bytes_) in files.items()
        }
    write_whole(manifest_path, json.dumps(manifest, indent=1).encode())
    return size


def _publish_states(path: Path, ranks: int) -> dict[str, dict[str, Any]]:
    """The ranks' own files under their names. A rank that could not write has left none."""
    for earlier in path.parent.glob(f"{path.name}.rank-*"):
        earlier.unlink(missing_ok=True)
    beside = {}
    for rank in range(ranks):
        file = rank_file(path, rank)
        os.rename(_part_of(file), file)
        beside[file.name] = {"sha256": _sha256(file), "size_bytes": file.stat().st_size}
    return beside


def _files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from sorted(p for p in path.rglob("*") if p.is_file())
    else:
        yield path


def prune_periodic(folder: Path, keep: int) -> None:
    """Remove all but the ``keep`` newest periodic checkpoints; the manifest goes first."""
    manifests = sorted(folder.glob("step-*-periodic.ckpt.json"), key=lambda p: p.stat().st_mtime)
    for manifest in manifests[: max(0, len(manifests) - keep)]:
        manifest.unlink(missing_ok=True)
        path = manifest.with_suffix("")
        for file in (path, *path.parent.glob(f"{path.name}.rank-*")):
            _remove(file)


def write_whole(path: Path, data: bytes) -> None:
    """Write ``data`` under a temporary name, flush it, rename it."""
    temporary = path.with_name(f".{path.name}.part")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.rename(temporary, path)
    _fsync_folder(path.parent)


def require_space(folder: Path, needed_bytes: int) -> None:
    """Raises ``OSError`` where the disk can't take ``needed_bytes`` and a little more."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes + _SPARE_BYTES:
        raise OSError(
            f"{folder} has {free / 1e6:.0f} MB free, a checkpoint takes {needed_bytes / 1e6:.0f} MB"
        )


def bytes_of(value: Any) -> int:
    """Bytes of all tensors in a checkpoint dictionary."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(bytes_of(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return sum(bytes_of(item) for item in value)
    return 0


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """As far as it can be removed."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
