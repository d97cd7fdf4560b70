"""Every preset trains, validates and tests with two ranks on the CPU, scaled down by ``--set``.

All in one pair of ranks, because importing torch and Lightning costs more than these steps. Those
of ``LTUI_PRESETS=all`` (``make presets``) go through ``ltui run`` as well, one by one.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ltui.training.config.device_selection import Machine
from ltui.training.config.preset_discovery import shipped_names
from tests.ltui_command import answer
from tests.presets.made_up import SHAPES, image_folder
from tests.presets.preset_spec import preset_spec

HAS_FFCV = find_spec("ffcv") is not None
NOT_SCALED = {"quickstart", "cifar10-cnn"}
"""They are trained as they are, by ``whole``."""
IMAGES, CLASSES = 7, len(SHAPES)
"""Images of each class; 21 do not divide by two ranks."""

MINE = """
import torch
from lightning.pytorch import LightningDataModule, LightningModule

class Line(LightningModule):
    def __init__(self, rate: float = 0.1):
        super().__init__()
        self.rate = rate
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch):
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x), y)
    def test_step(self, batch):
        x, y = batch
        self.log("test/error", torch.nn.functional.mse_loss(self.layer(x), y), sync_dist=True)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.rate)
"""
POINTS = """
import torch
from lightning.pytorch import LightningDataModule

class Points(LightningDataModule):
    def _loader(self):
        x = torch.linspace(-1, 1, 32).unsqueeze(1)
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, 3 * x + 1), 8)
    train_dataloader = test_dataloader = _loader
"""
MINE_YAML = """
trainer: {accelerator: cpu, devices: 2, strategy: ddp, max_epochs: 25}
model: {class_path: my_lines.line.Line}
data: {class_path: points.Points}
ltui: {title: Mine, after_fit: [test]}
"""


def project(folder: Path) -> Path:
    """A person's own module (in a package), data and preset; nothing of it is installed."""
    (folder / "my_lines").mkdir(parents=True)
    (folder / "my_lines" / "line.py").write_text(MINE)
    (folder / "points.py").write_text(POINTS)
    (folder / "mine.yaml").write_text(MINE_YAML)
    return folder / "mine.yaml"


def _sets(prefix: str, **values: object) -> list[str]:
    """Return an override for each value of a part of a preset."""
    return [f"{prefix}.{name}={value}" for name, value in values.items()]


def scaled_down(folder: Path) -> dict[str, tuple[str, list[str]]]:
    """Name of a run -> preset and overrides."""
    images = image_folder(folder / "images", IMAGES)
    gpt = [
        *_sets("trainer", max_epochs=1, limit_train_batches=4, accumulate_grad_batches=2),
        *_sets("trainer", limit_val_batches=2, limit_test_batches=2),
        *_sets("model.init_args", width=32, layers=2, heads=2, context=32),
        "data.init_args.batch_size=4",
    ]
    small = [
        "trainer.max_epochs=1",
        *_sets("model.init_args", classes=CLASSES, learning_rate=0.001),
    ]
    beton = [
        f"data.init_args.folder={folder / 'beton'}",
        f"data.init_args.sources={{train: {images}, val: {images}, test: {images}}}",
        "data.init_args.batch_size=4",
        "data.init_args.num_workers=1",
    ]
    runs = {
        "gpt-fsdp": ("gpt-fsdp", [*gpt, "trainer.precision=bf16-mixed"]),
        "gpt-meta": ("gpt-fsdp", [*gpt, "model.init_args.meta_device=true"]),
        "gpt-ddp": ("gpt-fsdp", [*gpt, "trainer.strategy=ddp"]),
        "image-folder-finetune": (
            "image-folder-finetune",
            [
                "trainer.max_epochs=1",
                *_sets("data.init_args", folder=images, batch_size=3, size=32, workers=0),
            ],
        ),
        "sequences-mmap": (
            "sequences-mmap",
            [
                "trainer.max_epochs=1",
                *_sets("data.init_args", made_up=66, batch_size=8),
                "model.init_args.width=16",
            ],
        ),
        "mine": (str(project(folder / "project")), ["model.init_args.rate=0.3"]),
    }
    if HAS_FFCV:
        runs["cifar10-ffcv-resnet18"] = (
            "cifar10-ffcv-resnet18",
            [*small, *beton, "data.init_args.resolution=16", "data.init_args.cutout=4"],
        )
        runs["imagenet-ffcv-resnet50"] = (
            "imagenet-ffcv-resnet50",
            [
                *small,
                *beton,
                "trainer.max_epochs=2",
                "data.init_args.resolution_from_epoch={0: 32, 1: 64}",
                "data.init_args.val_resolution=64",
            ],
        )
    return runs


