"""Copy files between the nodes of a run through the process group of the training.

The process group is the connection that every run of several nodes has, whatever firewalls are
between the nodes. Only public functions of ``torch.distributed`` are used, so a copy works with
gloo and with NCCL. One rank reads the files and broadcasts them in chunks. The ranks that have
somewhere to write them do so.

A broadcast uses the communicator of the training. Sending from rank to rank would make NCCL create
another one for each pair, which takes device memory and may fail where the device is full. It would
not be faster, because the network of the node that gets or has all files is the limit in both.

All ranks call these functions together. An error of a disk on one rank does not raise: that rank
keeps taking part, all ranks stop together, and every rank gets the errors of all.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist

from ltui.training.shared.checkpoint_files import require_space

CHUNK_BYTES = 8 << 20
"""Most bytes of one broadcast, and of memory that a copy needs on the host and on the device."""
_CHUNKS_PER_CHECK = 32
"""Chunks between two checks that no rank has failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """A file to copy. ``name`` is a relative path with ``/``."""

    name: str
    size_bytes: int
    sha256: str | None = None
    """The expected checksum; None if it is not known before the file is read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyReport:
    """How a copy ended. It is the same on every rank."""

    errors: dict[int, str]
    """The error of each rank that had one; empty if all files arrived."""
    checksums: tuple[str, ...] = ()
    """The SHA-256 of each file as its source read it; empty after an error."""


def gather(value: Any) -> list[Any]:
    """Return the values of all ranks, in the order of ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def broadcast(value: Any, source: int = 0) -> Any:
    """Return the value of rank ``source``. The other ranks' values are ignored."""
    values = [value]
    dist.broadcast_object_list(values, src=source)
    return values[0]


def copy_files(
    source: int, entries: Sequence[FileEntry], paths: Sequence[Path] | None, root_device: Any
) -> CopyReport:
    """Copy the files of rank ``source`` to every rank that gives ``paths``.

    ``entries`` are the same on all ranks. ``paths`` says where each file is on the source, and
    where it is written on another rank; None on a rank that does not need the files.
    """
    sequence: _FileSequence | None = None
    error: str | None = None
    total = sum(entry.size_bytes for entry in entries)
    staging = torch.empty(min(total, CHUNK_BYTES), dtype=torch.uint8, device="cpu")
    device = _transfer_device(root_device)
    buffer = _broadcast_buffer(staging, device)
    view, is_source = staging.numpy().data, dist.get_rank() == source
    try:
        if paths is not None:
            sizes = [entry.size_bytes for entry in entries]
            sequence = _FileSequence(paths, sizes, writes=not is_source)
    except OSError as failure:
        error = _describe(failure)
    for number, segments in enumerate(_chunks([entry.size_bytes for entry in entries])):
        if number % _CHUNKS_PER_CHECK == 0 and not _all_well(error is None, device):
            break
        count = segments[-1].stop
        try:
            if sequence is not None and is_source and error is None:
                sequence.read(segments, view)
        except OSError as failure:
            error = _describe(failure)
        if is_source and buffer is not staging:
            buffer[:count].copy_(staging[:count])
        dist.broadcast(buffer[:count], src=source)
        try:
            if sequence is not None and not is_source and error is None:
                if buffer is not staging:
                    staging[:count].copy_(buffer[:count])
                sequence.write(segments, view)
        except OSError as failure:
            error = _describe(failure)
    try:
        if sequence is not None:
            sequence.close()
    except OSError as failure:
        error = error or _describe(failure)
    checksums = None if sequence is None or error is not None else sequence.checksums()
    return _report(source, entries, gather((error, checksums)))


