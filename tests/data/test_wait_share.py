"""``data_wait_share`` as the dashboard shows it, of loaders slowed on purpose: one rank under
``ltui run``, read from the run's own snapshot while it trains.

One rank, because of two the one whose loader is ahead waits for the other's data in a collective.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.data.conftest import everything, needs_ffcv
from tests.system.conftest import Ltui
from tests.system.conftest import ltui as ltui

BATCH_S, SHARE = 0.2, 0.7
"""What a step takes, and how much of it is waiting for data."""

PROJECT = f"""
import time
import torch
from ffcv.fields.basics import IntDecoder
from ffcv.pipeline.operation import Operation
from ffcv.transforms import ToTensor
from lightning.pytorch import LightningDataModule, LightningModule
from ltui.training.data.digits import write_beton
from ltui.training.data.ffcv.beton_file import BetonFile
from ltui.training.data.ffcv.epoch_order import ffcv_batches
from ltui.training.data.ffcv.epoch_order import BetonLoader, EpochOrder
from ltui.training.data.ffcv.ffcv_reader import FfcvReader
from pathlib import Path

SAMPLES, BATCH_S, SHARE = 8000, {BATCH_S}, {SHARE}
FILE = Path(__file__).with_name("numbers.beton")

class Slow(Operation):
    '''In the thread that reads ahead, so the step waits for what its own work does not hide.'''
    def declare_state_and_memory(self, previous_state):
        return previous_state, None
    def generate_code(self):
        def wait(values, _):
            time.sleep(BATCH_S)
            return values
        return wait

class Numbers(torch.utils.data.Dataset):
    def __init__(self, sleep_s):
        self.sleep_s = sleep_s
    def __len__(self):
        return SAMPLES
    def __getitem__(self, index):
        time.sleep(self.sleep_s)
        return index

class Data(LightningDataModule):
    def __init__(self, loader: str):
        super().__init__()
        self.loader = loader
    def prepare_data(self):
        write_beton(FILE, torch.zeros(SAMPLES, 1, 1, 1, dtype=torch.uint8), torch.arange(SAMPLES))
    def train_dataloader(self):
        if self.loader != "ffcv":
            ahead = self.loader == "workers"
            numbers = Numbers(BATCH_S / 2 * (1 if ahead else SHARE))
            return torch.utils.data.DataLoader(numbers, 2, num_workers=int(ahead))
        order = EpochOrder(SAMPLES, batch_size=2, order="sequential")
        pipelines = {{"label": [IntDecoder(), ToTensor(), Slow()]}}
        device = self.trainer.strategy.root_device
        reader = FfcvReader(
            BetonFile(FILE), pipelines, batch_size=2, device=device, num_workers=1
        )
        self.open = BetonLoader(order, ffcv_batches(reader, order))
        return self.open
    def close(self):
        if self.loader == "ffcv":
            self.open.close()

class Line(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def on_train_batch_start(self, batch, batch_idx):
        self.began = time.monotonic()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        # With all that a step costs anyway, its work takes just what is not to be waited for.
        work_s = BATCH_S * (1 - SHARE)
        time.sleep(max(0.0, self.began + work_s - time.monotonic()))
    def training_step(self, batch):
        values = batch[0] if isinstance(batch, (list, tuple)) else batch
        return self.layer(values.reshape(-1, 1).float() / SAMPLES).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""
PRESET = """
trainer: {accelerator: cpu, devices: 1, max_epochs: 1}
model: {class_path: slow_numbers.Line}
data: {class_path: slow_numbers.Data, init_args: {loader: ffcv}}
"""


def measured(ltui: Ltui, loader: str, steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Throughput of the run, and its rank, once it has trained for so many steps."""
    (ltui.cwd / "slow_numbers.py").write_text(PROJECT)
    (ltui.cwd / "slow.yaml").write_text(PRESET)
    ltui("run", "slow.yaml", "--detach", "--set", f"data.init_args.loader={loader}")

    def trained(shown: dict[str, Any]) -> bool:
        assert shown["state"] in ("queued", "starting", "running"), shown["detail"]
        # A rank that has not moved for ten seconds has no rate.
        known = shown["throughput"]["data_wait_share"] is not None
        return known and shown["ranks"][0]["global_step"] >= steps

    shown = ltui.wait(trained, seconds=240)
    ltui("stop", "last", "--kill")
    ltui.wait_until_alone(60)
    return shown["throughput"], shown["ranks"][0]


@pytest.mark.slow
@needs_ffcv
@pytest.mark.timeout(400)
def test_ffcv_waiting_is_seen(ltui: Ltui) -> None:
    """What holds however busy the machine is: some of the step is waiting for data, not all."""
    throughput, rank = measured(ltui, "ffcv", steps=12)
    assert 0 < throughput["data_wait_share"] < 1
    assert throughput["data_wait_share"] == rank["data_wait_share"]


@pytest.mark.slow
@needs_ffcv
@everything
@pytest.mark.timeout(400)
@pytest.mark.parametrize("loader", ["ffcv", "alone", "workers"])
def test_seven_tenths_are_seven_tenths(ltui: Ltui, loader: str) -> None:
    # After so many steps what is shown is of the last ten seconds, without the first batch.
    throughput, _ = measured(ltui, loader, steps=70)
    assert throughput["data_wait_share"] == pytest.approx(SHARE, abs=0.05)
