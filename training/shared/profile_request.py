"""A request to profile steps of a live run, and the files in which it is answered.

The supervisor writes the request to ``profile.json`` in the queue folder of the attempt, then its
number to a word of the control block. Each chosen rank answers in ``profiles/NUMBER`` of the run
directory: first with its trace, then with a report. The process that makes the summary compresses
the trace. Standard library only.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from ltui.training.shared.regular_files import read_regular, write_private_json

REQUEST_NAME = "profile.json"
FOLDER = "profiles"
ANCHOR = "ltui.anchor"
"""Name of the mark in a trace whose time on the monotonic clock is in the report."""
DEFAULT_RANKS, DEFAULT_STEPS = "slowest,median,0", 5
MOST_STEPS = 50
"""Number of steps that can be profiled at once."""


@dataclass(frozen=True, kw_only=True)
class ProfileRequest:
    """Which steps to profile on which ranks."""

    number: int
    """Number of the profile in its run, from 1 on."""
    ranks: tuple[int, ...]
    first: int
    """The step in which the profiler warms up. Those that are measured follow."""
    steps: int
    memory: bool = False

    @property
    def last(self) -> int:
        """The last step that is measured."""
        return self.first + self.steps


def write_request(queue_dir: Path, request: ProfileRequest) -> None:
    """Write the request of an attempt. Raises ``OSError``."""
    write_private_json(queue_dir / REQUEST_NAME, asdict(request))


def read_request(queue_dir: Path) -> ProfileRequest | None:
    """Return the last request of an attempt, or None if there is none that can be read."""
    try:
        document = json.loads(read_regular(queue_dir / REQUEST_NAME))
        return ProfileRequest(
            number=int(document["number"]),
            ranks=tuple(int(rank) for rank in document["ranks"]),
            first=int(document["first"]),
            steps=int(document["steps"]),
            memory=bool(document["memory"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def report_path(folder: Path, rank: int) -> Path:
    """Return where a rank writes how its part of a profile ended."""
    return folder / f"rank-{rank:05d}.json"


def written_trace_path(folder: Path, rank: int) -> Path:
    """Return where a rank writes its trace, in the format of Chrome and Perfetto."""
    return folder / f"rank-{rank:05d}.trace.json"


def trace_path(folder: Path, rank: int) -> Path:
    """Return where the trace of a rank is, compressed, once the profile is complete."""
    return folder / f"rank-{rank:05d}.trace.json.gz"
