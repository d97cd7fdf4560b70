"""Warnings about setups that freeze runs: from a configuration, and from ranks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ltui.training.json_codec import to_json
from ltui.training.shared.record_types import RecordKind
from ltui.training.state.freeze_checks import MAX_WARNINGS, all_warnings, precheck, uneven_batches
from ltui.training.state.record_fold import FoldState, RankFold, fold
from ltui.training.state.run_snapshot import (
    FreezeWarning,
    RunSnapshot,
    RunState,
    snapshot_from_json,
)
from ltui.training.tensor_queue.queue_reader import Record
from tests.state.records import labelled


def _document(**arguments: Any) -> dict[str, Any]:
    return {"data": {"class_path": "a.B", "init_args": arguments}}


def _foreseen(ranks: int, cores: int | None, shared: int | None, **arguments: Any) -> list[str]:
    warnings = precheck(
        _document(**arguments), ranks=ranks, cores=cores, shared_memory_bytes=shared
    )
    assert all(c.remedy for _, c in warnings)
    return [f"{path}: {c.what}" for path, c in warnings]


@pytest.mark.parametrize("key", ["num_workers", "workers"])
def test_workers_far_beyond_the_cores(key: str) -> None:
    (line,) = _foreseen(8, 16, None, **{key: 16})
    assert line.startswith(f"data.init_args.{key}: 8 ranks with 16 loader workers each start 128")
    assert _foreseen(8, 16, None, **{key: 4}) == []
    assert _foreseen(8, None, None, **{key: 16}) == []


def test_ffcv_workers_are_threads() -> None:
    assert _foreseen(8, 2, 1, num_workers=64, loader="ffcv") == []


def test_little_shared_memory() -> None:
    (line,) = _foreseen(2, 64, 64 << 20, workers=4)
    assert "/dev/shm, which has 64 MiB" in line
    assert _foreseen(2, 64, 64 << 20, workers=0) == []
    assert _foreseen(2, 64, 16 << 30, workers=4) == []


def test_a_document_without_data_or_with_odd_values_is_quiet() -> None:
    assert precheck({}, ranks=8, cores=1, shared_memory_bytes=1) == []
    assert _foreseen(8, 1, 1, workers=None, num_workers=True) == []


def test_uneven_batches_name_both_ends() -> None:
    plans = {0: {"batches_per_epoch": 12}, 1: {"batches_per_epoch": 11}, 2: {}}
    warning = uneven_batches(plans)
    assert warning is not None
    assert "rank 1 11, rank 0 12" in warning.what
    assert uneven_batches({0: {"batches_per_epoch": 12}, 1: {"batches_per_epoch": 12}}) is None
    assert uneven_batches({0: {"batches_per_epoch": 12}, 1: {"batches_per_epoch": None}}) is None


def test_uneven_plans_of_a_fold() -> None:
    ranks = {r: RankFold(rank=r, plan={"batches_per_epoch": 9 + r}) for r in range(2)}
    (warning,) = all_warnings(FoldState(ranks=ranks))
    assert "different batch counts" in warning.what


def _warning(text: str) -> Record:
    return labelled(RecordKind.EVENT, {"kind": "warning", "text": text, "remedy": "do", "t": 1.0})


def test_ranks_warnings_are_kept_once() -> None:
    other = labelled(RecordKind.EVENT, {"kind": "note", "text": "other"})
    state = fold(FoldState(), 0, [_warning("one"), _warning("one"), other, _warning("two")])
    assert all_warnings(state) == (
        FreezeWarning(what="one", remedy="do"),
        FreezeWarning(what="two", remedy="do"),
    )
    assert all_warnings(fold(state, 1, [_warning("two")])) == all_warnings(state)
    assert (
        len(all_warnings(fold(state, 0, [_warning(f"{i}") for i in range(3 * MAX_WARNINGS)])))
        == MAX_WARNINGS
    )


def test_a_snapshot_keeps_them() -> None:
    snapshot = RunSnapshot(
        id="i", name="n", state=RunState.RUNNING, cautions=(FreezeWarning(what="w", remedy=None),)
    )
    assert snapshot_from_json(json.loads(json.dumps(to_json(snapshot)))) == snapshot
