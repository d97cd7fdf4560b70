"""``ltui logs``: print the logs of a run, as safe text on a terminal, as unchanged bytes into a
pipe."""

from __future__ import annotations

import heapq
import os
import re
import sys
import time
from argparse import Namespace
from collections.abc import Collection, Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO

from ltui.app.command_output import EXIT_DONE
from ltui.app.live.log_tail import node_of_launcher_log, rank_of_log
from ltui.app.presentation.machines import log_labels, machine_names, rank_range
from ltui.training.lifecycle.run_status import resolve_snapshot
from ltui.training.problem import ProblemError
from ltui.training.shared.regular_files import open_regular
from ltui.training.state.run_snapshot import LIVE, NodeSnapshot, RunSnapshot
from ltui.training.store.find_run import find_run
from ltui.training.store.run_directory import RunDir, ltui_home
from ltui.widgets.sanitise import clean_line
from ltui.widgets.view_models import LAUNCHER

POLL_INTERVAL_S = 0.25
"""Seconds between two reads with ``--follow``."""
CHUNK_BYTES = 1 << 20
"""Number of bytes read at once."""
LINE_BYTES = 1 << 20
"""Maximum length of a line; a longer one is printed in parts."""
_TIMESTAMP = re.compile(rb"\W{0,2}(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:[.,](\d{1,9}))?")


def print_logs(options: Namespace) -> int:
    """Run ``ltui logs RUN``."""
    run_dir = find_run(ltui_home(to_write=False), options.run)
    attempt = _find_attempt(run_dir, options.attempt)
    folder = run_dir.logs_dir(attempt)
    snapshot = _snapshot(run_dir)
    sources = selected_sources(options.rank, options.node, snapshot)
    if not options.follow and options.rank is not None:
        _require_rank(folder, min(sources or ()))
    labels = {} if snapshot is None else log_labels(snapshot)
    printer = _Printer(folder, sources, labels)
    while True:
        # The state is read before the files, so that everything written before the end is printed.
        live = options.follow and _still_writing(run_dir, attempt)
        printed = printer.print_new(last=not live)
        if not live:
            break
        if not printed:
            time.sleep(POLL_INTERVAL_S)
    return EXIT_DONE


def _snapshot(run_dir: RunDir) -> RunSnapshot | None:
    """Return the snapshot of the run, which names its machines; None if it cannot be read."""
    try:
        return resolve_snapshot(run_dir)
    except ProblemError:
        return None


def selected_sources(
    rank: str | None, machine: str | None, snapshot: RunSnapshot | None
) -> frozenset[int] | None:
    """Return the logs that ``--rank`` and ``--node`` select; None for all.

    A source is a rank, or ``LAUNCHER`` minus the number of a machine. ``rank`` is ``12`` or
    ``gpu-b:12``. Raise ``ProblemError`` if the run has no such machine, or not that rank on it.
    """
    name, colon, digits = ("" if rank is None else rank).rpartition(":")
    if colon and machine is not None and name != machine:
        raise ProblemError.of(
            where=f"--rank {rank}", what=f"it names another machine than --node {machine}."
        )
    place = name if colon else machine
    if place is None:
        return None if rank is None else frozenset({int(digits)})
    node = _find_machine(f"--rank {rank}" if colon else f"--node {place}", place, snapshot)
    if rank is None:
        return frozenset({*node.ranks, LAUNCHER - node.node})
    if int(digits) not in node.ranks:
        raise ProblemError.of(
            where=f"--rank {rank}",
            what=f"{place} has no rank {digits}.",
            remedy=f"Its ranks: {rank_range(node.ranks)}.",
        )
    return frozenset({int(digits)})


def _find_machine(where: str, text: str, snapshot: RunSnapshot | None) -> NodeSnapshot:
    """Return the machine with this number, label or host name. Raise ``ProblemError``."""
    nodes = () if snapshot is None else snapshot.nodes
    labels = {} if snapshot is None else machine_names(snapshot)
    for node in nodes:
        if text in (str(node.node), labels[node.node], node.name, node.host):
            return node
    known = ", ".join(f"{number} ({name})" for number, name in sorted(labels.items()))
    raise ProblemError.of(
        where=where,
        what="the run has no such machine.",
        remedy=f"Known machines: {known}." if known else "It runs on one machine: omit it.",
    )


def _find_attempt(run_dir: RunDir, requested: int | None) -> int:
    logs = run_dir.path / "logs"
    attempts = (
        sorted(int(p.name) for p in logs.iterdir() if p.name.isdecimal()) if logs.is_dir() else []
    )
    if requested is None and attempts:
        return attempts[-1]
    if requested in attempts:
        return requested
    place = f"--attempt {requested}" if requested is not None else run_dir.id
    if attempts:
        remedy = f"Known attempts: {', '.join(map(str, attempts))}."
    elif run_dir.read_spec().imported_from is not None:
        remedy = "The run was imported: ltui has only its metrics."
    else:
        remedy = "Nothing was started yet."
    raise ProblemError.of(where=place, what="there are no logs of this attempt.", remedy=remedy)


def _require_rank(folder: Path, rank: int) -> None:
    ranks = sorted(r for p in folder.glob("*.log") if (r := rank_of_log(p.name)) is not None)
    if rank in ranks:
        return
    remedy = (
        f"Known ranks: {', '.join(map(str, ranks))}."
        if ranks
        else "The run has no logs per rank: omit --rank."
    )
    raise ProblemError.of(
        where=f"--rank {rank}", what="there is no log of this rank.", remedy=remedy
    )


