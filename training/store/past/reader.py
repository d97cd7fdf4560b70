"""Reader of the record of past snapshots (``snapshots.py``), also while it is written.

Another person may have made the files, so what is read is bounded, and damaged frames are skipped
and counted.
"""

from __future__ import annotations

import os
import zlib
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from ltui.training.json_codec import WRONG_CONTENT
from ltui.training.shared.regular_files import read_regular
from ltui.training.state.run_snapshot import LIVE, RunSnapshot, snapshot_from_json
from ltui.training.store.past.snapshots import FRAME, MAGIC, SUFFIX, apply

GAPS_S = (10.0, 45.0, 720.0)
"""Seconds after a snapshot for which it still counts, by level of thinning."""
MOST_FILE_BYTES = 16 << 20
MOST_FILES = 4096
MOST_FRAMES = 100_000
"""Maximum number of frames of one file that are read."""
MOST_DOCUMENT_BYTES = 64 << 20
"""Maximum size of the documents, decompressed, that one look at the record reads."""
MOST_TRIED = 32
"""Maximum number of unreadable frames that one look at the record leaves out."""
LOG_TIMES = 30
"""Number of times before a moment with the sizes of the logs."""


class PastMoment(Struct, frozen=True, kw_only=True):
    """What the record has of one moment."""

    at: float
    """Unix seconds when the snapshot was taken, at most the moment that was asked for."""
    snapshot: RunSnapshot
    log_sizes: tuple[tuple[float, Mapping[str, int]], ...] = ()
    """Bytes of each log by file name, at times up to the moment, oldest first."""


class RecordFile(Struct, frozen=True):
    """One file of a record."""

    path: Path
    begin_ms: int
    level: int
    size: int


def record_files(folder: Path) -> list[RecordFile]:
    """Return the files of a record, oldest first; none if the folder cannot be read."""
    files = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                begin, _, level = entry.name.removesuffix(SUFFIX).partition("-")
                plain = begin.isascii() and begin.isdecimal() and level in ("0", "1", "2")
                if plain and entry.name.endswith(SUFFIX) and len(begin) < 18:
                    size = entry.stat(follow_symlinks=False).st_size
                    files.append(RecordFile(Path(entry.path), int(begin), int(level), size))
    except OSError:
        pass
    return sorted(files, key=lambda file: (file.begin_ms, file.level))[-MOST_FILES:]


class _Frame(Struct):
    at: float
    whole: bool
    begin: int
    """Place of the compressed document in the file."""
    size: int


def _frames(data: bytes) -> tuple[list[_Frame], bool]:
    """Return the intact frames of a file, and whether some are damaged. A cut end is no damage."""
    frames: list[_Frame] = []
    place, damaged = len(MAGIC), not data.startswith(MAGIC[: len(data)])
    while not damaged and place + FRAME.size <= len(data) and len(frames) < MOST_FRAMES:
        crc, size, at, whole = FRAME.unpack_from(data, place)
        begin, end = place + FRAME.size, place + FRAME.size + size
        if end > len(data):
            break
        if zlib.crc32(data[place + 4 : end]) != crc or not 0 <= at < 1e11:
            # What follows cannot be found without a length that is right.
            damaged = True
            break
        frames.append(_Frame(at, whole == 1, begin, size))
        place = end
    return frames, damaged


class _Decoder:
    """Decodes frames of one file one after the other."""

    def __init__(self, data: bytes, frames: list[_Frame]) -> None:
        self._data, self._frames = data, frames
        self.next = 0
        self.document: Any = None
        self._bytes_left = MOST_DOCUMENT_BYTES

    def decode(self) -> Any:
        """Return the document of the next frame. Raise one of ``_UNREADABLE``."""
        frame = self._frames[self.next]
        unpacker = zlib.decompressobj()
        packed = self._data[frame.begin : frame.begin + frame.size]
        text = unpacker.decompress(packed, self._bytes_left)
        self._bytes_left -= len(text)
        if self._bytes_left <= 0 or not unpacker.eof:
            raise ValueError("its snapshots are too large")
        value = msgspec.msgpack.decode(text, strict=True)
        self.document = value if frame.whole else apply(self.document, value)
        self.next += 1
        return self.document

    def seek(self, number: int) -> None:
        """Prepare to decode a frame after those that it is made of."""
        whole = max((n for n in range(number + 1) if self._frames[n].whole), default=0)
        if self.document is None or not whole <= self.next <= number:
            self.next, self.document = whole, None
        self._bytes_left = MOST_DOCUMENT_BYTES


_UNREADABLE = (*WRONG_CONTENT, zlib.error, msgspec.DecodeError, OSError, MemoryError)


