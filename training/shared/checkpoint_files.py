"""The files of a checkpoint on disk: names, flush, checksums, rename and manifest. Without torch.

A checkpoint is ``step-00001204-stop.ckpt`` and its manifest ``step-00001204-stop.ckpt.json``, which
is written last. Without its manifest a checkpoint does not exist. So a process that dies at any
time leaves either the previous state or the new one, never half of a checkpoint. An existing file
is not overwritten: the newer checkpoint becomes ``step-00001204-stop-2.ckpt``, and the older one is
removed when that is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ltui.training.shared.regular_files import open_regular

MANIFEST_VERSION = 1
_SPARE_BYTES = 16 << 20
"""Bytes that must stay free on the disk after a checkpoint."""
_CHUNK_BYTES = 4 << 20
"""Bytes that are read at a time for a checksum."""


UNFINISHED_FILE = re.compile(
    r"(?P<name>step-\d{8,}-[a-z]+(-\d+)?\.ckpt)(\.rank-\d{5})?"
    r"|(?P<dot>\.)(step-\d{8,}-[a-z]+(-\d+)?\.ckpt(\.json|\.rank-\d{5}|\.node-\d{5})?\.part"
    r"|seen-by-ranks-[0-9a-f]{32})"
)
"""Names of the files that a rank writes before the manifest."""


def checkpoint_name(global_step: int, reason: str) -> str:
    """Return the file name, such as ``step-00001204-stop.ckpt``."""
    return f"step-{global_step:08d}-{reason}.ckpt"


def rank_file(checkpoint: Path, rank: int) -> Path:
    """Return the path of a rank's own state, such as ``step-00001204-stop.ckpt.rank-00000``."""
    return checkpoint.with_name(f"{checkpoint.name}.rank-{rank:05d}")


def partial_path(path: Path) -> Path:
    """Return the temporary path at which ``path`` is written before it is renamed."""
    return path.with_name(f".{path.name}.part")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceivedPart:
    """A file of a checkpoint that was copied from another node."""

    node: int
    sha256: str
    """The checksum of the file on that node."""


def publish_checkpoint(
    temporary: Path,
    path: Path,
    ranks: int,
    received: Mapping[Path, ReceivedPart] | None = None,
    **facts: Any,
) -> tuple[Path, int]:
    """Flush, checksum and rename the files, then write the manifest.

    Return the checkpoint's path and its size in bytes. ``temporary`` and the parts of ``ranks``
    ranks are in the folder of ``path`` under their ``partial_path`` names. ``received`` are those
    of these files that came from other nodes. ``facts`` are added to the manifest. Raises
    ``OSError``; then no manifest names what was written.
    """
    files, received = {}, received or {}
    for file in _files(temporary):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
        files[str(file.relative_to(temporary))] = _checked(file, received)
    parts = [partial_path(rank_file(path, rank)) for rank in range(ranks)]
    described_parts = [(part, _checked(part, received)) for part in parts]
    older_checkpoints = _checkpoints_of_name(path)
    final = _free_name(path)
    try:
        rank_files = {}
        for rank, (part, description) in enumerate(described_parts):
            file_of_rank = rank_file(final, rank)
            os.rename(part, file_of_rank)
            rank_files[file_of_rank.name] = description
        os.rename(temporary, final)
        fsync_folder(final.parent)
        size = sum(description["size_bytes"] for description in files.values())
        manifest = {
            "version": MANIFEST_VERSION,
            "file": final.name,
            "sha256": files["."]["sha256"] if "." in files else None,
            "size_bytes": size,
            "saved_at": time.time(),
            "beside": rank_files,
            **facts,
        }
        if final.is_dir():
            manifest["files"] = files
        write_durably(Path(f"{final}.json"), json.dumps(manifest, indent=1).encode())
    except OSError:
        remove_checkpoint(final)
        remove(partial_path(Path(f"{final}.json")))
        raise
    for older in older_checkpoints:
        remove_checkpoint(older)
    return final, size


def _checkpoints_of_name(path: Path) -> list[Path]:
    """Return the complete checkpoints of the same step and reason."""
    pattern = re.compile(rf"{re.escape(path.stem)}(-\d+)?\.ckpt\.json")
    candidates = path.parent.glob(f"{path.stem}*.ckpt.json")
    return [manifest.with_suffix("") for manifest in candidates if pattern.fullmatch(manifest.name)]


def _free_name(path: Path) -> Path:
    """Return ``path``, or the first numbered variant of it if a file of that name exists."""
    candidate, number = path, 1
    while os.path.lexists(candidate) or os.path.lexists(f"{candidate}.json"):
        number += 1
        candidate = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return candidate


def _files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from sorted(p for p in path.rglob("*") if p.is_file())
    else:
        yield path


def prune_periodic(folder: Path, keep: int) -> None:
    """Remove all but the ``keep`` newest periodic checkpoints.

    The newest are those of the latest attempt and step. The time at which they were saved does not
    count.
    """
    manifests = sorted(folder.glob("step-*-periodic*.ckpt.json"), key=_progress)
    for manifest in manifests[: max(0, len(manifests) - keep)]:
        remove_checkpoint(manifest.with_suffix(""))


def _progress(manifest: Path) -> tuple[int, int, int]:
    """Return attempt, fit and step of a checkpoint; zeros if the manifest can't be read."""
    facts = read_manifest(manifest)
    try:
        return int(facts["attempt"]), int(facts["fit"]), int(facts["global_step"])
    except (ValueError, KeyError, TypeError):
        return (0, 0, 0)


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest in the file ``path``; empty if there is none or it is damaged."""
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def fit_number(checkpoint: Path) -> int:
    """Return the number of the script's ``fit`` that saved the checkpoint, from its manifest.

    The default is 1.
    """
    try:
        return int(read_manifest(Path(f"{checkpoint}.json")).get("fit", 1))
    except (ValueError, TypeError):
        return 1


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint, its manifest first: the other files without it are no checkpoint."""
    with contextlib.suppress(OSError):
        Path(f"{path}.json").unlink()
    for file in (path, *path.parent.glob(f"{path.name}.rank-*")):
        remove(file)


def remove_unfinished(path: Path, temporary: Path) -> None:
    """Remove what was written of a checkpoint that is not complete: all ranks' parts."""
    for part in (temporary, *path.parent.glob(f".{path.name}.rank-*.part")):
        remove(part)


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
    """Raise ``OSError`` if the disk has less than ``needed_bytes`` and a reserve free."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes + _SPARE_BYTES:
        raise OSError(
            f"{folder} has {free / 1e6:.0f} MB free, a checkpoint takes {needed_bytes / 1e6:.0f} MB"
        )


def _checked(path: Path, received: Mapping[Path, ReceivedPart]) -> dict[str, Any]:
    """Return checksum and size of a file, and its node if it was received and is undamaged."""
    description, part = describe_file(path), received.get(path)
    if part is None:
        return description
    if description["sha256"] != part.sha256:
        raise OSError(f"{path} has a different checksum than the file that node {part.node} sent")
    return {**description, "node": part.node}


def describe_file(path: Path) -> dict[str, Any]:
    """Return checksum and size of a file, as in a manifest."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return {"sha256": digest.hexdigest(), "size_bytes": path.stat().st_size}


def fsync_folder(folder: Path) -> None:
    """Flush the names in the folder to disk. Raises ``OSError``."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file or a folder. Errors are ignored."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
