"""Bring the parts of a checkpoint from detached nodes to the folder of rank 0.

A detached node does not see rank 0's folder (``node_folders.py``). Its ranks write their parts into
a staging folder of that node: ``checkpoint`` for the strategy's own files, and the state file of
each rank. Then one rank of the node sends them to rank 0, which writes them to the places where
they would be on a shared file system.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from ltui.training.rank.checkpoint_files import ReceivedPart, partial_path, remove
from ltui.training.rank.file_transfer import FileEntry, copy_files, gather
from ltui.training.rank.node_folders import NodeFolders

STAGED_CHECKPOINT = "checkpoint"
"""Name of the strategy's file or folder in a staging folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectedParts:
    """What rank 0 received. ``error`` is None if nothing failed on any rank."""

    error: str | None = None
    received: Mapping[Path, ReceivedPart] = field(default_factory=dict)


def collect_parts(
    nodes: NodeFolders, checkpoint: Path, temporary: Path, error: str | None
) -> CollectedParts:
    """Send or receive the parts of ``checkpoint``. All ranks call this together.

    ``error`` is that of this rank; nothing is sent if any rank has one. ``temporary`` is where rank
    0 has the strategy's files. The staging folder of a detached node is removed.
    """
    sends = nodes.detached.get(nodes.node) == nodes.rank
    staging = nodes.staging(checkpoint)
    entries: list[FileEntry] = []
    try:
        if sends and error is None:
            entries = _entries(staging)
    except OSError as failure:
        error = f"{type(failure).__name__}: {failure}"
    try:
        return _receive(nodes, checkpoint, temporary, gather((error, entries)))
    finally:
        if sends:
            remove(staging)


def _receive(
    nodes: NodeFolders,
    checkpoint: Path,
    temporary: Path,
    reports: list[tuple[str | None, list[FileEntry]]],
) -> CollectedParts:
    errors = {rank: error for rank, (error, _) in enumerate(reports) if error is not None}
    received: dict[Path, ReceivedPart] = {}
    for node, source in sorted(nodes.detached.items()):
        if errors:
            break
        entries = reports[source][1]
        paths = None
        if nodes.rank == 0:
            paths = [_target(checkpoint, temporary, entry.name) for entry in entries]
        elif nodes.rank == source:
            paths = [nodes.staging(checkpoint) / entry.name for entry in entries]
        report = copy_files(source, entries, paths, nodes.root_device)
        errors = report.errors
        if nodes.rank == 0 and not errors:
            assert paths is not None
            for path, checksum in zip(paths, report.checksums, strict=True):
                received[path] = ReceivedPart(node=node, sha256=checksum)
    if not errors:
        return CollectedParts(received=received)
    if nodes.rank in errors:
        return CollectedParts(error=errors[nodes.rank])
    texts = [f"{nodes.describe_rank(rank)}: {text}" for rank, text in sorted(errors.items())]
    # Only rank 0 reports what failed elsewhere.
    return CollectedParts(error="; ".join(texts[:3]) if nodes.rank == 0 else None)


def _entries(staging: Path) -> list[FileEntry]:
    files = sorted(path for path in staging.rglob("*") if path.is_file())
    return [
        FileEntry(name=path.relative_to(staging).as_posix(), size_bytes=path.stat().st_size)
        for path in files
    ]


def _target(checkpoint: Path, temporary: Path, name: str) -> Path:
    """Return where rank 0 writes a staged file."""
    first, *rest = PurePosixPath(name).parts
    if first == STAGED_CHECKPOINT:
        return temporary.joinpath(*rest)
    return partial_path(checkpoint.with_name(first))
