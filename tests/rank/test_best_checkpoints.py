"""Which checkpoints a metric is compared with after a resume from an older step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from ltui.training.config.run_spec import CheckpointPolicy, RunSpec
from ltui.training.rank.coordination.request_leader import BestCheckpoints
from ltui.training.shared.rank_environment import RankEnvironment
from ltui.training.store.history_writer import StoreWriter
from ltui.training.supervise.engine_command import engine_start
from tests.store.histories import begin, run_dir, steps, write


def environment(folder: Path, earlier_steps: Mapping[int, int] | None) -> RankEnvironment:
    """Return what a rank reads of the variables."""
    written = RankEnvironment(
        run_dir=folder,
        run_id="a",
        attempt=2,
        best_metric="val/loss",
        best_keep=1,
        earlier_steps=earlier_steps,
    )
    variables = {name: value for name, value in written.variables().items() if value is not None}
    read = RankEnvironment.read(variables)
    assert read is not None
    return read


@pytest.mark.parametrize(
    ("earlier_steps", "is_best", "kept"),
    [({1: 50}, True, {192, 60}), ({}, True, {192, 60}), (None, False, {192})],
)
def test_a_metric_is_not_compared_with_steps_that_the_run_has_left(
    tmp_path: Path, earlier_steps: Mapping[int, int] | None, is_best: bool, kept: set[int]
) -> None:
    def save(attempt: int, step: int, value: float) -> None:
        path = tmp_path / "checkpoints" / f"step-{step:08d}-best.ckpt"
        path.parent.mkdir(exist_ok=True)
        path.touch()
        best = {"metric": "val/loss", "value": value, "mode": "min"}
        manifest = {"attempt": attempt, "global_step": step, "best": best, "file": path.name}
        Path(f"{path}.json").write_text(json.dumps(manifest))

    save(1, 192, 0.1)
    best = BestCheckpoints(environment(tmp_path, earlier_steps))
    assert best.update({"val/loss": 0.3}) == is_best
    save(2, 60, 0.3)
    best.prune()
    left = {int(path.name.split("-")[1]) for path in tmp_path.glob("checkpoints/*.ckpt")}
    assert left == kept, "a checkpoint that the run has left is not removed"


def test_the_ranks_learn_which_steps_count(tmp_path: Path) -> None:
    run = run_dir(tmp_path)
    store = StoreWriter(run.db_path)
    begin(store)
    write(store, 1, [steps(1, 242)])
    begin(store, 2, resumed_step=50)
    store.close()
    spec = RunSpec(
        id="a", name="a", created_at=1.0, cwd="/", python="python3", nproc=1, command=("train",)
    )
    kept = spec.with_changes(checkpoint=CheckpointPolicy(best="val/loss"))
    env = engine_start(run, kept, 2, None, ())["env"]
    assert json.loads(env["LTUI_EARLIER_STEPS"]) == {"1": 50}
    assert engine_start(run, spec, 2, None, ())["env"]["LTUI_EARLIER_STEPS"] is None
