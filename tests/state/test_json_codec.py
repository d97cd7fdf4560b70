"""Values from JSON, and what a document of another version or of a damaged file gives."""

from __future__ import annotations

import json
import math

import pytest

from ltui.training.json_codec import from_json, to_json
from ltui.training.slurm.batch_script import JobOptions
from ltui.training.slurm.job_record import JobRecord
from ltui.training.state.run_snapshot import (
    FreezeWarning,
    MetricValue,
    RankSnapshot,
    RankState,
    RunSnapshot,
    RunState,
    Throughput,
    Verdict,
    snapshot_from_json,
)


def test_a_snapshot_comes_back_from_json() -> None:
    snapshot = RunSnapshot(
        id="i",
        name="n",
        state=RunState.RUNNING,
        command=("a", "b"),
        metrics={"loss": MetricValue(last=1.5, step=3)},
        throughput=Throughput(samples_per_s=2.0),
        ranks=(RankSnapshot(rank=0, state=RankState.OK, recent_step_s=(0.1, 0.2)),),
        verdicts=(Verdict(kind="k", level="dead", culprits=(1,), cause="c", evidence={"a": [1]}),),
        cautions=(FreezeWarning(what="w", remedy=None),),
    )
    assert snapshot_from_json(json.loads(json.dumps(to_json(snapshot)))) == snapshot


def test_numbers_that_are_not_finite_come_back_as_nan_or_are_left_out() -> None:
    metric = from_json(MetricValue, {"last": "NaN", "step": 1, "best_min": None}, tolerant=True)
    assert math.isnan(metric.last)
    assert metric.best_min is None
    rank = from_json(RankSnapshot, {"rank": 0, "recent_step_s": [0.1, None]}, tolerant=True)
    assert rank.recent_step_s == (0.1,)


def test_null_for_a_container_is_the_default_only_where_that_is_tolerated() -> None:
    document = {"kind": "k", "level": "dead", "cause": "c", "culprits": None, "unknown": 1}
    assert from_json(Verdict, document, tolerant=True).culprits == ()
    with pytest.raises(ValueError, match="not a Verdict"):
        from_json(Verdict, document)


@pytest.mark.parametrize(
    "document", [None, [], "text", {}, {"id": "i", "name": "n", "state": "of a later version"}]
)
def test_what_is_no_snapshot_is_refused(document: object) -> None:
    with pytest.raises(ValueError, match="not a run snapshot"):
        snapshot_from_json(document)  # type: ignore[arg-type]


def test_a_nan_leaves_the_texts_beside_it_as_they_are() -> None:
    verdict = Verdict(
        kind="nan", level="warning", cause="c", evidence={"loss": "NaN", "rank": None}
    )
    snapshot = RunSnapshot(
        id="i",
        name="NaN",
        state=RunState.RUNNING,
        metrics={"loss": MetricValue(last=math.nan, step=3)},
        verdicts=(verdict,),
    )
    back = snapshot_from_json(json.loads(json.dumps(to_json(snapshot), allow_nan=False)))
    assert math.isnan(back.metrics["loss"].last)
    assert (back.name, back.verdicts) == ("NaN", (verdict,))


def test_a_field_with_another_name_on_disk_comes_back() -> None:
    record = JobRecord(token="t", submitted_at=1.0, options=JobOptions(), first_job_id="12")
    assert to_json(record)["job_id"] == "12"
    assert from_json(JobRecord, to_json(record)) == record