def _still_writing(run_dir: RunDir, attempt: int) -> bool:
    snapshot = resolve_snapshot(run_dir)
    return snapshot.state in LIVE and snapshot.attempt <= attempt


class _Printer:
    """Prints the new lines of an attempt's files. Lines of a rank begin with the rank: ``r0``.

    On several machines they begin with ``gpu-b:12``, and lines of a launcher with ``gpu-b``.
    """

    def __init__(
        self,
        folder: Path,
        sources: Collection[int] | None = None,
        labels: Mapping[int, str] | None = None,
    ) -> None:
        """``sources`` are the logs to print (``selected_sources``); None for all."""
        self._folder, self._labels = folder, labels or {}
        self._sources = sources
        self._files: dict[str, _LogFile] = {}
        self._safe = sys.stdout.isatty()

    def print_new(self, *, last: bool) -> bool:
        """Print new lines, and return whether there were any. ``last`` includes lines without a
        line end."""
        printed = False
        files = self._find_files()
        if len(files) == 1 and not files[0].prefix and not self._safe:
            printed = files[0].copy_new(sys.stdout.buffer, last=last)
            sys.stdout.buffer.flush()
            return printed
        new = [file.new_lines(last=last) for file in files]
        for _, prefix, line in heapq.merge(*new, key=itemgetter(0)):
            self._write(prefix, line)
            printed = True
        sys.stdout.buffer.flush()
        return printed

    def _find_files(self) -> list[_LogFile]:
        paths = sorted(
            self._folder.glob("*.log"), key=lambda p: (rank_of_log(p.name) is None, p.name)
        )
        for path in paths:
            if path.name in self._files:
                continue
            rank = rank_of_log(path.name)
            source = LAUNCHER - node_of_launcher_log(path.name) if rank is None else rank
            if self._sources is None or source in self._sources:
                self._files[path.name] = _LogFile(path, self._prefix(source, rank))
        return [self._files[path.name] for path in paths if path.name in self._files]

    def _prefix(self, source: int, rank: int | None) -> bytes:
        if self._sources is not None and len(self._sources) == 1:
            return b""
        label = self._labels.get(source, "" if rank is None else f"r{rank}")
        return f"{label} ".encode() if label else b""

    def _write(self, prefix: bytes, line: bytes) -> None:
        if self._safe:
            line = clean_line(line.decode("utf-8", "replace")).encode()
        sys.stdout.buffer.write(prefix + line + b"\n")


class _LogFile:
    """One log, read from where the last read ended.

    Logs contain no times of their own. A line that begins with a date and a time, as most loggers
    write it, has that time. The lines after it have the same time.
    """

    def __init__(self, path: Path, prefix: bytes) -> None:
        self._path, self.prefix = path, prefix
        self._done = 0
        self._rest = b""
        self._time = ""
        self._failed = False

    def new_lines(self, *, last: bool) -> Iterator[tuple[str, bytes, bytes]]:
        """Yield time, prefix and text of each new line. The time never decreases."""
        for line in self._lines(last=last):
            match = _TIMESTAMP.match(line)
            if match is not None:
                day, clock, fraction = (part or b"" for part in match.groups())
                self._time = max(self._time, f"{day.decode()} {clock.decode()}.{fraction.decode()}")
            yield self._time, self.prefix, line

    def copy_new(self, out: BinaryIO, *, last: bool) -> bool:
        """Write the new lines as they are. Return whether there were any."""
        copied = False
        for data in self._chunks():
            complete, newline, rest = (self._rest + data).rpartition(b"\n")
            if len(rest) > LINE_BYTES:
                newline, rest = newline + rest, b""
            out.write(complete + newline)
            self._rest, copied = rest, copied or bool(newline)
        if last and self._rest:
            out.write(self._rest + b"\n")
            self._rest, copied = b"", True
        return copied

    def _lines(self, *, last: bool) -> Iterator[bytes]:
        for data in self._chunks():
            *lines, self._rest = (self._rest + data).split(b"\n")
            if len(self._rest) > LINE_BYTES:
                lines, self._rest = [*lines, self._rest], b""
            yield from lines
        if last and self._rest:
            last_line, self._rest = self._rest, b""
            yield last_line

    def _chunks(self) -> Iterator[bytes]:
        """Yield what is new in the file, and a line in place of what the limit has removed."""
        try:
            with open_regular(self._path) as file:
                descriptor = file.fileno()
                while True:
                    begin, end = _next_data(descriptor, self._done)
                    if begin > self._done:
                        removed = f"{(begin - self._done) / 1e6:.0f} MB were removed here"
                        yield f"\n[ltui: {removed}, LTUI_LOG_LIMIT]\n".encode()
                    data = os.pread(descriptor, min(CHUNK_BYTES, end - begin), begin)
                    if not data:
                        return
                    self._done = begin + len(data)
                    yield data
        except OSError as error:
            if not self._failed:
                sys.stderr.write(f"{self._path}: it cannot be read ({error.strerror}).\n")
            self._failed = True


def _next_data(descriptor: int, offset: int) -> tuple[int, int]:
    """Return begin and end of the next part of a file that is no hole (``run_folder.py``)."""
    try:
        begin = os.lseek(descriptor, offset, os.SEEK_DATA)
        return begin, os.lseek(descriptor, begin, os.SEEK_HOLE)
    except OSError:  # there is nothing after the offset, or the file system knows no holes
        return offset, offset + CHUNK_BYTES