def documents_of(path: Path) -> Iterator[tuple[float, Any]]:
    """Yield time and document of each frame of a file, up to a damaged one."""
    try:
        data = read_regular(path, MOST_FILE_BYTES)
        frames, _ = _frames(data)
        decoder = _Decoder(data, frames)
        for number, frame in enumerate(frames):
            decoder.seek(number)
            yield frame.at, decoder.decode()
    except _UNREADABLE:
        return


class _Indexed(Struct):
    """A file and its frames by time."""

    file: RecordFile
    frames: list[_Frame]
    times: list[tuple[float, int]]
    damaged: bool


class PastReader:
    """The record of one run. Used by one thread at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[Path, _Indexed] = {}
        self._decoder: tuple[Path, int, _Decoder] | None = None
        self._log_sizes: deque[tuple[float, Mapping[str, int]]] = deque(maxlen=LOG_TIMES)

    @property
    def damage(self) -> str | None:
        """A sentence about files that are damaged in part; None if there are none."""
        count = sum(indexed.damaged for indexed in self._files.values())
        files = "1 file" if count == 1 else f"{count} files"
        return f"{files} of the record of past snapshots are damaged in part" if count else None

    def refresh(self) -> None:
        """Read what was recorded since the last call."""
        files = {file.path: file for file in record_files(self._folder)}
        for path in self._files.keys() - files.keys():
            del self._files[path]
        for path, file in files.items():
            known = self._files.get(path)
            if known is None or known.file != file:
                self._files[path] = self._index(file)

    def _index(self, file: RecordFile) -> _Indexed:
        try:
            data = read_regular(file.path, MOST_FILE_BYTES)
        except OSError:
            return _Indexed(file, [], [], file.path.exists())
        frames, damaged = _frames(data)
        times: list[tuple[float, int]] = []
        for number, frame in enumerate(frames):
            insort(times, (frame.at, number))
        return _Indexed(file, frames, times, damaged)

    def bounds(self) -> tuple[float, float] | None:
        """Return the times of the first and last snapshot; None if nothing was recorded."""
        times = [i.times for i in self._files.values() if i.times]
        return (min(t[0][0] for t in times), max(t[-1][0] for t in times)) if times else None

    def nearest(self, at: float) -> float | None:
        """Return the time nearest to ``at`` at which something was recorded."""
        near: list[float] = []
        for indexed in self._files.values():
            place = bisect_right(indexed.times, (at, MOST_FRAMES))
            near += [time for time, _ in indexed.times[max(0, place - 1) : place + 1]]
        return min(near, key=lambda time: abs(time - at), default=None)

    def following(self, at: float) -> float | None:
        """Return the time of the first snapshot after ``at``; None if there is none."""
        places = ((i.times, bisect_right(i.times, (at, MOST_FRAMES))) for i in self._files.values())
        return min((times[n][0] for times, n in places if n < len(times)), default=None)

    def at(self, at: float) -> PastMoment | None:
        """Return the last snapshot until ``at``; None if the run was not recorded then.

        A run that has ended stays as it is, until its next attempt.
        """
        for _ in range(MOST_TRIED):
            if (newest := self._newest_until(at)) is None:
                break
            time, number, indexed = newest
            try:
                document = self._document(indexed, number)
                snapshot = snapshot_from_json(document["snapshot"])
                if at - time > GAPS_S[indexed.file.level] and snapshot.state in LIVE:
                    return None
                sizes = sorted((p for p in self._log_sizes if p[0] <= time), key=lambda p: p[0])
                return PastMoment(at=time, snapshot=snapshot, log_sizes=tuple(sizes))
            except _UNREADABLE:
                indexed.damaged = indexed.damaged or indexed.file.path.exists()
                indexed.times.remove((time, number))
                self._decoder = None
        return None

    def _newest_until(self, at: float) -> tuple[float, int, _Indexed] | None:
        places = ((i, bisect_right(i.times, (at, MOST_FRAMES))) for i in self._files.values())
        newest = ((*indexed.times[place - 1], indexed) for indexed, place in places if place)
        return max(newest, key=lambda each: each[0], default=None)

    def _document(self, indexed: _Indexed, number: int) -> Any:
        """Return the document of a frame; those on the way give the sizes of the logs."""
        path, size = indexed.file.path, indexed.file.size
        if self._decoder is None or self._decoder[:2] != (path, size):
            data = read_regular(path, MOST_FILE_BYTES)
            self._decoder = path, size, _Decoder(data, indexed.frames)
            self._log_sizes.clear()
        decoder = self._decoder[2]
        if decoder.next == number + 1 and decoder.document is not None:
            return decoder.document
        before = decoder.next
        decoder.seek(number)
        if decoder.next != before:
            self._log_sizes.clear()
        while decoder.next <= number:
            frame = indexed.frames[decoder.next]
            logs = decoder.decode().get("logs")
            if isinstance(logs, dict):
                sizes = {k: v for k, v in logs.items() if isinstance(k, str) and type(v) is int}
                self._log_sizes.append((frame.at, sizes))
        return decoder.document
