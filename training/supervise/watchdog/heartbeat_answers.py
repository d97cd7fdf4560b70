"""Read the answers that the ranks' heartbeat threads write when evidence is requested.

An answer is a JSON file for each rank with its stacks and its last collectives. The heartbeat table
contains a few of these facts for ranks that do not answer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ltui.training.diagnosis.evidence import Collective, Frame, ThreadStack
from ltui.training.diagnosis.stack_frames import call_site
from ltui.training.store.run_directory import read_json
from ltui.training.tensor_queue.heartbeat_table import LATE_S, HeartbeatState

_CALLER_FRAMES = 4
"""Number of frames that are kept of a collective besides its call site."""

Answer = Mapping[str, Any]
"""The document that a heartbeat thread wrote; empty if it has not answered."""


def read_answer(folder: Path, rank: int, number: int, heartbeat: HeartbeatState | None) -> Answer:
    """Return the rank's answer to request ``number``; empty if there is none."""
    if heartbeat is None or heartbeat.answered < number:
        return {}
    document = read_json(folder / f"rank-{rank:05d}.json") or {}
    return document if document.get("question") else {}


def is_running(heartbeat: HeartbeatState | None) -> bool:
    """Return True if the heartbeat thread of a rank runs."""
    return heartbeat is not None and heartbeat_age_s(heartbeat) < LATE_S


def heartbeat_age_s(heartbeat: HeartbeatState) -> float:
    """Return the seconds since the last heartbeat."""
    return max(0.0, (time.monotonic_ns() - heartbeat.beat_ns) / 1e9)


def stacks(answer: Answer) -> tuple[ThreadStack, ...]:
    """Return the stacks of the rank's threads."""
    return tuple(
        ThreadStack(
            name=str(t["name"]),
            main=bool(t["main"]),
            native_id=t.get("native_id"),
            frames=_frames(t["frames"]),
        )
        for t in answer.get("threads") or ()
    )


def answered_facts(answer: Answer, heartbeat: HeartbeatState | None) -> dict[str, Any]:
    """Return the fields of ``RankEvidence`` that come from the answer or from the heartbeat."""
    joined = answer.get("joined", heartbeat.joined if heartbeat is not None else None)
    last_enqueued = answer.get("last_enqueued") or {}
    if not last_enqueued and heartbeat is not None and heartbeat.recorded:
        last_enqueued = {"0": heartbeat.enqueued} if heartbeat.enqueued >= 0 else {}
    earlier = answer.get("earlier_main")
    return {
        "barrier": heartbeat.barrier if heartbeat is not None else None,
        "beat_age_s": heartbeat_age_s(heartbeat) if heartbeat is not None else None,
        "joined": None if joined is None else bool(joined),
        "earlier_stacks": (ThreadStack(name="MainThread", main=True, frames=_frames(earlier)),)
        if earlier
        else (),
        "last_enqueued": {str(group): int(number) for group, number in last_enqueued.items()},
        "groups": {str(g): tuple(ranks) for g, ranks in (answer.get("groups") or {}).items()},
        "collectives": tuple(_collective(entry) for entry in answer.get("collectives") or ()),
    }


def _collective(entry: Mapping[str, Any]) -> Collective:
    frames = _frames(entry.get("frames") or ())
    return Collective(
        group=str(entry["group"]),
        seq=int(entry["seq"]),
        op=str(entry["op"]),
        sizes=tuple(tuple(int(n) for n in size) for size in entry.get("sizes") or ()),
        dtypes=tuple(str(t) for t in entry.get("dtypes") or ()),
        retired=bool(entry.get("retired")),
        p2p=bool(entry.get("p2p")),
        call_site=call_site(frames),
        frames=frames[:_CALLER_FRAMES],
    )


def _frames(rows: Sequence[Sequence[Any]]) -> tuple[Frame, ...]:
    return tuple(Frame(file=str(f), line=int(n), function=str(c)) for f, n, c in rows)
