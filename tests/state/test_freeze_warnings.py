"""Warnings about setups that freeze runs: from a configuration, and from ranks."""

from __future__ import annotations

from typing import Any

import pytest

from ltui.training.shared.record_types import RecordKind
from ltui.training.state.freeze_checks import MAX_WARNINGS, all_warnings, precheck, uneven_batches
from ltui.training.state.record_fold import FoldState, RankFold, fold
from ltui.training.state.run_snapshot import FreezeWarning
from ltui.training.tensor_queue.queue_reader import Record
from tests.required import required
from tests.state.records import labelled

MIB = 1 << 20


@pytest.mark.parametrize(
    ("ranks", "cores", "shared_bytes", "arguments", "words"),
    [
        (8, 16, None, {"num_workers": 16}, "num_workers: 8 ranks with 16 loader workers each st"),
        (8, 16, None, {"workers": 16}, "data.init_args.workers: 8 ranks with 16 loader workers "),
        (8, 16, None, {"workers": 4}, None),
        (8, None, None, {"workers": 16}, None),
        (8, 2, 1, {"num_workers": 64, "loader": "ffcv"}, None),  # its workers are threads
        (2, 64, 64 * MIB, {"workers": 4}, "/dev/shm, which has 64 MiB"),
        (2, 64, 64 * MIB, {"workers": 0}, None),
        (2, 64, 16384 * MIB, {"workers": 4}, None),
        (8, 1, 1, {"workers": None, "num_workers": True}, None),
    ],
)
def test_more_workers_than_the_machine_has_cores_or_memory_for_are_foreseen(
    ranks: int, cores: int | None, shared_bytes: int | None, arguments: Any, words: str | None
) -> None:
    document = {"data": {"class_path": "a.B", "init_args": arguments}}
    warnings = precheck(document, ranks=ranks, cores=cores, shared_memory_bytes=shared_bytes)
    assert all(warning.remedy for _, warning in warnings)
    lines = [f"{path}: {warning.what}" for path, warning in warnings]
    assert len(lines) == (words is not None)
    assert (words or "") in "".join(lines)
    assert precheck({}, ranks=ranks, cores=cores, shared_memory_bytes=shared_bytes) == []


def test_uneven_batches_name_both_ends() -> None:
    plans: dict[int, Any] = {0: {"batches_per_epoch": 12}, 1: {"batches_per_epoch": 11}, 2: {}}
    assert "rank 1 11, rank 0 12" in required(uneven_batches(plans)).what
    for other in (12, None):
        plans = {0: {"batches_per_epoch": 12}, 1: {"batches_per_epoch": other}}
        assert uneven_batches(plans) is None
    ranks = {r: RankFold(rank=r, plan={"batches_per_epoch": 9 + r}) for r in range(2)}
    (warning,) = all_warnings(FoldState(ranks=ranks))
    assert "different batch counts" in warning.what


def _warning(text: str) -> Record:
    return labelled(RecordKind.EVENT, {"kind": "warning", "text": text, "remedy": "do", "t": 1.0})


def test_warnings_of_ranks_are_kept_once() -> None:
    other = labelled(RecordKind.EVENT, {"kind": "note", "text": "other"})
    state = fold(FoldState(), 0, [_warning("one"), _warning("one"), other, _warning("two")])
    kept = tuple(FreezeWarning(what=what, remedy="do") for what in ("one", "two"))
    assert all_warnings(state) == all_warnings(fold(state, 1, [_warning("two")])) == kept
    many = fold(state, 0, [_warning(f"{i}") for i in range(3 * MAX_WARNINGS)])
    assert len(all_warnings(many)) == MAX_WARNINGS
