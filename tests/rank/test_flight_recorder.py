"""The flight recorder's adapter with stand-ins for the dump functions of a torch with NCCL."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch._C._distributed_c10d as c10d
import torch.distributed as dist

from ltui.training.rank.flight_recorder import Counts, FlightRecorder

_ENTRY = {
    "pg_id": 0,
    "process_group": ["0", "default_pg"],
    "collective_seq_id": 1,
    "p2p_seq_id": 0,
    "profiling_name": "nccl:all_reduce",
    "input_sizes": [[8]],
    "input_dtypes": ["Float"],
    "state": "scheduled",
    "retired": False,
    "is_p2p": False,
}


class _Nccl:
    """The recorders of one process. ``records``: the one into which NCCL records.

    Every other one, also of a back end that does not exist, is empty.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, records: str = "legacy") -> None:
        self.records = records
        self.enqueued = 0
        self.status: dict[str, Any] = {}
        self.entries: list[dict[str, Any]] = [_ENTRY]
        monkeypatch.setattr(c10d, "_dump_nccl_trace_json", self.dump, raising=False)
        monkeypatch.setattr(c10d, "_dump_nccl_trace", None, raising=False)
        monkeypatch.setattr(c10d, "_dump_fr_trace_json", self.dump_general, raising=False)
        monkeypatch.setattr(c10d, "_dump_fr_trace", None, raising=False)
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
        monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=object()))

    def dump(self, includeCollectives: bool) -> bytes:
        return self._document(includeCollectives, "legacy")

    def dump_general(self, includeCollectives: bool, backend: str = "gloo") -> bytes:
        return self._document(includeCollectives, backend)

    def _document(self, with_entries: bool, recorder: str) -> bytes:
        document: dict[str, Any] = {"pg_status": {}, "version": "2.10"}
        # torch adds a group with its first collective.
        if self.enqueued and recorder == self.records:
            default = {"last_enqueued_collective": str(self.enqueued)}
            default["last_completed_collective"] = "0"
            document["pg_status"] = {"0": default, **self.status}
            if with_entries:
                document["entries"] = self.entries
        return json.dumps(document).encode()


@pytest.mark.parametrize("records", ["legacy", "nccl2", "nccl"])
def test_the_recorder_of_nccl_is_found_after_the_first_collective(
    monkeypatch: pytest.MonkeyPatch, records: str
) -> None:
    """The heartbeat thread may ask before it, and every function answers then."""
    nccl, recorder = _Nccl(monkeypatch, records), FlightRecorder()
    assert recorder.refresh() is True
    assert recorder.missing is None
    recorder.counts()
    assert recorder.collectives() == ([], {})
    nccl.enqueued = 1
    assert recorder.counts() == Counts(enqueued=1, completed=0)
    (entry,), last_enqueued = recorder.collectives()
    assert (entry["op"], entry["seq"], entry["retired"]) == ("all_reduce", 1, False)
    assert last_enqueued == {"0": 1}


def test_a_group_has_the_same_name_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 is in the group 2 and not in the group 1, so the group 2 has the number 1 there."""
    nccl, recorder = _Nccl(monkeypatch), FlightRecorder()
    nccl.enqueued = 4
    nccl.status["1"] = nccl.status["3"] = {"last_enqueued_collective": "7"}
    nccl.entries.append({**_ENTRY, "pg_id": 1, "process_group": ["2", "tensor_parallel"]})
    recorder.refresh()
    assert recorder.collectives().last_enqueued == {"0": 4, "2": 7}
    nccl.entries.pop()
    assert recorder.collectives().last_enqueued == {"0": 4, "2": 7}
