"""Conditions on metrics are checked against every logged value, not only the last of a poll."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from msgspec.structs import replace

from ltui.training.shared.record_types import RecordKind
from ltui.training.state.record_fold import FoldState, fold_many
from ltui.training.state.stop_conditions import from_document, parse_metric_condition
from ltui.training.store.run_directory import RunDir
from ltui.training.supervise.stops import Stops
from ltui.training.tensor_queue.queue_reader import Poll
from tests.state.records import labelled, step


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
