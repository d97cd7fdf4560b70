"""Stops at a step, a metric's value or a time, and by a signal to the supervisor.

Conditions on metrics are checked against every logged value, not only the last of a poll.
"""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from ltui.training.lifecycle.supervisor_client import ControlClient
from ltui.training.problem import ProblemError
from ltui.training.shared.record_types import RecordKind
from ltui.training.state.record_fold import FoldState, fold_many
from ltui.training.state.run_snapshot import MetricValue, RunSnapshot, RunState
from ltui.training.state.stop_conditions import (
    StopCondition,
    from_document,
    metric_reason,
    parse_condition,
    parse_metric_condition,
    parse_time_condition,
    resolve_condition,
    time_reason,
)
from ltui.training.store.run_directory import RunDir
from ltui.training.supervise import stops as stops_module
from ltui.training.supervise.control_requests import RequestHandler
from ltui.training.supervise.stops import Stops, StoredStops, read_stops, write_stops
from ltui.training.tensor_queue.queue_reader import Poll
from tests.required import required
from tests.state.records import labelled, step

from .conftest import Runs, stored_events


def ask(run: RunDir, *conditions: StopCondition) -> list[str]:
    documents = [condition.to_document() for condition in conditions]
    answer = ControlClient(run).request({"cmd": "stop_when", "conditions": documents})
    return list(answer["stops"])


def test_exactly_at_a_step_whoever_supervises(runs: Runs) -> None:
    gate, step = runs.cwd / "gate", 40
    run = runs.training("--gate", str(gate), "--gate-at", "20")
    assert ask(run, StopCondition(kind="step", step=step)) == [f"at step {step}"]
    # An answer means that the condition is on disk, where the next supervisor reads it.
    runs.replace_supervisor(run)
    runs.until(run, lambda s: s.stops == (f"at step {step}",))
    gate.touch()
    ended = runs.ended(run)
    assert ended.state is RunState.STOPPED
    assert ended.detail == f"stopped at step {step}, checkpoint verified"
    assert ended.stops == ()
    assert not run.requests_path.exists()


def test_when_a_metric_passes_a_value(runs: Runs) -> None:
    gate = runs.cwd / "gate"
    # Every rank waits at step 5, where the condition is set: only later steps can fulfil it.
    run = runs.training("--gate", str(gate), "--gate-at", "5")
    # Losses of fake ranks are spread evenly from 0 to 1.
    assert ask(run, parse_metric_condition("train/loss<0.1")) == ["when train/loss < 0.1"]
    gate.touch()
    ended = runs.ended(run)
    assert ended.state is RunState.STOPPED
    (event,) = stored_events(run, "stop_when")
    assert event.text.startswith("Stopping because train/loss is 0.0")


def test_conditions_are_replaced_refused_and_cancelled_and_one_is_a_time(runs: Runs) -> None:
    run = runs.training()
    far = StopCondition(kind="step", step=90000)
    ask(run, far, StopCondition(kind="epoch"), parse_time_condition("+2h", time.time()))
    stands = ("at step 90000", "at the end of epoch 1", "2 h after the request")
    runs.until(run, lambda s: s.stops == stands)
    ask(run, StopCondition(kind="step", step=80000))
    runs.until(run, lambda s: "at step 80000" in s.stops and "at step 90000" not in s.stops)
    for condition, why in (
        (StopCondition(kind="step", step=1), "has passed"),
        (StopCondition(kind="step", step=100000), "already ends at step 100000"),
    ):
        with pytest.raises(ProblemError, match=why):
            ask(run, condition)
    ControlClient(run).request({"cmd": "stop_when", "cancel": True})
    runs.until(run, lambda s: s.stops == ())
    assert json.loads(run.requests_path.read_text())["conditions"] == []
    ask(run, parse_time_condition("+1s", time.time()))
    assert runs.ended(run).state is RunState.STOPPED


