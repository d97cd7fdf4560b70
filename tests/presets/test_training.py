"""Presets really train, as ranks of torch elastic: scaled down, on the CPU, with two ranks."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ltui.training.config.device_selection import Machine
from tests.presets.preset_spec import preset_spec

CALLBACK = """
import json, os
from lightning.pytorch import Callback

class Report(Callback):
    def setup(self, trainer, pl_module, stage):
        self.seen = getattr(self, "seen", {})
        self.steps = 0

    def on_train_batch_end(self, trainer, *rest):
        self.steps += 1

    def teardown(self, trainer, pl_module, stage):
        for name, value in trainer.callback_metrics.items():
            self.seen[name] = float(value)
        if stage == "fit":
            self.seen["steps"] = self.steps
            self.seen["batches"] = trainer.num_training_batches
        with open(f"report-{trainer.global_rank}.json", "w") as file:
            json.dump(self.seen, file)
"""


def train(name: str, folder: Path, *overrides: str) -> tuple[list[dict[str, float]], str]:
    """What each of two ranks reports, and what they printed."""
    (folder / "report.py").write_text(CALLBACK)
    more = ("trainer.callbacks=[{class_path: report.Report}]", *overrides)
    spec = preset_spec(name, Machine(gpus=0, cores=2), more)
    config = {"config": spec.config, "after_fit": spec.after_fit, "python_path": [str(folder)]}
    (folder / "config.json").write_text(json.dumps(config))
    engine = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    process = subprocess.Popen(
        [*engine, "-m", "ltui.training.rank.train_preset", "config.json"],
        cwd=folder,
        env={**os.environ, "LTUI_HOME": str(folder / "home"), "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=280)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    reports = [folder / f"report-{rank}.json" for rank in range(2)]
    return [json.loads(r.read_text()) for r in reports if r.exists()], output


@pytest.mark.slow
def test_quickstart_learns(tmp_path: Path) -> None:
    reports, output = train(
        "quickstart", tmp_path, "trainer.max_epochs=12", "data.init_args.loader=torch"
    )
    assert len(reports) == 2, output[-3000:]
    for report in reports:
        # 1,438 images in batches of 16 on two ranks.
        assert report["batches"] == 45
        assert report["steps"] == 12 * 45
        assert report["val/accuracy"] >= 0.95
    assert reports[0] == reports[1]
    # 359 images were measured, each once: the accuracy is a multiple of that.
    right = reports[0]["val/accuracy"] * 359
    assert right == pytest.approx(round(right), abs=1e-3)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ffcv") is None, reason="FFCV is not installed")
def test_quickstart_reads_by_ffcv(tmp_path: Path) -> None:
    reports, output = train(
        "quickstart", tmp_path, "trainer.max_epochs=2", "data.init_args.loader=ffcv"
    )
    assert len(reports) == 2, output[-3000:]
    assert [r["steps"] for r in reports] == [90, 90]
    assert [p.name for p in (tmp_path / "home" / "data").iterdir()] == ["digits-1.beton"]
    assert reports[0]["val/accuracy"] > 0.5
    right = reports[0]["val/accuracy"] * 359
    assert right == pytest.approx(round(right), abs=1e-3)


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


# torchvision compares checksums with the real files'; that, and only that, is let go.
TRUSTING = """
import torchvision.datasets.cifar as cifar
cifar.check_integrity = lambda path, md5=None: __import__("os").path.isfile(path)
from ltui.training.data.cifar10 import Cifar10

class MadeUp(Cifar10):
    pass
"""


@pytest.mark.slow
def test_cifar_trains_and_tests_on_files_in_its_format(tmp_path: Path) -> None:
    made_up_cifar(tmp_path / "data", 41)
    (tmp_path / "made_up.py").write_text(TRUSTING)
    reports, output = train(
        "cifar10-cnn",
        tmp_path,
        "trainer.max_epochs=3",
        "data.class_path=made_up.MadeUp",
        "data.init_args.batch_size=8",
        f"data.init_args.folder={tmp_path / 'data'}",
    )
    assert len(reports) == 2, output[-3000:]
    for report in reports:
        assert report["batches"] == 13
        # 41 test images, each counted once on whichever rank.
        right = report["test/accuracy"] * 41
        assert right == pytest.approx(round(right), abs=1e-3)
        assert report["test/loss"] > 0
    assert reports[0]["test/accuracy"] == reports[1]["test/accuracy"]


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
