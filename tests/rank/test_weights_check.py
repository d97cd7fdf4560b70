"""Checkpoints whose weights are not finite are marked when they are saved."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ltui.training.rank.coordination.request_leader import BestCheckpoints
from ltui.training.rank.coordination.save_checkpoint import WeightsCheck
from ltui.training.rank.program.program_checkpoint import ProgramCheckpoint
from ltui.training.store.run_checkpoints import list_checkpoints
from tests.rank.models import Linear, loader
from tests.rank.runs import RunFolder

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
