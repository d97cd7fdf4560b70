"""Read this process's collectives from PyTorch's flight recorder.

The functions of the recorder are private and differ between versions and back ends. This module is
the adapter for them: it tries each one, and a missing function means that nothing is recorded.
Newer versions record gloo. NCCL is recorded by ``_dump_nccl_trace*`` or, as ``nccl2``, by
``_dump_fr_trace*``. Without a recorder, the process group's own counter remains.

It does not import torch before the process itself has, because the heartbeat thread starts early.
"""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

MAX_ENTRIES = 96
"""Number of collectives that are returned, the last ones."""
_MAX_FRAMES = 24
"""Frames of each collective's call site."""

Dump = Callable[[bool, bool], Any]
"""Returns the recorder's content. The arguments say if it includes entries and frames."""


class Counts(NamedTuple):
    """Last enqueued and last completed collective of the default group; -1 if unknown."""

    enqueued: int
    completed: int


UNKNOWN = Counts(-1, -1)


class Collectives(NamedTuple):
    """The last collectives of all process groups."""

    entries: list[dict[str, Any]]
    """As plain values, oldest first."""
    last_enqueued: dict[str, int]
    """process group -> sequence number of the last one that was enqueued"""


class FlightRecorder:
    """The flight recorder of the back end in use.

    Call ``refresh`` before reading, because the process may join another process group.
    """

    def __init__(self) -> None:
        self.missing: str | None = "torch.distributed is not in use"
        """Why nothing is recorded; None if there is a recorder."""
        self._dump: Dump | None = None
        self._backend = ""
        self._has_recorded = False
        """True if ``_dump`` has returned a collective of this process group."""
        self._group: Any = None
        self._names = {"0": "0", "": "0"}
        """Number of a process group in this process -> its name, as far as entries showed it."""

    @property
    def is_recording(self) -> bool:
        """True if collectives are recorded."""
        return self._dump is not None

    def refresh(self) -> bool:
        """Find the recorder if needed. Return True if this process has joined a process group."""
        distributed = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_available():
            return False
        if not distributed.is_initialized():
            self._dump = self._group = None
            return False
        group = distributed.group.WORLD
        if group is not self._group:
            self._group, self._backend = group, str(distributed.get_backend())
            self._has_recorded = False
            self._find()
        return True

    def _find(self) -> None:
        """Choose the first function that has a status, else the first that works.

        Before the first collective no function has a status, and a function for another back end
        works too. So the choice is repeated until one has.
        """
        import torch._C._distributed_c10d as c10d  # a process group exists, so torch is loaded

        self.missing, self._dump = None, None
        for dump in dump_functions(c10d, self._backend):
            try:
                status = _status_of(dump(False, False))
            except Exception:  # noqa: BLE001, S112 (another version's function)
                continue
            if status or self._dump is None:
                self._dump = dump
            if status:
                self._has_recorded = True
                return
        if self._dump is None:
            self.missing = f"this torch records no collectives of {self._backend}"

    def counts(self) -> Counts:
        """Return the counts of the default group.

        Without a recorder it uses ``ProcessGroup._get_sequence_number_for_group``.
        """
        if self._dump is not None:
            if not self._has_recorded:
                self._find()
            status = _status_of(self._dump(False, False))
            default = status.get("0") or status.get("")
            if default is not None:
                return Counts(_to_int(default[0]), _to_int(default[1]))
        try:
            # Counts from 0, while the recorder counts from 1.
            return Counts(int(self._group._get_sequence_number_for_group()), -1)
        except (AttributeError, RuntimeError):
            return UNKNOWN

    def groups(self) -> dict[str, list[int]]:
        """Return the ranks of each process group that this process belongs to.

        Uses the tables ``pg_names`` and ``pg_group_ranks`` of
        ``torch.distributed.distributed_c10d._world``.
        """
        distributed = sys.modules.get("torch.distributed")
        try:
            world = distributed.distributed_c10d._world  # type: ignore[union-attr]
            return {world.pg_names[g]: sorted(ranks) for g, ranks in world.pg_group_ranks.items()}
        except (AttributeError, KeyError, RuntimeError):  # another version's tables
            return {}

    def collectives(self) -> Collectives:
        """Return the last collectives. They have call sites if torch can return these cheaply."""
        if not self._has_recorded:
            self._find()
        if self._dump is None:
            return Collectives([], {})
        # Reading frames first imports torch._dynamo, which takes seconds unless it is loaded.
        with_frames = "torch._dynamo" in sys.modules
        dump = self._dump(True, with_frames)
        entries = dump.get("entries") or []
        # The status has the number that a group has in this process. The other ranks may use other
        # numbers, and only the entries have the name that all use.
        self._names.update({str(entry.get("pg_id")): _group_name(entry) for entry in entries})
        last_enqueued = {
            self._names[number]: _to_int(pair[0])
            for number, pair in _status_of(dump).items()
            if number in self._names
        }
        return Collectives([_plain_entry(e) for e in entries[-MAX_ENTRIES:]], last_enqueued)


