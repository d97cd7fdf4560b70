"""Checkpoints on disk: complete or not there, which of them are kept, and whether they are finite.

A checkpoint is the previous or the new one, whenever its writer dies.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_loader import load

from ltui.training.config.run_spec import CheckpointPolicy, RunSpec
from ltui.training.rank.coordination.request_leader import BestCheckpoints
from ltui.training.rank.coordination.save_checkpoint import WeightsCheck
from ltui.training.rank.program.program_checkpoint import ProgramCheckpoint
from ltui.training.shared.checkpoint_files import (
    checkpoint_name,
    partial_path,
    prune_periodic,
    publish_checkpoint,
    rank_file,
)
from ltui.training.shared.rank_environment import RankEnvironment
from ltui.training.store.history_writer import StoreWriter
from ltui.training.store.run_checkpoints import (
    checkpoint_to_resume,
    damage_of,
    list_checkpoints,
    verify,
)
from ltui.training.supervise.engine_command import engine_start
from tests.rank.models import Linear, loader
from tests.rank.runs import RunFolder
from tests.required import required
from tests.store.histories import begin, run_dir, steps, write
from tests.tensor_queue.children import exit_code, fork


def _save(folder: Path, step: int, reason: str = "periodic", attempt: int = 1) -> Path:
    path = folder / checkpoint_name(step, reason)
    partial_path(path).write_bytes(b"weights of %d" % step)
    partial_path(rank_file(path, 0)).write_bytes(b"random state")
    return publish_checkpoint(
        partial_path(path), path, 1, global_step=step, attempt=attempt, fit=1
    )[0]


@pytest.mark.parametrize("turn", range(4))
def test_a_killed_writer_leaves_a_complete_checkpoint(tmp_path: Path, turn: int) -> None:
    """Saving the same step again and again, as a run does that is stopped as soon as it resumed."""
    rng = random.Random(turn)
    reading, writing = os.pipe()

    def save_forever() -> None:
        path = tmp_path / checkpoint_name(100, "stop")
        position: dict[str, Any] = {"global_step": 100, "attempt": 1, "fit": 1, "reason": "stop"}
        while True:
            partial_path(path).write_bytes(os.urandom(200_000))
            for rank in range(2):
                partial_path(rank_file(path, rank)).write_bytes(os.urandom(1000))
            publish_checkpoint(partial_path(path), path, 2, **position)
            os.write(writing, b".")

    writer = fork(save_forever)
    os.close(writing)
    for _ in range(1 + rng.randrange(6)):
        assert os.read(reading, 1), "the writer has ended"
    signal.sigtimedwait(set(), rng.random() * 0.02)
    os.kill(writer, signal.SIGKILL)
    assert exit_code(writer) == -signal.SIGKILL
    os.close(reading)
    assert required(checkpoint_to_resume(tmp_path)).global_step == 100


class Died(BaseException):
    """The end of the process: no code of it handles this."""


@pytest.mark.parametrize("renames", range(3))
def test_a_writer_that_dies_before_a_rename_leaves_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    """The files of the rank, the checkpoint and the manifest get their names in this order."""
    _save(tmp_path, 5)
    rename, remaining = os.rename, iter(range(renames))

    def rename_or_die(source: Path, target: Path) -> None:
        if next(remaining, None) is None:
            raise Died
        rename(source, target)

    monkeypatch.setattr(os, "rename", rename_or_die)
    with pytest.raises(Died):
        _save(tmp_path, 6)
    (only,) = list_checkpoints(tmp_path)
    assert (only.global_step, verify(only).ok) == (5, True)


def test_an_existing_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    first = _save(tmp_path, 5)
    second = _save(tmp_path, 5, attempt=2)
    third = _save(tmp_path, 5, attempt=3)
    assert [first.name, second.name] == [
        "step-00000005-periodic.ckpt",
        "step-00000005-periodic-2.ckpt",
    ]
    assert third.name == first.name, "the name became free again"
    (only,) = list_checkpoints(tmp_path)
    assert verify(only).ok
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        third.name, f"{third.name}.json", f"{third.name}.rank-00000",
    ]  # fmt: skip


def test_the_newest_are_kept_independently_of_the_clock(tmp_path: Path) -> None:
    for attempt, step in ((1, 10), (1, 20), (2, 15), (2, 25)):
        path = _save(tmp_path, step, attempt=attempt)
        # The clock runs backwards all the while.
        os.utime(f"{path}.json", (1e9 - 100 * attempt - step,) * 2)
    prune_periodic(tmp_path, 2)
    remaining = [json.loads(p.read_text()) for p in tmp_path.glob("*.json")]
    assert sorted((m["attempt"], m["global_step"]) for m in remaining) == [(2, 15), (2, 25)]


def test_a_failed_publication_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / checkpoint_name(7, "request")
    partial_path(path).write_bytes(b"weights")
    with pytest.raises(FileNotFoundError):  # rank 1 wrote nothing
        publish_checkpoint(partial_path(path), path, 2, global_step=7)
    assert list_checkpoints(tmp_path) == []
    assert not path.exists()


@pytest.mark.timeout(600)
def test_a_damaged_sharded_checkpoint_is_not_resumed_from(tmp_path: Path) -> None:
    """Two ranks write it, each its part."""
    script = Path(__file__).parent / "scripts" / "sharded.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert not list(tmp_path.glob(".*.part"))
    info = checkpoint_to_resume(tmp_path)
    assert info is not None
    assert info.weights == "finite"
    path = Path(info.path)
    shards = sorted(path.glob("*.distcp"))
    assert len(shards) == 2
    # Read by one process, whatever number wrote it.
    state = {"rows": torch.zeros(10, 4), "step": torch.tensor(0)}
    load(state, checkpoint_id=path)
    assert torch.equal(state["rows"], torch.arange(40.0).reshape(10, 4))
    assert int(state["step"]) == info.global_step == 7

    data = bytearray(shards[1].read_bytes())
    data[len(data) // 2] ^= 1
    shards[1].write_bytes(data)
    assert "different checksum" in str(damage_of(info))
    shards[1].unlink()
    assert "is gone" in str(damage_of(info))
    assert checkpoint_to_resume(tmp_path) is None


# Which checkpoints a metric is compared with after a resume from an older step.


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


# Weights that are not finite are marked when they are saved.

KINDS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64)


def spoilt(value: float, kind: torch.dtype = torch.float32) -> torch.Tensor:
    weights = torch.ones(50, 40, dtype=kind)
    weights[31, 7] = value
    return weights


def weights_saved_by(save: Callable[[Path], object], folder: Path) -> str | None:
    """Return what the manifest says of the weights in a program's checkpoint."""
    checkpoint = ProgramCheckpoint(save, save, rank=0, world_size=1, all_ranks=False)
    assert checkpoint.save(folder, "stop", 12, bool, {"attempt": 1, "fit": 1}).error is None
    (stored,) = list_checkpoints(folder)
    return stored.weights


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_nan_and_infinity_are_found_in_every_kind_of_tensor(kind: torch.dtype) -> None:
    fine = {"a": torch.zeros(3, dtype=kind), "number of batches": torch.tensor(7), "b": None}
    for value, word in ((1.0, "finite"), (math.nan, "NaN"), (math.inf, "inf"), (-math.inf, "inf")):
        assert WeightsCheck({**fine, "w": spoilt(value, kind)}).result() == word
    assert (
        WeightsCheck({"a": spoilt(math.inf, kind), "b": spoilt(math.nan, kind)}).result() == "NaN"
    )


