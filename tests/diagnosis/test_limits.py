"""What limits the speed of a run, by what was measured; and nothing in a healthy one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ltui.training.diagnosis.limits import RankLoad, RunLoad, find_limit
from ltui.training.state.record_fold import FoldState, fold
from ltui.training.supervise.speed.limit_meter import LimitMeter
from ltui.training.tensor_queue.heartbeat_table import HeartbeatSlot, HeartbeatTable, RankActivity
from tests.state.records import steps


def rank(number: int = 0, **changes: Any) -> RankLoad:
    """One that computes all the time: 100 steps of 0.3 s, and 60 heartbeats."""
    values = {
        "steps": 100.0, "seconds": 30.0, "own_s": 20.0, "beats": 60, "waiting": 5, "looks": 30,
        "moved": 3, **changes,
    }  # fmt: skip
    return RankLoad(rank=number, **values)


def load(*ranks: RankLoad, **changes: Any) -> RunLoad:
    return RunLoad(seconds=30.0, ranks=ranks, **changes)


BOTH = (rank(0), rank(1))


@pytest.mark.parametrize(
    ("measured", "kind", "seconds", "said"),
    [
        pytest.param(load(*BOTH), "device", 0.3, "10 % of 60 looks", id="healthy"),
        pytest.param(load(rank(beats=0, waiting=0)), "device", 0.3, "large", id="one rank"),
        pytest.param(
            load(rank(0, fetch_s=15.0), rank(1, fetch_s=14.0)), "data", 0.14, "0.14 s", id="data"
        ),
        pytest.param(
            load(*(rank(n, steps=40, seconds=12.0, fetch_s=6.0) for n in range(2))),
            "device",
            0.3,
            "",
            id="little data, much between steps",
        ),
        pytest.param(
            load(rank(0, fetch_s=6.0), rank(1, fetch_s=6.0)), "device", 0.3, "", id="little data"
        ),
        pytest.param(
            load(rank(0, moved=28), rank(1, moved=29)), "host", 0.3, "many small", id="host"
        ),
        pytest.param(
            load(rank(0, moved=18), rank(1, moved=17)),
            "unknown",
            0.3,
            "58 %",
            id="neither small nor large",
        ),
        pytest.param(
            load(rank(0, waiting=30), rank(1, waiting=27)),
            "communication",
            0.135,
            "45 %",
            id="communication",
        ),
        pytest.param(
            load(rank(0, waiting=40), rank(1, waiting=4)),
            "rank",
            0.18,
            "it waits 7 %",
            id="one rank waits less",
        ),
        pytest.param(
            load(rank(0, own_s=10.0), rank(1, own_s=25.0, fetch_s=20.0)),
            "data",
            0.15,
            "rank 1 waits 0.2 s of each step",
            id="one rank waits for data",
        ),
        pytest.param(
            load(rank(0, own_s=None), rank(1, own_s=None)),
            "device",
            0.3,
            "",
            id="parts of a step are not known",
        ),
        pytest.param(load(*BOTH, validation=0.4), "validation", 0.12, "40 %", id="validation"),
        pytest.param(load(validation=0.9), "validation", None, "% of the time", id="only it"),
        pytest.param(load(*BOTH, checkpoints=0.2), "checkpoints", 0.06, "20 %", id="checkpoints"),
        pytest.param(
            load(*BOTH, validation=0.2, checkpoints=0.1), "device", 0.3, "", id="some of both"
        ),
        pytest.param(
            load(rank(on_gpu=True, gpu_percent=40.0)), "host", 0.18, "40 %", id="idle GPU"
        ),
        pytest.param(
            load(rank(on_gpu=True, gpu_percent=97.0)), "device", 0.3, "97 %", id="busy GPU"
        ),
        pytest.param(
            load(*(rank(n, on_gpu=True, gpu_percent=97.0, waiting=50) for n in range(2))),
            "unknown",
            0.3,
            "a profile tells",
            id="busy GPUs that may communicate",
        ),
        pytest.param(load(rank(on_gpu=True)), "unknown", 0.3, "no readings", id="GPU not readable"),
        pytest.param(load(rank(looks=4)), "unknown", 0.3, "too rarely", id="few looks"),
        pytest.param(
            load(rank(looks=18, moved=18, slept=95)), "unknown", 0.3, "slept in 84 %", id="sleeps"
        ),
        pytest.param(
            load(rank(looks=30, moved=28, slept=10)), "host", 0.3, "93 % of", id="sleeps little"
        ),
        pytest.param(
            load(rank(0, beats=4, waiting=4), rank(1, beats=4)),
            "device",
            0.3,
            "",
            id="few heartbeats",
        ),
    ],
)
def test_the_limit_is_named(measured: RunLoad, kind: str, seconds: float | None, said: str) -> None:
    limit = find_limit(measured)
    assert limit is not None
    assert limit.kind == kind
    assert limit.seconds == (None if seconds is None else pytest.approx(seconds))
    assert said in "; ".join(limit.evidence)


def test_the_slow_rank_is_named_among_many() -> None:
    limit = find_limit(load(*(rank(n, waiting=5 if n == 5 else 35) for n in range(8))))
    assert limit is not None
    assert (limit.kind, limit.rank) == ("rank", 5)


@pytest.mark.parametrize(
    "measured",
    [
        load(),
        load(rank(steps=2.0)),
        load(rank(0), rank(1, steps=0.0, seconds=0.0)),
        RunLoad(seconds=0.0),
    ],
)
def test_too_little_says_nothing(measured: RunLoad) -> None:
    assert find_limit(measured) is None


def test_a_heartbeat_thread_counts_what_its_rank_does(tmp_path: Path) -> None:
    (tmp_path / "queue" / "1").mkdir(parents=True)
    slot = HeartbeatSlot(tmp_path / "queue" / "1", 3)
    for waits, moved in ((True, None), (False, True), (False, False), (None, True)):
        slot.count(waits=waits, moved=moved, slept=moved is None)
    activity = HeartbeatTable(tmp_path / "queue" / "1").read_activity()
    assert activity[3] == RankActivity(beats=3, waiting=1, looks=3, moved=2, slept=1)
    assert activity[0] == RankActivity(0, 0, 0, 0, 0)


def test_the_step_that_contains_a_stall_or_a_pause_does_not_count(tmp_path: Path) -> None:
    meter, state = LimitMeter(tmp_path), FoldState()

    def second(now: int, *, trains: bool = True, stalled_s: float = 0.0, ends: bool = True) -> None:
        nonlocal state
        for number in range(2 * ends):
            own_s = 0.1 + stalled_s * number
            fields = {"step_s": 1.0 + stalled_s, "forward_s": own_s, "backward_s": 0.9}
            rows = steps(1, 1.0, first=now, start_s=now, optimizer_s=0.0, fetch_s=0.0, **fields)
            state = fold(state, number, rows)
        meter.update(float(now), trains, {}, state, ())

    for now in range(1, 11):
        second(now)
    assert meter.limit is None or meter.limit.kind != "rank"
    for now in range(11, 31):
        second(now, trains=False, ends=False)
    second(31, ends=False)  # the rank has moved on, within the step
    second(32, stalled_s=20.0)
    for now in range(33, 45):
        second(now)
    assert meter.limit is not None
    assert meter.limit.kind != "rank"
