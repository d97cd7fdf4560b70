"""Compress and read the traces of a profile, and write its summary: a process without torch.

``python -m ltui.training.supervise.speed.summarise_profile FOLDER``. The traces are untrusted: what
is read is bounded in size, and the process in memory.
"""

from __future__ import annotations

import argparse
import gzip
import os
import resource
import sys
import zlib
from contextlib import suppress
from pathlib import Path

import msgspec

from ltui.training.diagnosis.trace_times import RankProfile, RankReport, TraceEvent, summarise_rank
from ltui.training.json_codec import from_json, parse_json, to_json
from ltui.training.shared.profile_request import trace_path, written_trace_path
from ltui.training.shared.regular_files import open_regular, read_regular, write_private_json
from ltui.training.store.run_directory import write_atomically

SUMMARY_NAME = "summary.json"
MOST_TRACE_BYTES = 512 << 20
"""Maximum size of a trace that is read, uncompressed."""
_COMPRESSION = 3
"""Level of gzip: half the time of level 5 for a file that is a seventh larger."""
_MEMORY_BYTES = 6 << 30
"""Maximum size of the address space of this process."""


class _Trace(msgspec.Struct):
    events: list[TraceEvent] = msgspec.field(default_factory=list, name="traceEvents")


def _content(folder: Path, rank: int) -> bytes:
    """Return the trace of a rank, which is compressed afterwards."""
    path, written = trace_path(folder, rank), written_trace_path(folder, rank)
    with suppress(FileNotFoundError):  # the process of a killed supervisor has compressed it
        data = read_regular(written, MOST_TRACE_BYTES)
        write_atomically(path, gzip.compress(data, _COMPRESSION))
        written.unlink()
        return data
    try:
        with open_regular(path) as file, gzip.open(file) as content:
            data = content.read(MOST_TRACE_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"the trace {path.name} is damaged ({error})") from None
    if len(data) > MOST_TRACE_BYTES:
        raise ValueError(f"the trace {path.name} has more than {MOST_TRACE_BYTES >> 20} MB")
    return data


def read_trace(folder: Path, rank: int) -> list[TraceEvent]:
    """Return the events of the trace of a rank. Raises ``OSError`` or ``ValueError``."""
    data, path = _content(folder, rank), trace_path(folder, rank)
    try:
        return msgspec.json.decode(data, type=_Trace).events
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"the trace {path.name} cannot be read ({error})") from None


def summarise(folder: Path) -> list[RankProfile]:
    """Return the summaries of the ranks in ``folder``. Raises ``OSError`` or ``ValueError``."""
    profiles = []
    for path in sorted(folder.glob("rank-?????.json")):
        report = from_json(RankReport, parse_json(read_regular(path, 1 << 20)))
        profiles.append(summarise_rank(report, read_trace(folder, report.rank)))
    return profiles


def main(argv: list[str] | None = None) -> int:
    """Write the summary of a profile, or why there is none. Return the exit status."""
    parser = argparse.ArgumentParser(prog="ltui-summarise-profile")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(argv).folder
    os.nice(19)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    try:
        document = {"profiles": to_json(summarise(folder))}
    except (OSError, ValueError) as error:
        document = {"error": str(error)}
    except MemoryError:
        document = {"error": "the traces need too much memory. Take fewer steps or ranks"}
    write_private_json(folder / SUMMARY_NAME, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