def test_a_mask_may_be_infinite_and_what_cannot_be_checked_is_not_called_finite() -> None:
    mask = {"mask": spoilt(-math.inf), "w": spoilt(1.0)}
    assert WeightsCheck(mask, {"mask"}).result() == "finite"
    assert WeightsCheck({"mask": spoilt(math.nan)}, {"mask"}).result() == "NaN"
    assert WeightsCheck({}).result() is None
    assert WeightsCheck({"w": torch.ones(2).to(torch.float8_e4m3fn)}).result() is None


def test_lightning_marks_its_checkpoints_and_keeps_none_with_nan_as_the_best(
    run: RunFolder, fit: Any
) -> None:
    def spoil(module: Linear, batch: int) -> None:
        if batch == 0 and module.current_epoch == 2:
            with torch.no_grad():
                module.layer.weight.fill_(math.nan)

    class Scored(Linear):
        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.log("score", 1.0 / (1 + self.trainer.current_epoch))

    best = {"LTUI_CHECKPOINT_BEST": "score", "LTUI_CHECKPOINT_BEST_KEEP": "9"}
    extra = {**best, "LTUI_CHECKPOINT_EVERY_S": "1000"}
    fit(Scored(spoil), loader(3), loader(1), max_epochs=4, extra=extra)
    manifests = {
        path.name: json.loads(Path(f"{path}.json").read_text()) for path in run.checkpoints
    }
    assert {name: manifest["weights"] for name, manifest in manifests.items()} == {
        "step-00000003-best.ckpt": "finite",
        "step-00000006-best.ckpt": "finite",
        "step-00000012-end.ckpt": "NaN",
    }


@pytest.mark.parametrize(
    ("save", "weights"),
    [
        (lambda path: torch.save({"net": {"w": spoilt(1.0)}}, path / "model.pt"), "finite"),
        (lambda path: torch.save({"net": [spoilt(math.nan)]}, path / "model.pt"), "NaN"),
        (lambda path: torch.save({"best": torch.tensor(math.inf)}, path / "state.pt"), None),
        (lambda path: torch.save({"net": BestCheckpoints}, path / "model.pt"), None),
        (lambda path: (path / "model.txt").write_text("7"), None),
    ],
    ids=["finite", "NaN", "only a number", "needs unpickling", "no tensors"],
)
def test_files_of_a_program_are_checked_where_they_are_plain_tensors(
    tmp_path: Path, save: Callable[[Path], object], weights: str | None
) -> None:
    assert weights_saved_by(save, tmp_path) == weights


@pytest.mark.parametrize(("value", "weights"), [(1.0, "finite"), (math.nan, "NaN")])
@pytest.mark.parametrize("folder", ["", "checkpoint-12"])
def test_checkpoints_of_the_hugging_face_trainer_are_checked(
    tmp_path: Path, value: float, weights: str, folder: str
) -> None:
    def save(path: Path) -> None:
        (path / folder).mkdir(exist_ok=True)
        fine = {"a": spoilt(1.0), "number": torch.tensor(7)}
        save_file(fine, path / folder / "model-00001-of-00002.safetensors")
        second = path / folder / "model-00002-of-00002.safetensors"
        save_file({"b": spoilt(value, torch.bfloat16)}, second)
        # What lies beside the weights may be anything.
        torch.save({"state": spoilt(math.nan)}, path / folder / "optimizer.pt")
        torch.save(BestCheckpoints, path / folder / "training_args.bin")

    assert weights_saved_by(save, tmp_path) == weights