def _report(source: int, entries: Sequence[FileEntry], outcomes: Sequence[Any]) -> CopyReport:
    """Return the report of a copy from the error and the checksums of every rank."""
    errors = {rank: error for rank, (error, _) in enumerate(outcomes) if error is not None}
    if errors:
        return CopyReport(errors=errors)
    sent = outcomes[source][1]
    for entry, checksum in zip(entries, sent, strict=True):
        if entry.sha256 is not None and checksum != entry.sha256:
            text = f"{entry.name} has a different checksum than its manifest"
            return CopyReport(errors={source: text})
    for rank, (_, received) in enumerate(outcomes):
        for entry, before, after in zip(entries, sent, received or sent, strict=True):
            if before != after:
                errors[rank] = f"{entry.name} was damaged on its way from rank {source}"
    return CopyReport(errors=errors, checksums=() if errors else tuple(sent))


def _transfer_device(root_device: Any) -> torch.device:
    """Return the CPU if the process group can broadcast from its memory, else the rank's device."""
    if "cpu:" in dist.get_backend_config():
        return torch.device("cpu")
    return torch.device(root_device)


def _broadcast_buffer(staging: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return what is broadcast: ``staging`` itself, or a buffer of its size on the device."""
    return staging if device.type == "cpu" else torch.empty_like(staging, device=device)


def _all_well(well: bool, device: torch.device) -> bool:
    """Return True if ``well`` is True on all ranks."""
    flag = torch.tensor([int(well)], dtype=torch.int32, device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Segment:
    """The part of a chunk, from ``start`` to ``stop``, that belongs to one file."""

    file: int
    start: int
    stop: int


def _chunks(sizes: Sequence[int]) -> Iterator[list[_Segment]]:
    """Divide files of these sizes, one after the other, into chunks of ``CHUNK_BYTES``."""
    segments: list[_Segment] = []
    used = 0
    for file, size in enumerate(sizes):
        left = size
        while left:
            count = min(left, CHUNK_BYTES - used)
            segments.append(_Segment(file=file, start=used, stop=used + count))
            used, left = used + count, left - count
            if used == CHUNK_BYTES:
                yield segments
                segments, used = [], 0
    if segments:
        yield segments


class _FileSequence:
    """Files that are read or written one after the other, with their checksums."""

    def __init__(self, paths: Sequence[Path], sizes: Sequence[int], *, writes: bool) -> None:
        self._paths, self._sizes, self._writes = paths, sizes, writes
        self._digests = [hashlib.sha256() for _ in paths]
        self._file: BinaryIO | None = None
        self._index = -1
        if writes and paths:
            for path in paths:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                path.write_bytes(b"")
            require_space(paths[0].parent, sum(sizes))

    def _open(self, index: int) -> BinaryIO:
        if index != self._index or self._file is None:
            self.close()
            mode = "wb" if self._writes else "rb"
            self._file, self._index = self._paths[index].open(mode, buffering=0), index  # type: ignore[assignment]
        assert self._file is not None
        return self._file

    def read(self, segments: Sequence[_Segment], chunk: memoryview) -> None:
        for segment in segments:
            file, part = self._open(segment.file), chunk[segment.start : segment.stop]
            begin = 0
            while begin < len(part):
                count = file.readinto(part[begin:])  # type: ignore[attr-defined]
                if not count:
                    raise OSError(f"{self._paths[segment.file]} is shorter than expected")
                begin += count
            self._digests[segment.file].update(part)

    def write(self, segments: Sequence[_Segment], chunk: memoryview) -> None:
        for segment in segments:
            file, part = self._open(segment.file), chunk[segment.start : segment.stop]
            self._digests[segment.file].update(part)
            try:
                while part:
                    part = part[file.write(part) :]
            except OSError as failure:
                failure.filename = str(self._paths[segment.file])
                raise

    def checksums(self) -> list[str]:
        return [digest.hexdigest() for digest in self._digests]

    def close(self) -> None:
        """Close the open file. A written file is flushed and must have its full size."""
        file, self._file = self._file, None
        if file is None:
            return
        with file:
            if not self._writes:
                return
            os.fsync(file.fileno())
            size, wanted = os.fstat(file.fileno()).st_size, self._sizes[self._index]
            if size != wanted:
                path = self._paths[self._index]
                raise OSError(f"{path} has {size} of {wanted} bytes after it was received")


def _describe(error: OSError) -> str:
    return f"{type(error).__name__}: {error}"