# torchvision compares checksums with the real files'; that, and only that, is let go.
TRUSTING = """
import torchvision.datasets.cifar as cifar
cifar.check_integrity = lambda path, md5=None: __import__("os").path.isfile(path)
from ltui.training.data.cifar10 import Cifar10

class MadeUp(Cifar10):
    pass
"""


def made_up_cifar(folder: Path, count: int) -> None:
    """CIFAR-10's files as they lie on disk, with a colour for each class."""
    base = folder / "cifar-10-batches-py"
    base.mkdir(parents=True)
    random = np.random.default_rng(0)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        labels = random.integers(0, 10, count)
        images = np.repeat(labels[:, None] * 25, 3072, axis=1).astype(np.uint8)
        batch: dict[str, Any] = {"data": images, "labels": labels.tolist()}
        (base / name).write_bytes(pickle.dumps(batch))
    names = {"label_names": [str(i) for i in range(10)]}
    (base / "batches.meta").write_bytes(pickle.dumps(names))


def whole(folder: Path) -> dict[str, tuple[str, list[str]]]:
    """Name of a run -> preset and overrides, of presets that are small enough as they are."""
    made_up_cifar(folder / "cifar", 41)
    (folder / "trusting.py").write_text(TRUSTING)
    cifar = [
        "trainer.max_epochs=3",
        "data.class_path=trusting.MadeUp",
        "data.init_args.batch_size=8",
        f"data.init_args.folder={folder / 'cifar'}",
    ]
    digits = {"torch": ["trainer.max_epochs=12"], "ffcv": ["trainer.max_epochs=2"]}
    runs = {
        f"quickstart by {loader}": ("quickstart", [*sets, f"data.init_args.loader={loader}"])
        for loader, sets in digits.items()
        if HAS_FFCV or loader == "torch"
    }
    return {"cifar10-cnn": ("cifar10-cnn", cifar), **runs}


