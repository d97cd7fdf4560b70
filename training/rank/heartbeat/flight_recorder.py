"""The collectives of this process as PyTorch's flight recorder holds them.

The recorder's doors are private and differ between versions and back ends, so each is tried and an
absent one is absent: gloo is recorded by newer versions, NCCL by ``_dump_nccl_trace*`` and, as
``nccl2``, by ``_dump_fr_trace*``. Without one the process group's own counter remains.
"""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

MAX_ENTRIES = 96
"""Collectives told of, the last ones."""
_FRAMES = 24


class Counts(NamedTuple):
    """Last enqueued and last completed collective of the default group; -1 where unknown."""

    enqueued: int
    completed: int


UNKNOWN = Counts(-1, -1)


class FlightRecorder:
    """The flight recorder of the back end in use; look again whenever ``joined`` changes."""

    def __init__(self) -> None:
        self.missing: str | None = "torch.distributed is not in use"
        self._status: Callable[[], Any] | None = None
        self._entries: Callable[[], Any] | None = None
        self._plain: Callable[[], Any] | None = None
        self._group: Any = None

    @property
    def recorded(self) -> bool:
        return self._status is not None

    def look(self) -> bool:
        """Whether this process has joined a process group; finds the recorder where it has."""
        distributed = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_available():
            return False
        if not distributed.is_initialized():
            self._status = self._group = None
            return False
        group = distributed.group.WORLD
        if group is not self._group:
            self._group = group
            self._find(str(distributed.get_backend()))
        return True

    def _find(self, backend: str) -> None:
        import torch._C._distributed_c10d as c10d  # torch is there, or nobody would ask

        self.missing, self._status, self._entries, self._plain = None, None, None, None
        for door in _doors(c10d, backend):
            try:
                status = _status_of(door(False, False))
            except Exception:  # noqa: BLE001, S112 (another version's door)
                continue
            if status or self._status is None:
                self._status = lambda door=door: _status_of(door(False, False))
                self._entries = lambda door=door: door(True, True)
                self._plain = lambda door=door: door(True, False)
            if status:
                return
        if self._status is None:
            self.missing = f"this torch records no collectives of {backend}"

    def counts(self) -> Counts:
        """Of the default group."""
        if self._status is not None:
            status = self._status()
            default = status.get("0") or status.get("")
            if default is not None:
                return Counts(_number(default[0]), _number(default[1]))
        try:
            # Counts from 0 where the recorder counts from 1.
            return Counts(int(self._group._get_sequence_number_for_group()), -1)
        except (AttributeError, RuntimeError):
            return UNKNOWN

    def last_enqueued(self) -> dict[str, int]:
        """Process group -> number of its last collective."""
        if self._status is None:
            return {}
        return {group or "0": _number(both[0]) for group, both in self._status().items()}

    def groups(self) -> dict[str, list[int]]:
        """Process group -> its ranks, of the groups that this one belongs to."""
        distributed = sys.modules.get("torch.distributed")
        try:
            world = distributed.distributed_c10d._world  # type: ignore[union-attr]
            return {world.pg_names[g]: sorted(of) for g, of in world.pg_group_ranks.items()}
        except (AttributeError, KeyError, RuntimeError):  # another version's tables
            return {}

    def entries(self) -> list[dict[str, Any]]:
        """The last collectives as plain values, oldest first; with call sites where torch can
        tell them cheaply."""
        if self._entries is None or self._plain is None:
            return []
        # Its first use imports torch._dynamo, which takes seconds, unless that is loaded already.
        with_frames = "torch._dynamo" in sys.modules
        found = (self._entries if with_frames else self._plain)().get("entries") or []
        return [_plain_entry(entry) for entry in found[-MAX_ENTRIES:]]


def _doors(c10d: Any, backend: str) -> list[Callable[[bool, bool], Any]]:
    """Callables of (entries, frames) that return the recorder's dump, the likeliest first."""
    doors: list[Callable[[bool, bool], Any]] = []
    general = getattr(c10d, "_dump_fr_trace_json", None), getattr(c10d, "_dump_fr_trace", None)
    nccl = getattr(c10d, "_dump_nccl_trace_json", None), getattr(c10d, "_dump_nccl_trace", None)

    def add(names: tuple[Any, Any], **which: str) -> None:
        as_json, as_pickle = names

        def door(entries: bool, frames: bool) -> Any:
            if not entries:
                return json.loads(as_json(includeCollectives=False, **which))
            if frames and as_pickle is not None:
                # The recorder's own bytes, made and read in this process.
                return pickle.loads(  # noqa: S301
                    as_pickle(includeCollectives=True, includeStackTraces=True, **which)
                )
            return json.loads(as_json(includeCollectives=True, **which))

        if as_json is not None:
            doors.append(door)

    if "nccl" in backend:
        add(general, backend="nccl2")
        add(nccl)
    if "gloo" in backend or not doors:
        add(general)
    return doors


def _status_of(dump: Any) -> dict[str, tuple[Any, Any]]:
    """group -> (last enqueued, last completed)."""
    status = dump.get("pg_status") or {}
    return {
        str(group): (both.get("last_enqueued_collective"), both.get("last_completed_collective"))
        for group, both in status.items()
    }


def _plain_entry(entry: dict[str, Any]) -> dict[str, Any]:
    group = entry.get("process_group") or (entry.get("pg_id"), "")
    p2p = bool(entry.get("is_p2p"))
    return {
        "group": str(group[0]),
        "seq": _number(entry.get("p2p_seq_id" if p2p else "collective_seq_id")),
        "op": str(entry.get("profiling_name") or "").rpartition(":")[2],
        "sizes": [[int(n) for n in size] for size in entry.get("input_sizes") or ()],
        "dtypes": [str(t) for t in entry.get("input_dtypes") or ()],
        "retired": bool(entry.get("retired")),
        "p2p": p2p,
        "frames": [
            [str(f.get("filename")), int(f.get("line") or 0), str(f.get("name"))]
            for f in (entry.get("frames") or ())[:_FRAMES]
        ],
    }


def _number(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        return -1
