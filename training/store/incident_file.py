"""An incident file: what a run stored within some minutes, for other people and other machines.

It is a ``tar.gz`` of a part of the run directory, so that everything that reads a run reads it. The
small files come first, and the history last: of a file that was cut, what is complete is read. The
record of past snapshots is cut to the time too, so that its moments can be shown.
Whoever opens it trusts nothing in it.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import sqlite3
import tarfile
import time
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

from msgspec import Struct, field
from msgspec.structs import asdict

from ltui.training.json_codec import parse_json
from ltui.training.problem import ProblemError
from ltui.training.shared.regular_files import open_regular, read_regular
from ltui.training.store.database_schema import open_for_reading
from ltui.training.store.history_place import INCIDENT_FILE, history_file
from ltui.training.store.past.reader import documents_of, record_files
from ltui.training.store.past.snapshots import past_folder
from ltui.training.store.past.writer import FrameFile
from ltui.training.store.redaction import Redactor
from ltui.training.store.run_directory import RunDir, make_private_folders, write_json
from ltui.training.store.spec_file import document_text, parse_spec

SCHEMA = 1
SUFFIX = ".ltui"
MOST_LOG_BYTES = 256 << 10
"""End of each log that is kept: its lines have no times."""
MOST_BYTES = 256 << 20
"""Maximum size of everything in a file that is opened."""
MOST_FILES = 20_000
_BLOCK = 512
_ALWAYS = 4e9
"""A time of a sign of life that never lies in the past."""
_ABOUT = "incident.json"
_NAMES = re.compile(
    r"spec\.yaml|labels\.json|end\.json|restarts\.json|run\.db|code/\d+\.json"
    r"|(?:evidence|logs)/(?:\d+/)?[\w-][\w.-]*|past/\d{1,17}-[012]\.past"
)
"""Names of the files that may be in an incident file."""
_TIMES = {
    "steps": "wall_s", "step_windows": "wall_s", "samples": "t", "sample_windows": "wall_s",
    "gpu_samples": "t", "process_samples": "t",
}  # fmt: skip
"""The tables of which only the rows within the time are kept, and their column of the time."""


class Incident(Struct, frozen=True, kw_only=True):
    """What an incident file is about."""

    run: str
    begin: float
    end: float
    about: str
    """What happened, in words."""
    host: str
    made_at: float = field(default_factory=time.time)


class _PackedLog(Struct, frozen=True):
    """The bytes after each line of a log: in the original, and as the log is packed."""

    original: list[int]
    packed: list[int]

    def size(self, original: int) -> int:
        """Return how many bytes of the packed log were there when the original had so many."""
        lines = bisect_right(self.original, original)
        return self.packed[lines - 1] if lines else 0


class PackedFile(Struct, frozen=True):
    """One file of an incident, as it is written."""

    name: str
    data: bytes
    note: str = ""


def packed_files(
    run_dir: RunDir, incident: Incident, redactor: Redactor, work: Path
) -> list[PackedFile]:
    """Return the files of an incident, without secrets. ``work`` is a folder for the history.

    Raises ``ProblemError`` if the specification or the history cannot be read.
    """
    about = {"schema": SCHEMA, **asdict(incident), "about": redactor.text(incident.about)}
    files = [PackedFile(_ABOUT, json.dumps(about).encode())]
    logs: dict[str, _PackedLog] = {}
    for path in _chosen_files(run_dir.path):
        name = path.relative_to(run_dir.path).as_posix()
        with suppress(OSError):
            if name.startswith("logs/"):
                file, logs[name] = _packed_log(path, name, redactor)
            else:
                text = read_regular(path).decode(errors="replace")
                text = _without_secrets(name, text, redactor)
                file = PackedFile(name, text.encode(errors="replace"))
            files.append(file)
    files += _packed_record(run_dir, incident, redactor, work, logs)
    database = work / "run.db"
    rows = _cut_history(run_dir, incident, redactor, database)
    files.append(PackedFile("run.db", database.read_bytes(), f"{rows:,} rows of these minutes"))
    return files


def _without_secrets(name: str, text: str, redactor: Redactor) -> str:
    """Return a file without secrets. A document is still one, which can be read."""
    if name == "spec.yaml":
        with suppress(ProblemError):
            document = redactor.document(parse_spec(text, name).to_document())
            return document_text(document)
    return redactor.json(text) if name.endswith(".json") else redactor.text(text)


def _chosen_files(folder: Path) -> Iterator[Path]:
    """Yield the files that are packed but the history, small and important ones first."""
    patterns = ("spec.yaml", "*.json", "code/*.json", "evidence/*/*", "logs/*", "logs/*/*")
    for pattern in patterns:
        for path in sorted(folder.glob(pattern)):
            name = path.relative_to(folder).as_posix()
            if path.is_file() and not path.is_symlink() and _NAMES.fullmatch(name):
                yield path


def _packed_log(path: Path, name: str, redactor: Redactor) -> tuple[PackedFile, _PackedLog]:
    """Return the end of a log without secrets. Raise ``OSError``."""
    with open_regular(path) as file:
        size = file.seek(0, io.SEEK_END)
        begin = max(0, size - MOST_LOG_BYTES)
        file.seek(begin)
        lines = file.read(MOST_LOG_BYTES).splitlines(keepends=True)
    if begin and lines:
        begin += len(lines.pop(0))
    text = redactor.text(b"".join(lines).decode(errors="replace"))
    packed = text.encode(errors="replace")
    ends = [begin + end for end in accumulate(map(len, lines))]
    packed_ends = list(accumulate(map(len, packed.splitlines(keepends=True))))
    if len(packed_ends) != len(ends):
        # A secret of several lines was replaced: it is not known which line is which.
        ends = []
    note = f"its last {MOST_LOG_BYTES >> 10} KB" if begin else ""
    return PackedFile(name, packed, note), _PackedLog(ends, packed_ends)


def _packed_record(
    run_dir: RunDir,
    incident: Incident,
    redactor: Redactor,
    work: Path,
    logs: Mapping[str, _PackedLog],
) -> list[PackedFile]:
    """Return the past snapshots of the time without secrets, with the sizes of the packed logs."""
    packed = []
    for file in record_files(past_folder(run_dir)):
        if file.begin_ms > incident.end * 1000:
            continue
        cut: FrameFile | None = None
        for at, document in documents_of(file.path):
            if incident.begin <= at <= incident.end:
                cut = cut or FrameFile(work, at, file.level)
                cut.append(at, _past_document(document, redactor, logs))
        if cut is not None:
            cut.close()
            packed.append(PackedFile(f"past/{cut.path.name}", cut.path.read_bytes()))
    return packed


def _past_document(
    document: Any, redactor: Redactor, logs: Mapping[str, _PackedLog]
) -> dict[str, Any]:
    snapshot = document["snapshot"]
    folder = f"logs/{snapshot.get('attempt')}"
    sizes = {
        name: logs[f"{folder}/{name}"].size(size)
        for name, size in document["logs"].items()
        if f"{folder}/{name}" in logs
    }
    return {"snapshot": redactor.document(snapshot), "logs": sizes}


def _cut_history(run_dir: RunDir, incident: Incident, redactor: Redactor, path: Path) -> int:
    """Write the history of the time to ``path``; return the number of rows that have a time."""
    source = history_file(run_dir)
    rows = 0
    with (
        closing(open_for_reading(source.path, is_copy=source.is_copy)) as whole,
        closing(sqlite3.connect(path)) as cut,
    ):
        whole.backup(cut)
        cut.execute("PRAGMA journal_mode = DELETE")
        cut.create_function("redacted", 1, redactor.json)
        for table, column in _TIMES.items():
            outside = f"{column} IS NULL OR {column} NOT BETWEEN ? AND ?"
            cut.execute(f"DELETE FROM {table} WHERE {outside}", (incident.begin, incident.end))  # noqa: S608
            rows += cut.execute(f"SELECT count(*) FROM {table}").fetchone()[0]  # noqa: S608
        tables = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
        for (table,) in cut.execute(tables).fetchall():
            for _, column, kind, *_ in cut.execute(f"PRAGMA table_info({table})").fetchall():
                if kind == "TEXT":
                    changed = f"SET {column} = redacted({column}) WHERE typeof({column}) = 'text'"
                    # Two names that differ in their secrets only are one.
                    cut.execute(f"UPDATE OR REPLACE {table} {changed}")
        cut.commit()
        # What was deleted and replaced is not to be found in free pages either.
        cut.execute("VACUUM")
    return rows


def write_incident(files: list[PackedFile], target: Path) -> None:
    """Write the files of an incident. Raises ``OSError``."""
    with tarfile.open(target, "w:gz", format=tarfile.USTAR_FORMAT) as archive:
        for file in files:
            info = tarfile.TarInfo(file.name)
            info.size, info.mode, info.mtime = len(file.data), 0o600, int(time.time())
            archive.addfile(info, io.BytesIO(file.data))


def open_incident(path: Path, home: Path) -> tuple[RunDir, Incident, str | None]:
    """Write what an incident file holds below an empty ``home``, as a run that nobody controls.

    Also returns a sentence if the file is damaged or was cut. Raises ``ProblemError`` if it is no
    incident file, or too large.
    """
    with _opened(path) as stream:
        members = _members(stream, path)
        try:
            name, data = next(members)
            about = parse_json(data) if name == _ABOUT else None
        except (StopIteration, ValueError, _DamagedError):
            about = None
        incident = _incident(about, path)
        run_dir = RunDir(home / "runs" / incident.run)
        make_private_folders(run_dir.path)
        note = None
        count = 1
        try:
            for name, data in members:
                target = run_dir.path / name
                make_private_folders(target.parent)
                target.write_bytes(data)
                target.chmod(0o600)
                count += 1
        except _DamagedError as error:
            note = f"The file is damaged or was cut after {count} of its files ({error})."
    # The processes of the run are elsewhere, whatever this machine has.
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime(incident.made_at))
    write_json(
        run_dir.history_place_path,
        {
            "host": f"{incident.host} (incident file)",
            "folder": "the run directory",
            "note": f"{INCIDENT_FILE}: minutes of the run, written at {made}",
        },
    )
    os.utime(run_dir.history_place_path, (_ALWAYS, _ALWAYS))
    if run_dir.db_path.exists():
        # The time of the copy, which `history_place` shows.
        os.utime(run_dir.db_path, (min(incident.made_at, incident.end),) * 2)
    if not run_dir.spec_path.exists():
        raise _no_incident(path, note or "it has no specification of a run.")
    return run_dir, incident, note


class _DamagedError(Exception):
    """The rest of the file cannot be read."""


def _opened(path: Path) -> BinaryIO:
    try:
        return gzip.open(open_regular(path))  # type: ignore[return-value]
    except OSError as error:
        raise ProblemError.of(
            where=str(path), what=f"it cannot be read ({error.strerror or error})."
        ) from error


def _members(stream: BinaryIO, path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of each file. Raise ``_DamagedError``, or ``ProblemError`` if there is
    more than an incident file can have.

    ``tarfile`` itself would read headers of any length.
    """
    total = 0
    for _ in range(MOST_FILES):
        try:
            header = stream.read(_BLOCK)
            if not header.strip(b"\0"):
                if len(header) < _BLOCK:
                    raise _DamagedError("its end is missing")
                return
            info = tarfile.TarInfo.frombuf(header, "utf-8", "strict")
        except (OSError, EOFError, zlib.error, tarfile.HeaderError, ValueError) as error:
            raise _DamagedError(str(error) or type(error).__name__) from error
        known = info.name == _ABOUT or _NAMES.fullmatch(info.name)
        if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or not known or info.size < 0:
            raise _DamagedError(f"{info.name!r} is no file of a run")
        total += info.size
        if total > MOST_BYTES:
            raise _no_incident(path, f"it holds more than {MOST_BYTES >> 20} MB.")
        try:
            data = stream.read(-(-info.size // _BLOCK) * _BLOCK)
        except (OSError, EOFError, zlib.error) as error:
            raise _DamagedError(str(error) or type(error).__name__) from error
        if len(data) < info.size:
            raise _DamagedError(f"{info.name} is not complete")
        yield info.name, data[: info.size]
    raise _no_incident(path, f"it holds more than {MOST_FILES} files.")


def _incident(about: Any, path: Path) -> Incident:
    """Return what a file is about. Raise ``ProblemError`` if it is not known."""
    if not isinstance(about, Mapping) or not isinstance(about.get("schema"), int):
        raise _no_incident(path, "it is no incident file.")
    if about["schema"] > SCHEMA:
        raise ProblemError.of(
            where=str(path), what="a newer ltui has written it.", remedy="Upgrade ltui."
        )
    run = about.get("run")
    if not isinstance(run, str) or not re.fullmatch(r"[\w-][\w.-]{0,199}", run):
        raise _no_incident(path, "it names no run.")

    def number(name: str) -> float:
        value = about.get(name)
        return float(value) if isinstance(value, int | float) and 0 <= value < _ALWAYS else 0.0

    return Incident(
        run=run,
        begin=number("begin"),
        end=number("end"),
        about=str(about.get("about", ""))[:500],
        host=str(about.get("host", ""))[:100],
        made_at=number("made_at"),
    )


def _no_incident(path: Path, what: str) -> ProblemError:
    return ProblemError.of(where=str(path), what=what, remedy="`ltui incident RUN` writes one.")