@pytest.mark.slow
def test_a_command_without_telemetry_stops_at_a_time_only(runs: Runs) -> None:
    run = runs.start("sleep", "600")
    runs.until(run, lambda s: s.state is RunState.RUNNING)
    with pytest.raises(ProblemError, match="sends no telemetry"):
        ask(run, StopCondition(kind="step", step=7))
    ask(run, parse_time_condition("+1s", time.time()))
    ended = runs.ended(run)
    assert ended.state is RunState.STOPPED
    assert "SIGTERM" in (ended.detail or "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_supervisor_stops_the_run(runs: Runs, number: int) -> None:
    run = runs.training()
    os.kill(required(runs.until(run, lambda s: s.supervisor_pid).supervisor_pid), number)
    ended = runs.ended(run)
    assert ended.state is RunState.STOPPED
    assert ended.detail == f"stopped at step {ended.global_step}, checkpoint verified"


def test_a_condition_is_on_disk_before_it_is_confirmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, queued = RunDir(tmp_path), threading.Event()
    attempt: Any = SimpleNamespace(
        snapshot=RunSnapshot(id="a", name="a", state=RunState.RUNNING),
        spec=SimpleNamespace(nodes=None, command=None, env={}),
        stops=Stops(run, 1),
        coordination_error=lambda: None,
        fold=FoldState(),
        has_pulses=lambda: True,
    )
    requests = RequestHandler(attempt, Mock(), queued)
    document = StopCondition(kind="step", step=40).to_document()
    with ThreadPoolExecutor(1) as client:
        answer = client.submit(requests.accept, {"cmd": "stop_when", "conditions": [document]})
        assert queued.wait(60)

        def write(run_dir: RunDir, stored: StoredStops) -> None:
            assert not answer.done()
            write_stops(run_dir, stored)

        monkeypatch.setattr(stops_module, "write_stops", write)
        requests.carry_out()
        assert answer.result(60) == {"ok": True, "stops": ["at step 40"]}
        assert [c.step for c in read_stops(run).conditions] == [40]
        queued.clear()
        late = client.submit(requests.accept, {"cmd": "stop_when", "cancel": True})
        assert queued.wait(60)
        requests.close()
        with pytest.raises(ValueError, match="has just ended"):
            late.result(60)
    assert [c.step for c in read_stops(run).conditions] == [40]


def logged(name: str, values: list[float], first_step: int) -> Poll:
    return Poll(
        tuple(
            labelled(RecordKind.METRICS, {"names": [name], "step": number}, [value])
            for number, value in enumerate(values, first_step)
        ),
        0,
    )


@pytest.fixture
def stops(tmp_path: Path) -> Stops:
    return Stops(RunDir(tmp_path), 1)


def test_value_between_two_polls_meets_the_condition(stops: Stops) -> None:
    fold = fold_many(FoldState(), {})
    stops.add_conditions(
        [parse_metric_condition("val/loss<0.2"), parse_metric_condition("reward>=3")]
    )
    polls = {0: logged("val/loss", [0.5, 0.1, 0.4], first_step=7), 1: logged("reward", [2.0], 7)}
    fold = fold_many(fold, polls)
    stops.check_metrics(fold, polls)
    assert stops.pop_due(0.0, 0.0) == "because val/loss is 0.1 (< 0.2) at step 8"
    assert stops.pop_due(0.0, 0.0) is None
    assert stops.descriptions() == ("when reward >= 3",)


def test_values_of_other_ranks_do_not_count(stops: Stops) -> None:
    stops.add_conditions([parse_metric_condition("val/loss<0.2")])
    polls = {0: logged("val/loss", [0.5], 3), 1: logged("val/loss", [0.1, 0.5], 3)}
    stops.check_metrics(fold_many(FoldState(), polls), polls)
    assert stops.pop_due(0.0, 0.0) is None


def test_every_loss_of_the_step_records_is_checked(stops: Stops) -> None:
    stops.add_conditions([parse_metric_condition("train/loss<0.2")])
    losses = [0.9, 0.15, math.nan, 0.8]
    records = tuple(step(n, float(n), loss=loss) for n, loss in enumerate(losses, 1))
    polls = {0: Poll(records, 0)}
    stops.check_metrics(fold_many(FoldState(), polls), polls)
    assert stops.pop_due(0.0, 0.0) == "because train/loss is 0.15 (< 0.2) at step 2"


def test_values_before_the_condition_do_not_count_after_a_recovery(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    Stops(run, 1).add_conditions([parse_metric_condition("val/loss<0.2")])
    document = json.loads(run.requests_path.read_text())
    document["conditions"][0]["after_step"] = 8
    run.requests_path.write_text(json.dumps(document))
    recovered = Stops(run, 1)
    polls = {0: logged("val/loss", [0.1, 0.1, 0.5], first_step=7)}
    recovered.check_metrics(fold_many(FoldState(), polls), polls)
    assert recovered.pop_due(0.0, 0.0) is None
    polls = {0: logged("val/loss", [0.1, 0.1, 0.19, 0.5], first_step=7)}
    recovered.check_metrics(fold_many(FoldState(), polls), polls)
    assert recovered.pop_due(0.0, 0.0) == "because val/loss is 0.19 (< 0.2) at step 9"


@pytest.mark.parametrize("step", [3, None])
def test_values_after_the_step_of_a_restart_count(tmp_path: Path, step: int | None) -> None:
    """The run goes back, so the position at which the condition was accepted comes again."""
    run = RunDir(tmp_path)
    stops = Stops(run, 1)
    condition = replace(parse_metric_condition("val/loss<0.2"), after_step=40)
    stops.add_conditions([condition, parse_metric_condition("reward>=3")])
    stops.continue_from(60)
    assert stops.conditions[0].after_step == 40
    stops.continue_from(step)
    restarted = Stops(run, 2)
    polls = {0: logged("val/loss", [0.5, 0.1, 0.5], first_step=7)}
    restarted.check_metrics(fold_many(FoldState(), polls), polls)
    assert restarted.pop_due(0.0, 0.0) == "because val/loss is 0.1 (< 0.2) at step 8"


def test_only_the_fields_of_its_kind_are_compared(stops: Stops) -> None:
    document = {"kind": "step", "step": 500, "metric": "val/loss", "compare": "?", "at_s": 1}
    stops.add_conditions([from_document(document)])
    polls = {0: logged("val/loss", [0.5], first_step=7)}
    stops.check_metrics(fold_many(FoldState(), polls), polls)
    assert stops.pop_due(0.0, 0.0) is None


@pytest.mark.parametrize("change", [{"metric": ["val/loss"]}, {"at_s": "now"}, {"step": True}])
def test_a_field_of_another_type_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="not a stop condition"):
        from_document({"kind": "step", "step": 500, **change})


def test_words_of_a_person() -> None:
    condition = parse_metric_condition(" val/acc >= 9e-1 ")
    assert (condition.metric, condition.compare, condition.value) == ("val/acc", ">=", 0.9)
    now = datetime(2024, 5, 3, 18, 31, 5).timestamp()
    next_day = required(parse_time_condition("18:30", now).at_s)
    assert datetime.fromtimestamp(next_day) == datetime(2024, 5, 4, 18, 30)
    assert parse_time_condition("18:31:30", now).at_s == now + 25
    assert parse_time_condition("+1.5h", now).wait_s == 5400
    for text in ("25:00", "noon", "+2", "2h", "-1h", ""):
        with pytest.raises(ProblemError):
            parse_time_condition(text, now)
    for text in ("val/loss", "val/loss<", "<3", "val/loss=3", "val/loss<nan", "a b<3"):
        with pytest.raises(ProblemError):
            parse_metric_condition(text)
    for condition in (parse_metric_condition("a<1"), parse_time_condition("18:30", now)):
        assert from_document(condition.to_document()) == condition
    for document in ({}, {"kind": "step"}, {"kind": "no"}, {"kind": "metric", "metric": "a"}):
        with pytest.raises(ValueError, match="condition"):
            from_document(document)


def test_only_new_values_and_no_clock_for_a_wait() -> None:
    seen = {"loss": MetricValue(last=0.1, step=5)}
    below = resolve_condition(parse_metric_condition("loss<0.2"), seen, 0, 100.0)
    assert metric_reason(below, [(5, 0.1)]) is None
    assert metric_reason(below, [(6, 0.3)]) is None
    assert metric_reason(below, [(7, 0.15)]) == "because loss is 0.15 (< 0.2) at step 7"
    wait = resolve_condition(parse_time_condition("+60s", 0.0), {}, 0, 100.0)
    # A clock that is set, by years, changes nothing.
    assert time_reason(wait, 1e12, 159.0) is None
    assert time_reason(wait, -1e12, 160.0) == "1 min after the request"


def test_one_line_for_all_of_them() -> None:
    kinds = [parse_condition(text, 0.0).kind for text in ("500", "epoch", "a/b>=2", "18:30", "+2h")]
    assert kinds == ["step", "epoch", "metric", "clock", "wait"]
    with pytest.raises(ProblemError, match="Give a step, `epoch`, a condition on a metric"):
        parse_condition("soon", 0.0)