def dump_functions(c10d: Any, backend: str) -> list[Dump]:
    """Return functions that dump the recorder of ``backend``, the likeliest first.

    ``c10d`` is the module ``torch._C._distributed_c10d``.
    """
    functions: list[Dump] = []
    general = getattr(c10d, "_dump_fr_trace_json", None), getattr(c10d, "_dump_fr_trace", None)
    nccl = getattr(c10d, "_dump_nccl_trace_json", None), getattr(c10d, "_dump_nccl_trace", None)

    def add(names: tuple[Any, Any], **options: str) -> None:
        as_json, as_pickle = names

        def dump(entries: bool, frames: bool) -> Any:
            if not entries:
                return json.loads(as_json(includeCollectives=False, **options))
            if frames and as_pickle is not None:
                # The recorder's own bytes, written and read in this process.
                return pickle.loads(  # noqa: S301
                    as_pickle(includeCollectives=True, includeStackTraces=True, **options)
                )
            return json.loads(as_json(includeCollectives=True, **options))

        if as_json is not None:
            functions.append(dump)

    if "nccl" in backend:
        # The name by which the group was made, or that of the implementation behind it.
        names = (part.rpartition(":")[2] for part in backend.split(","))
        for name in dict.fromkeys(("nccl2", *(name for name in names if "nccl" in name))):
            add(general, backend=name)
        add(nccl)
    if "gloo" in backend or not functions:
        add(general)
    return functions


def _status_of(dump: Any) -> dict[str, tuple[Any, Any]]:
    """Return last enqueued and last completed collective of each group."""
    status = dump.get("pg_status") or {}
    return {
        str(group): (
            fields.get("last_enqueued_collective"),
            fields.get("last_completed_collective"),
        )
        for group, fields in status.items()
    }


def _plain_entry(entry: dict[str, Any]) -> dict[str, Any]:
    p2p = bool(entry.get("is_p2p"))
    return {
        "group": _group_name(entry),
        "seq": _to_int(entry.get("p2p_seq_id" if p2p else "collective_seq_id")),
        "op": str(entry.get("profiling_name") or "").rpartition(":")[2],
        "sizes": [[int(n) for n in size] for size in entry.get("input_sizes") or ()],
        "dtypes": [str(t) for t in entry.get("input_dtypes") or ()],
        "retired": bool(entry.get("retired")),
        "p2p": p2p,
        "frames": [
            [str(f.get("filename")), int(f.get("line") or 0), str(f.get("name"))]
            for f in (entry.get("frames") or ())[:_MAX_FRAMES]
        ],
    }


def _group_name(entry: dict[str, Any]) -> str:
    """Return the name of an entry's process group, which is the same on all ranks."""
    name_and_description = entry.get("process_group") or (entry.get("pg_id"), "")
    return str(name_and_description[0])


def _to_int(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        return -1
