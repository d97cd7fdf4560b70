"""What can't be read, met by two ranks: the run fails with a sentence that names the sample, which
the dashboard shows too, and no rank is left behind."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ltui.training.store.history_reader import RunStore
from ltui.training.store.run_directory import RunDir
from tests.data.conftest import damage, everything, needs_ffcv
from tests.presets.made_up import image_folder
from tests.system.conftest import Ltui
from tests.system.conftest import ltui as ltui

MODEL = """
import torch
from lightning.pytorch import LightningModule

class Mean(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch):
        values = batch[0] if isinstance(batch, (list, tuple)) else batch.values
        return self.layer(values.float().mean().reshape(1, 1)).sum().square()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)
"""
BETON = "ltui.training.data.beton_data.BetonData"


def failed_run(ltui: Ltui, data: str, **arguments: Any) -> dict[str, Any]:
    """What is shown of a run of two ranks on such data, once it has failed."""
    (ltui.cwd / "mean_model.py").write_text(MODEL)
    trainer = {"accelerator": "cpu", "devices": 2, "strategy": "ddp", "max_epochs": 1}
    document = {
        "trainer": {**trainer, "num_sanity_val_steps": 0},
        "model": {"class_path": "mean_model.Mean"},
        "data": {"class_path": data, "init_args": arguments},
    }
    (ltui.cwd / "bad.yaml").write_text(json.dumps(document))  # JSON is YAML
    ltui("run", "bad.yaml", "--detach")
    # The engine ends the other rank with a signal, by which a person could have meant a stop.
    live = ("queued", "starting", "running", "stopping")
    shown = ltui.wait(lambda s: s["state"] not in live, seconds=200)
    assert shown["state"] == "failed", shown["detail"]
    ltui.wait_until_alone(60)
    return shown


def told(shown: dict[str, Any], words: str) -> None:
    """In the run's detail, in its events, and in the verdict that the banner shows."""
    events = RunStore(RunDir(Path(shown["run_dir"]))).events()
    assert words in shown["detail"]
    assert "Caught" not in shown["detail"]
    assert any(words in event.text for event in events), events
    assert any(words in verdict["cause"] for verdict in shown["verdicts"]), shown["verdicts"]
    assert {rank["state"] for rank in shown["ranks"]} <= {"dead", "ended"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_image_that_can_not_be_read(ltui: Ltui) -> None:
    """In a DataLoader's worker, so what is told went through torch's hands."""
    images = ltui.cwd / "images"
    torn = image_folder(images / "train", 4) / "stripes" / "2.jpg"
    torn.write_bytes(torn.read_bytes()[:200])
    shown = failed_run(
        ltui,
        "ltui.training.data.folder.ImageFolders",
        folder=str(images),
        batch_size=2,
        size=16,
        workers=1,
    )
    told(shown, "stripes/2.jpg can't be read as an image")
    assert "ImageError" in shown["detail"]


@needs_ffcv
@everything
@pytest.mark.timeout(300)
def test_a_damaged_jpeg_in_the_middle(ltui: Ltui, beton: Path) -> None:
    damage(Path(shutil.copy(beton, ltui.cwd / "x.beton")), 23)
    shown = failed_run(ltui, BETON, train="x.beton", batch_size=4, resolution=32, num_workers=1)
    told(shown, "x.beton: sample 23: the image in 'image' is damaged")


@needs_ffcv
@everything
@pytest.mark.timeout(300)
@pytest.mark.parametrize("loader", ["ffcv", "torch"])
def test_a_file_that_is_cut_off(ltui: Ltui, beton: Path, loader: str) -> None:
    cut = Path(shutil.copy(beton, ltui.cwd / "x.beton"))
    os.truncate(cut, cut.stat().st_size // 2)
    shown = failed_run(ltui, BETON, train="x.beton", loader=loader)
    told(shown, "x.beton: it is cut off after")


@everything
@pytest.mark.timeout(300)
def test_a_class_that_is_no_data_module(ltui: Ltui) -> None:
    (ltui.cwd / "mean_model.py").write_text(MODEL)
    (ltui.cwd / "bad.yaml").write_text(
        "{trainer: {accelerator: cpu, devices: 2}, model: {class_path: mean_model.Mean},"
        " data: {class_path: json.JSONDecoder}}"
    )
    done = ltui("run", "bad.yaml", check=None)
    assert done.returncode in (1, 2)
    assert "json.JSONDecoder" in done.stdout + done.stderr
    ltui.wait_until_alone(60)
