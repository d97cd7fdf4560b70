"""The summary of a profile: traces made by hand, of the CPU and of a GPU, and damaged ones."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ltui.training.diagnosis.profile_summary import explain, find_difference
from ltui.training.diagnosis.trace_times import (
    RankProfile,
    RankReport,
    TraceEvent,
    difference,
    intersection,
    length,
    summarise_rank,
    union,
)
from ltui.training.shared.profile_request import ANCHOR, report_path, trace_path
from ltui.training.supervise.speed.summarise_profile import main

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12)


@given(SPANS, SPANS)
def test_intervals_are_those_of_sets(first: Any, second: Any) -> None:
    def points(spans: Sequence[tuple[float, float]]) -> set[int]:
        return {n for begin, end in spans for n in range(int(begin), int(end))}

    one, two = union(first), union(second)
    assert points(one) == points(first)
    assert points(intersection(one, two)) == points(one) & points(two)
    assert points(difference(one, two)) == points(one) - points(two)
    assert length(difference(one, two)) + length(intersection(one, two)) == length(one)


def event(cat: str, name: str, ts: float, dur: float, tid: int = 1) -> dict[str, Any]:
    """An event as kineto writes it; its time is counted from the first step."""
    return {
        "ph": "X", "cat": cat, "name": name, "pid": 7, "tid": tid, "ts": 1e9 + ts, "dur": dur,
        "args": {"External id": 3, "stream": 7},
    }  # fmt: skip


MARK = event("user_annotation", ANCHOR, -100, 1)


def report(rank: int = 0, **changes: Any) -> dict[str, Any]:
    """Two steps of one millisecond that begin 100 us after the mark."""
    steps = [(5, 200_000, 1_200_000), (6, 1_200_000, 2_200_000)]
    return {"rank": rank, "anchor_ns": 100_000, "steps": steps, **changes}


def summary(events: list[dict[str, Any]], **changes: Any) -> RankProfile:
    values = report(**changes)
    made = RankReport(**{**values, "steps": tuple(values["steps"])})
    fields = TraceEvent.__struct_fields__
    return summarise_rank(
        made, [TraceEvent(**{k: v for k, v in e.items() if k in fields}) for e in [MARK, *events]]
    )


def test_the_parts_of_a_step_on_the_cpu_add_up() -> None:
    """An operator in another one counts once; what builds a batch is a wait for data."""
    found = summary(
        [
            event("user_annotation", "enumerate(DataLoader)#_Iter.__next__", 0, 200),
            event("cpu_op", "aten::stack", 50, 100),
            event("cpu_op", "aten::linear", 300, 400),
            event("cpu_op", "aten::addmm", 350, 300),
            event("user_annotation", "gloo:all_reduce", 600, 300, tid=2),
            event("cpu_op", "aten::add", -50, 20),
            event("cpu_op", "aten::add", 2500, 900),
        ],
        excluded=((1_300_000, 1_800_000),),
    )
    split = found.split
    assert [round(seconds * 2e6) for seconds in (
        split.step_s, split.data_s, split.computing_s, split.exposed_s, split.overlapped_s,
        split.host_s, split.copies_s,
    )] == [1500, 200, 400, 200, 100, 700, 0]  # fmt: skip
    named = {each.name: round(each.seconds * 2e6) for each in found.top}
    assert named == {"aten::addmm": 300, "aten::linear": 100, "aten::stack": 100}


def test_the_parts_of_a_step_on_a_gpu_add_up() -> None:
    found = summary(
        [
            event("cpu_op", "aten::mm", 0, 1900),
            event("user_annotation", "enumerate(DataLoader)#_Iter.__next__", 900, 200),
            event("kernel", "ampere_sgemm_128x64", 100, 500, tid=7),
            event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 500, 300, tid=20),
            event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 750, 150, tid=7),
            *(event("kernel", "vectorized_elementwise_kernel", 1200 + n * 20, 4, 7)
              for n in range(20)),
        ],
        on_device=True,
    )  # fmt: skip
    split = found.split
    assert [round(seconds * 2e6) for seconds in (
        split.step_s, split.computing_s, split.exposed_s, split.overlapped_s, split.copies_s,
        split.data_s, split.host_s,
    )] == [2000, 580, 200, 100, 100, 200, 920]  # fmt: skip
    assert (found.kernels, found.tiny_kernels) == (11, 10)
    assert found.top[0].name == "ampere_sgemm_128x64"
    sentence, remedy = explain([found])
    assert "0.46 ms of a step of 1 ms in Python" in sentence
    assert "torch.compile" in remedy


def rank_with(number: int, own_us: float, name: str, cat: str = "cpu_op") -> RankProfile:
    events = [
        event("cpu_op", "aten::mm", 0, 100),
        event(cat, name, 100, own_us),
        event("user_annotation", "gloo:all_reduce", 100 + own_us, 1900 - own_us, tid=2),
    ]
    return summary(events, rank=number)


@pytest.mark.parametrize(
    ("name", "cat", "part"),
    [
        ("aten::conv", "cpu_op", "more of computing"),
        ("sleep", "python", "more of host"),
        ("enumerate(DataLoader)#x", "user_annotation", "more of waiting for data"),
    ],
)
def test_the_slow_rank_and_its_reason_are_named(name: str, cat: str, part: str) -> None:
    ranks = [rank_with(0, 100, "aten::relu"), rank_with(3, 1500, name, cat)]
    found = find_difference(ranks)
    assert found is not None
    assert (found.slow, found.other) == (3, 0)
    assert part in explain(ranks)[0]
    assert find_difference([ranks[0], rank_with(1, 120, "aten::relu")]) is None
    sentence, remedy = explain([ranks[0], rank_with(1, 120, "aten::relu")], 2)
    assert ("communication" in sentence, "slower rank" in remedy) == (True, False)
    assert "It may be the wait for a slower rank" in explain(ranks[:1], 2)[1]


def test_a_trace_without_work_is_an_error() -> None:
    outside = [event("cpu_op", "aten::mm", 5000, 100)]
    with pytest.raises(ValueError, match="no operator"):
        summary(outside)
    with pytest.raises(ValueError, match="no kernel"):
        summary([event("cpu_op", "aten::mm", 0, 100)], on_device=True)
    with pytest.raises(ValueError, match="empty"):
        summary(outside, steps=[])


GOOD = json.dumps({"traceEvents": [MARK, event("cpu_op", "aten::mm", 0, 100)], "x": [{}]})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (gzip.compress(GOOD.encode()), None),
        (gzip.compress(GOOD.encode())[:-20], "damaged"),
        (GOOD.encode(), "damaged"),
        (gzip.compress(GOOD.encode()[:-9]), "cannot be read"),
        (gzip.compress(b'{"traceEvents": [{"ts": "x"}]}'), "cannot be read"),
        (gzip.compress(b'{"traceEvents": ' + b"[" * 200_000), "cannot be read"),
        (gzip.compress(b"[1]"), "cannot be read"),
        (b"", "cannot be read"),
    ],
    ids=["good", "cut-gzip", "no-gzip", "cut-json", "wrong-type", "deep", "no-object", "empty"],
)
def test_a_damaged_trace_is_refused(
    tmp_path: Path, content: bytes, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.nice", lambda _: 0)
    monkeypatch.setattr("resource.setrlimit", lambda *_: None)
    trace_path(tmp_path, 0).write_bytes(content)
    report_path(tmp_path, 0).write_text(json.dumps(report()), encoding="utf-8")
    assert main([str(tmp_path)]) == 0
    document = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    if said is None:
        assert document["profiles"][0]["top"][0]["name"] == "aten::mm"
    else:
        assert said in document["error"]
