"""What makes a checkpoint whole on disk: names, flush, checksums, rename, manifest. Without torch.

``step-00001204-stop.ckpt`` and, written last, ``step-00001204-stop.ckpt.json``. Until the manifest
stands under its name the checkpoint does not exist, so a process that dies at any moment leaves
either the one before or the one after, never half of one. A name that is taken is not written
over: the newer one becomes ``step-00001204-stop-2.ckpt``, and the older goes when that is whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MANIFEST_VERSION = 1
_SPARE_BYTES = 16 << 20
_CHUNK_BYTES = 4 << 20


def checkpoint_name(global_step: int, reason: str) -> str:
    return f"step-{global_step:08d}-{reason}.ckpt"


def rank_file(checkpoint: Path, rank: int) -> Path:
    """``step-00001204-stop.ckpt.rank-00000``"""
    return checkpoint.with_name(f"{checkpoint.name}.rank-{rank:05d}")


def partial_path(path: Path) -> Path:
    """Where ``path`` is written before it gets its name."""
    return path.with_name(f".{path.name}.part")


def publish_checkpoint(temporary: Path, path: Path, ranks: int, **facts: Any) -> tuple[Path, int]:
    """Flush, checksum, rename, then the manifest. Returns where it stands, and its size in bytes.

    ``temporary`` and the parts of ``ranks`` ranks lie beside ``path`` under their ``partial_path``
    names. Raises ``OSError``; then no manifest names what was written.
    """
    files = {}
    for file in _files(temporary):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
        files[str(file.relative_to(temporary))] = (_sha256(file), file.stat().st_size)
    parts = [partial_path(rank_file(path, rank)) for rank in range(ranks)]
    digests = [(_sha256(part), part.stat().st_size) for part in parts]
    earlier = _of_that_name(path)
    final = _free_name(path)
    try:
        beside = {}
        for rank, (part, (digest, bytes_)) in enumerate(zip(parts, digests, strict=True)):
            own = rank_file(final, rank)
            os.rename(part, own)
            beside[own.name] = {"sha256": digest, "size_bytes": bytes_}
        os.rename(temporary, final)
        fsync_folder(final.parent)
        size = sum(size for _, size in files.values())
        manifest = {
            "version": MANIFEST_VERSION,
            "file": final.name,
            "sha256": files["."][0] if "." in files else None,
            "size_bytes": size,
            "saved_at": time.time(),
            "beside": beside,
            **facts,
        }
        if final.is_dir():
            manifest["files"] = {
                name: {"sha256": digest, "size_bytes": bytes_}
                for name, (digest, bytes_) in files.items()
            }
        write_durably(Path(f"{final}.json"), json.dumps(manifest, indent=1).encode())
    except OSError:
        remove_checkpoint(final)
        remove(partial_path(Path(f"{final}.json")))
        raise
    for older in earlier:
        remove_checkpoint(older)
    return final, size


def _of_that_name(path: Path) -> list[Path]:
    """Whole checkpoints of the same step and reason."""
    pattern = re.compile(rf"{re.escape(path.stem)}(-\d+)?\.ckpt\.json")
    found = (p for p in path.parent.glob(f"{path.stem}*.ckpt.json") if pattern.fullmatch(p.name))
    return [manifest.with_suffix("") for manifest in found]


def _free_name(path: Path) -> Path:
    """``path`` or, where something of that name is there, the first numbered one that is free."""
    taken, number = path, 1
    while os.path.lexists(taken) or os.path.lexists(f"{taken}.json"):
        number += 1
        taken = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return taken


def _files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from sorted(p for p in path.rglob("*") if p.is_file())
    else:
        yield path


def prune_periodic(folder: Path, keep: int) -> None:
    """Remove all but the ``keep`` newest periodic checkpoints; the manifest goes first.

    The newest by attempt and step, whatever the clock said when they were saved.
    """
    manifests = sorted(folder.glob("step-*-periodic*.ckpt.json"), key=_progress)
    for manifest in manifests[: max(0, len(manifests) - keep)]:
        remove_checkpoint(manifest.with_suffix(""))


def best_values(folder: Path, metric: str) -> list[tuple[float, Path]]:
    """(value, manifest) of the checkpoints kept for ``metric``."""
    found = []
    for manifest in folder.glob("step-*-best*.ckpt.json"):
        try:
            best = json.loads(manifest.read_text(encoding="utf-8"))["best"]
            if best["metric"] == metric:
                found.append((float(best["value"]), manifest))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


def prune_best(folder: Path, metric: str, mode: str, keep: int) -> None:
    """Remove all but the ``keep`` best checkpoints by ``metric``."""
    ranked = sorted(best_values(folder, metric), reverse=mode == "max")
    for _, manifest in ranked[keep:]:
        remove_checkpoint(manifest.with_suffix(""))


def _progress(manifest: Path) -> tuple[int, int, int]:
    """How far training was; the least where the manifest can't be read."""
    try:
        facts = json.loads(manifest.read_text(encoding="utf-8"))
        return int(facts["attempt"]), int(facts["fit"]), int(facts["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return (0, 0, 0)


def remove_checkpoint(path: Path) -> None:
    """The manifest goes first: what is left of it then is no checkpoint."""
    with contextlib.suppress(OSError):
        Path(f"{path}.json").unlink()
    for file in (path, *path.parent.glob(f"{path.name}.rank-*")):
        remove(file)


def write_durably(path: Path, data: bytes) -> None:
    """Write ``data`` under a temporary name, flush it, rename it."""
    temporary = partial_path(path)
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.rename(temporary, path)
    fsync_folder(path.parent)


def require_space(folder: Path, needed_bytes: int) -> None:
    """Raises ``OSError`` where the disk can't take ``needed_bytes`` and a little more."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes + _SPARE_BYTES:
        raise OSError(
            f"{folder} has {free / 1e6:.0f} MB free, a checkpoint takes {needed_bytes / 1e6:.0f} MB"
        )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def fsync_folder(folder: Path) -> None:
    """So that the names in it last. Raises ``OSError``."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """As far as it can be removed."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
