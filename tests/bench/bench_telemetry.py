"""What ltui costs a training step on CPU, beside what Lightning's own instruments cost.

Every instrument has a training of its own, in a thread of its own, and these take turns every few
steps: so all of them meet the same load of the machine. A step is measured in CPU time of its
thread, to which waiting for a processor does not add. Reported is the fastest tenth of the steps
(its upper end), because other programs disturb it least, less that of a training with an empty
callback; the difference of the medians stands beside it. A second training with an empty callback
shows how far two equal trainings are apart, which is the error of this measurement.

Net is what a run has of ltui: all its callbacks and hooks, and the position in the data, while the
context managers of Lightning's profiler that does nothing are put out. Raw leaves these in place.

The first trainings log nothing. Others log 20 values in each step: what ltui costs there beyond
what it costs without them, divided by 20, is the cost of a logged value.
"""

from __future__ import annotations

import io
import logging
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers import CSVLogger

from ltui.training.rank.callback_factory import FREEZE_WARNINGS, rebuild_callback
from ltui.training.shared.rank_environment import RankEnvironment
from tests.bench.row import Row, row

BLOCK, SKIPPED, ROUNDS = 40, 8, 60
EMPTY, NET, RAW, AGAIN, CSV, RICH = "empty", "net", "raw", "again", "csv", "rich"
WITHOUT_VALUES = (EMPTY, NET, RAW, AGAIN, RICH)
WITH_VALUES = (EMPTY, NET, CSV)
VALUES = 20
TENTHS = (0, 4)
"""The upper ends of the fastest tenth and of the fastest half."""
BOUND_US, VALUE_BOUND_US = 15.0, 8.0
ROWS = (
    (NET, "ltui, a step beyond an empty callback (net: what a run has of it)", BOUND_US),
    (RAW, "  with Lightning's idle profiling left in place (raw)", None),
    (AGAIN, "  another empty callback: the error of this measurement", None),
    (RICH, "  RichProgressBar, the same", None),
)


class Relay:
    """Whose turn it is: one instrument trains, the others wait."""

    def __init__(self, names: Sequence[str], values: int) -> None:
        self.names, self.values = names, values
        self.times: dict[str, list[int]] = {name: [] for name in names}
        self._changed = threading.Condition()
        self._turn = 0

    @property
    def over(self) -> bool:
        return self._turn >= ROUNDS * len(self.names)

    @property
    def name(self) -> str:
        """The instrument whose turn it is; the order rotates from round to round."""
        block, place = divmod(self._turn, len(self.names))
        return self.names[(place + block) % len(self.names)]

    def wait(self, names: Sequence[str]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.over or self.name in names)

    def done(self, times: list[int]) -> None:
        """End the turn, in which steps took ``times``."""
        with self._changed:
            self.times[self.name] += times
            self._turn += 1
            self._changed.notify_all()


class Model(pl.LightningModule):
    """Times its steps while it is its turn."""

    def __init__(self, relay: Relay, names: Sequence[str]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
        self.relay, self.names = relay, names
        self.times: list[int] = []
        self.began = 0
        self.nothing: Any = None

    @property
    def profiler(self) -> Any:
        """The trainer's profiler. Lightning sets the attribute outside of ``Trainer.__init__``."""
        return self.trainer.profiler  # type: ignore[attr-defined]

    def on_train_start(self) -> None:
        self.nothing = vars(self.profiler).pop("profile", None)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        now = time.thread_time_ns()
        place = batch_idx % BLOCK
        if place > SKIPPED:
            self.times.append(now - self.began)
        elif place == 0:
            self._next_turn()
        self.began = time.thread_time_ns()
        loss: torch.Tensor = self.layer(batch).pow(2).mean()
        for number in range(self.relay.values):
            self.log(f"value {number}", loss)
        return loss

    def _next_turn(self) -> None:
        if self.times:
            self.relay.done(self.times)
        self.times = []
        self.relay.wait(self.names)
        self.trainer.should_stop = self.relay.over
        if NET in self.names:
            vars(self.profiler).pop("profile", None)
            if self.relay.name == NET:
                self.profiler.profile = self.nothing

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def measure() -> list[Row]:
    """Microseconds a step of each instrument, and a logged value of ltui."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        plain = _tenths(_train(Path(folder, "plain"), WITHOUT_VALUES, 0))
        logging_tenths = _tenths(_train(Path(folder, "logging"), WITH_VALUES, VALUES))
    rows = [
        row(f"{what}; medians {_above(plain, name, 4):+.1f}", _above(plain, name, 0), "us", bound)
        for name, what, bound in ROWS
    ]
    rows.insert(3, row("  the whole step with the empty callback", plain[EMPTY][0] / 1e3, "us"))
    for name, what, bound in ((NET, "ltui", VALUE_BOUND_US), (CSV, "  CSVLogger", None)):
        beyond_us = [_above(logging_tenths, name, tenth) for tenth in TENTHS]
        if name in plain:
            without_us = (_above(plain, name, tenth) for tenth in TENTHS)
            beyond_us = [us - own for us, own in zip(beyond_us, without_us, strict=True)]
        fastest_us, median_us = (us / VALUES for us in beyond_us)
        what += f", a logged value, where a step logs {VALUES}; medians {median_us:+.1f}"
        rows.append(row(what, fastest_us, "us", bound))
    return rows


def _tenths(relay: Relay) -> dict[str, list[float]]:
    return {name: statistics.quantiles(times, n=10) for name, times in relay.times.items()}


def _above(tenths: dict[str, list[float]], name: str, tenth: int) -> float:
    """Return the microseconds of a step beyond those with an empty callback."""
    return (tenths[name][tenth] - tenths[EMPTY][tenth]) / 1e3


def _train(folder: Path, names: Sequence[str], values: int) -> Relay:
    folder.mkdir()
    relay = Relay(names, values)
    environment = RankEnvironment(run_dir=folder, run_id="bench", attempt=1)
    rank = rebuild_callback("lightning", environment)
    rich = RichProgressBar(console_kwargs={"file": io.StringIO(), "force_terminal": True})
    watched = Model(relay, [name for name in (NET, RAW) if name in names])
    others = [
        threading.Thread(
            target=_fit,
            args=(Model(relay, (name,)), folder, [rich if name == RICH else pl.Callback()]),
            kwargs={"csv": name == CSV},
        )
        for name in (EMPTY, AGAIN, CSV, RICH)
        if name in names
    ]
    for thread in others:
        thread.start()
    # In the main thread, as in a run: signal handlers are set there alone.
    _fit(watched, folder, [rank, rebuild_callback("lightning", rank, FREEZE_WARNINGS)])
    for thread in others:
        thread.join()
    return relay


def _fit(model: Model, folder: Path, callbacks: list[Any], csv: bool = False) -> None:
    rows: Any = torch.randn(BLOCK * (2 * ROUNDS + 2) * 2, 8)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        callbacks=callbacks,
        logger=CSVLogger(folder) if csv else False,
        log_every_n_steps=1,
        enable_progress_bar=any(isinstance(each, RichProgressBar) for each in callbacks),
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(model, torch.utils.data.DataLoader(rows, batch_size=2))