def train_all(
    folder: Path, runs: Mapping[str, tuple[str, list[str]]]
) -> tuple[list[dict[str, Any]], str]:
    """What both ranks report of each run, and what they printed."""
    listed = []
    for name, (preset, overrides) in runs.items():
        spec = preset_spec(preset, Machine(gpus=0, cores=2), overrides)
        facts = {"after_fit": spec.after_fit, "python_path": [*spec.python_path, str(folder)]}
        listed.append({"name": name, "config": spec.config, **facts})
    (folder / "runs.json").write_text(json.dumps(listed))
    engine = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", *engine, str(Path(__file__).with_name("several.py")), "runs.json"],
        cwd=folder,
        env={**os.environ, "LTUI_HOME": str(folder / "home"), "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=900)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    reports = [folder / f"report-{rank}.json" for rank in range(2)]
    return [json.loads(r.read_text()) for r in reports if r.exists()], output


def train(preset: str, folder: Path, *overrides: str) -> tuple[list[dict[str, float]], str]:
    """What each of two ranks reports of one run, and what they printed."""
    reports, output = train_all(folder, {"it": (preset, list(overrides))})
    return [report["it"] for report in reports], output


@pytest.mark.slow
@pytest.mark.timeout(920)
def test_every_preset_trains_with_two_ranks(tmp_path: Path) -> None:
    also = whole(tmp_path)
    reports, output = train_all(tmp_path, {**scaled_down(tmp_path), **also})
    assert len(reports) == 2, output[-3000:]
    expected = set(shipped_names()) - NOT_SCALED | {"mine", *also}
    if not HAS_FFCV:
        expected = {name for name in expected if "ffcv" not in name}
    for report in reports:
        for name, seen in report.items():
            assert "error" not in seen, f"{name}: {seen['error']}"
        assert set(report) >= expected, output[-3000:]
    _both_ranks_say_the_same(*reports)
    _each_sample_counts_once(reports[0])
    _shards_are_halves(reports[0])
    _it_learns(reports[0])
    if HAS_FFCV:
        data = tmp_path / "home" / "data"
        assert [p.name for p in data.glob("*digits*")] == ["digits-1.beton"]


def _both_ranks_say_the_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name, seen in one.items():
        for key in seen.keys() - {"parameters"}:
            assert seen[key] == pytest.approx(other[name][key], rel=1e-6), (name, key)
        part = "val/" if name.startswith("quickstart") else "test/"
        assert any(key.startswith(part) for key in seen), name
        assert seen["steps"] > 0


def _each_sample_counts_once(report: dict[str, Any]) -> None:
    """An accuracy is a multiple of one sample's share of those that were measured."""
    images = IMAGES * CLASSES
    shares = {
        "image-folder-finetune": images // 5,
        "sequences-mmap": 66 // 4,
        "cifar10-ffcv-resnet18": images,
        "imagenet-ffcv-resnet50": images,
        "cifar10-cnn": 41,
        "quickstart by torch": 359,
        "quickstart by ffcv": 359,
    }
    for name, samples in shares.items():
        if name in report:
            part = "val" if name.startswith("quickstart") else "test"
            right = report[name][f"{part}/accuracy"] * samples
            assert right == pytest.approx(round(right), abs=1e-3), name
            assert math.isfinite(report[name][f"{part}/loss"])
    # Two epochs of two steps: of 21 images drop_last leaves 16.
    assert report.get("imagenet-ffcv-resnet50", {"steps": 4})["steps"] == 4
    assert report["mine"]["test/error"] < 0.1
    assert report["cifar10-cnn"]["batches"] == 13
    assert report["cifar10-cnn"]["test/loss"] > 0


def _shards_are_halves(report: dict[str, Any]) -> None:
    whole = report["gpt-ddp"]
    for name in ("gpt-fsdp", "gpt-meta"):
        assert report[name]["parameters"] == whole["parameters"] // 2
        # From the same weights over the same windows: only rounding differs.
        assert report[name]["test/loss"] == pytest.approx(whole["test/loss"], rel=0.01)


def _it_learns(report: dict[str, Any]) -> None:
    by_torch = report["quickstart by torch"]
    # 1,438 images in batches of 16 on two ranks.
    assert (by_torch["batches"], by_torch["steps"]) == (45, 12 * 45)
    assert by_torch["val/accuracy"] >= 0.95
    if HAS_FFCV:
        by_ffcv = report["quickstart by ffcv"]
        assert by_ffcv["steps"] == 90
        assert by_ffcv["val/accuracy"] > 0.5


@pytest.mark.skipif(os.environ.get("LTUI_PRESETS") != "all", reason="make presets runs them")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", sorted(set(shipped_names()) - NOT_SCALED | {"mine"}))
def test_ltui_runs_it(name: str, tmp_path: Path) -> None:
    preset, overrides = scaled_down(tmp_path)[name]
    sets = [word for override in overrides for word in ("--set", override)]
    ltui = [sys.executable, "-m", "ltui.app"]
    done = subprocess.run(
        [*ltui, "run", preset, *sets],
        cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    show = [*ltui, "show", "last", "--json"]
    shown = answer(subprocess.run(show, capture_output=True, text=True, check=True).stdout)
    assert shown["state"] == "finished"
    assert {rank["state"] for rank in shown["ranks"]} == {"ended"}
    assert any(metric.startswith("test/") for metric in shown["metrics"])


_NO_NETWORK = """
import sys
from urllib import request

def refuse(*args, **kwargs):
    raise OSError("Network is unreachable")

request.urlopen = request.urlretrieve = refuse
from ltui.training.data.cifar10 import Cifar10
Cifar10(folder=sys.argv[1]).prepare_data()
"""


def test_without_a_network_it_says_what_to_do(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _NO_NETWORK, str(tmp_path / "data")],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "CIFAR-10 is not in" in last
    assert "Network is unreachable" in last
    assert "data.init_args.folder" in last
