"""The digits, built into ``.beton`` files, are learned as well through FFCV as through torch's
DataLoader: two ranks, the same files, the same preset, one setting apart."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.conftest import everything, needs_ffcv
from tests.presets.test_all_presets import train

DIGITS, VALIDATED = 1797, 359

PROJECT = """
from sklearn.datasets import load_digits
from ltui.training.models.digits import DigitsCNN

class Part:
    '''Images (8, 8, 3) of bytes and their digits: a fifth for validation, the rest to train on.'''

    def __init__(self, train):
        digits = load_digits()
        chosen = [i for i in range(len(digits.target)) if (i % 5 > 0 or i >= 1795) == train]
        self.images = (digits.images[chosen, :, :, None] * 15).repeat(3, axis=3).astype("uint8")
        self.labels = digits.target[chosen]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]

class Grey(DigitsCNN):
    def forward(self, images):
        return super().forward(images[:, :1])
"""

BUILD = """
from pathlib import Path
from digit_parts import Part
from ltui.training.data.ffcv.beton_writer import WriteOptions, write

for name in ("train", "val"):
    options = WriteOptions(images="raw", page_bytes=2 << 20)
    write(Part(name == "train"), Path(f"{name}.beton"), options, lambda done, of: None)
"""

PRESET = """
seed_everything: 7
trainer: {accelerator: cpu, devices: 2, strategy: ddp, max_epochs: 6, num_sanity_val_steps: 0}
model: {class_path: digit_parts.Grey, init_args: {learning_rate: 0.004}}
data:
  class_path: ltui.training.data.beton_data.BetonData
  init_args:
    train: train.beton
    val: val.beton
    batch_size: 16
    crop: shifted
    shift: 0
    flip: false
    mean: [0.3, 0.3, 0.3]
    std: [0.4, 0.4, 0.4]
    loader: ffcv
    num_workers: 1
"""


@needs_ffcv
@everything
@pytest.mark.timeout(400)
def test_ffcv_and_dataloader_learn_alike(tmp_path: Path) -> None:
    (tmp_path / "digit_parts.py").write_text(PROJECT)
    (tmp_path / "digits.yaml").write_text(PRESET)
    command = [sys.executable, "-W", "ignore", "-c", BUILD]
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180)
    assert built.returncode == 0, built.stderr

    accuracy = {}
    for loader in ("ffcv", "torch"):
        chosen = f"data.init_args.loader={loader}"
        reports, output = train(str(tmp_path / "digits.yaml"), tmp_path, chosen)
        assert len(reports) == 2, output[-3000:]
        assert reports[0] == reports[1]
        assert reports[0]["steps"] == 6 * 45  # 1,438 images in batches of 16 on two ranks
        accuracy[loader] = reports[0]["val/accuracy"]
        for report in tmp_path.glob("report-*.json"):
            report.unlink()
        # Each image counts once, padding does not.
        right = accuracy[loader] * VALIDATED
        assert right == pytest.approx(round(right), abs=1e-3)
    assert min(accuracy.values()) >= 0.93, accuracy
    assert accuracy["ffcv"] == pytest.approx(accuracy["torch"], abs=0.02)
