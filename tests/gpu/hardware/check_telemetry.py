"""On a machine with a CUDA GPU: what does telemetry cost a step, and does it ever wait?

    python tests/gpu/hardware/check_telemetry.py FILE [--accelerator cuda] [--steps 50]

Writes its figures as JSON into FILE, prints them, exits with 1 if one is off and with 2 where torch
sees no CUDA device. Three looks at the same small training on one GPU:

- host time: in one training an empty callback and telemetry take turns, so that both meet the same
  load; the median step of the one less that of the other, in CPU time of the training thread;
- synchronisations: torch's profiler counts the runtime calls that wait, in a training without
  telemetry and in one with it. A third one, whose callback asks for the loss's value, shows that
  the count would notice;
- torch's own guard: ``set_sync_debug_mode("error")`` while telemetry's hooks run.

``--accelerator cpu`` is a rehearsal. What telemetry may do there and not on a GPU, reading the
loss's value, is then what is counted: so it ends with 1.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import re
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ltui.training.rank.callback_factory import rebuild_callback
from ltui.training.rank.environment import RankEnvironment

BOUND_US = 40.0
BLOCK, SKIPPED = 40, 8
WARM_UP = 20
"""Steps before the counted ones: by then pinned memory is allocated and kernels are loaded."""
OPENS, CLOSES = "check: window opens", "check: window closes"
EMPTY, TELEMETRY, CONTROL = "empty", "telemetry", "control"
HOOKS = ("on_train_batch_end", "on_train_epoch_end")
WAITS = re.compile(
    r"cu(da)?(Stream|Device|Event|Ctx)Synchronize"
    # A copy to pageable memory waits whatever its call is named; the device side tells which.
    r"|cudaMemcpy(?!.*Async)|Memcpy DtoH \(Device -> Pageable\)"
)
READS = re.compile(r"aten::_local_scalar_dense$")


# -- counting --------------------------------------------------------------------------------------


def calls_in_window(events: Iterable[Any], wanted: re.Pattern[str]) -> dict[str, int]:
    """How often each wanted call began between the marks ``OPENS`` and ``CLOSES``.

    The profiler waits for the device itself when it starts and stops; that lies outside them.
    """
    events = list(events)
    # On a GPU a mark may also be listed as the device saw it; the first of its name is the host's.
    opened = [event.time_range.end for event in events if event.name == OPENS]
    closed = [event.time_range.start for event in events if event.name == CLOSES]
    if not opened or not closed:
        raise ValueError("the profile lacks the marks of the window")
    begin, end = min(opened), min(closed)
    inside = (event for event in events if begin <= event.time_range.start <= end)
    return dict(Counter(event.name for event in inside if wanted.match(event.name)))


def a_step(calls: dict[str, int], steps: int) -> dict[str, float]:
    return {name: count / steps for name, count in sorted(calls.items())}


# -- the training ----------------------------------------------------------------------------------


class _Model(pl.LightningModule):
    """A step of a few kernels: the host, not the GPU, decides how long it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
        )

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layers(batch).pow(2).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class _Turns(_Model):
    """Times its steps, and hands the turn from one callback to the other."""

    def __init__(self) -> None:
        super().__init__()
        self.times: dict[str, list[int]] = {EMPTY: [], TELEMETRY: []}
        self.turn = EMPTY
        self.began = 0

    def on_train_start(self) -> None:
        trainer: Any = self.trainer
        self.callbacks = dict(zip((EMPTY, TELEMETRY), trainer.callbacks, strict=True))
        loop = trainer.fit_loop.epoch_loop
        plain = type(loop)._on_before_fetch.__get__(loop), type(loop)._on_after_fetch.__get__(loop)
        watched = loop._on_before_fetch, loop._on_after_fetch
        self.fetch_hooks = {EMPTY: plain, TELEMETRY: watched}
        strategy, connector = self.trainer.strategy, self.trainer._logger_connector
        self.marks = [
            (owner, name, vars(owner)[name])
            for owner, name in (
                (strategy, "backward"),
                (strategy.precision_plugin, "_after_closure"),
                (connector, "on_batch_start"),
                (connector, "on_batch_end"),
            )
        ]

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        now = time.thread_time_ns()
        block, place = divmod(batch_idx, BLOCK)
        if place > SKIPPED:
            self.times[self.turn].append(now - self.began)
        if place == 0:
            self.hand_over((EMPTY, TELEMETRY)[block % 2])
        self.began = time.thread_time_ns()
        return super().training_step(batch, batch_idx)

    def hand_over(self, name: str) -> None:
        self.turn = name
        trainer: Any = self.trainer
        trainer.callbacks[:] = [self.callbacks[name]]
        fetcher = trainer.fit_loop._data_fetcher
        fetcher._start_profiler, fetcher._stop_profiler = self.fetch_hooks[name]
        for owner, method, marked in self.marks:
            vars(owner).pop(method, None)
            if name == TELEMETRY:
                setattr(owner, method, marked)


class _Counted(_Model):
    """Profiles ``steps`` whole steps, from within one training step to within a later one."""

    def __init__(self, steps: int, activities: list[ProfilerActivity], look: Callable[[], None]):
        super().__init__()
        self.steps = steps
        self.look = look
        self.profile = profile(activities=activities)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.look()
        if batch_idx == WARM_UP:
            self.profile.start()
            with record_function(OPENS):
                pass
        if batch_idx == WARM_UP + self.steps:
            with record_function(CLOSES):
                pass
            self.profile.stop()
        return super().training_step(batch, batch_idx)


class _Guarded(_Model):
    """Has torch refuse every wait while telemetry's hooks run."""

    def __init__(self, rank: Any, look: Callable[[], None]) -> None:
        super().__init__()
        self.rank, self.look = rank, look
        self.calls: Counter[str] = Counter()

    def on_train_start(self) -> None:
        for name in HOOKS:
            setattr(self.rank, name, self.guard(name, getattr(self.rank, name)))

    def guard(self, name: str, hook: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(hook)
        def guarded(*args: Any) -> None:
            # Not before the first steps: allocating pinned memory is no matter of every step.
            strict = self.device.type == "cuda" and self.global_step >= WARM_UP
            if strict:
                torch.cuda.set_sync_debug_mode("error")
            try:
                hook(*args)
            finally:
                if strict:
                    torch.cuda.set_sync_debug_mode("default")
            self.calls[name] += 1

        return guarded

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.look()
        return super().training_step(batch, batch_idx)


class _AsksForTheLoss(pl.Callback):
    """What a careless callback does: the host waits for the GPU, every step."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        outputs["loss"].item()


class _Rank:
    """ltui's callback, with what it would swallow."""

    def __init__(self, folder: Path) -> None:
        environment = RankEnvironment(run_dir=folder, run_id="check", attempt=1)
        self.callback: Any = rebuild_callback("lightning", environment)
        self.errors: list[str] = []
        for name in ("telemetry_failed", "coordinator_failed"):
            setattr(self.callback, name, self._remember(getattr(self.callback, name)))

    def _remember(self, failed: Callable[[BaseException], None]) -> Callable[..., None]:
        def remember(error: BaseException) -> None:
            self.errors.append(f"{type(error).__name__}: {error}")
            failed(error)

        return remember

    def look(self) -> None:
        """Have telemetry look at metrics and memory in this batch too, not some times a second."""
        telemetry = self.callback.telemetry
        if telemetry is not None:
            telemetry._periodic_due = telemetry._memory_due = 0


def _train(model: pl.LightningModule, callbacks: list[Any], steps: int, accelerator: str) -> None:
    rows: Any = torch.randn(steps * 8, 64)
    trainer = pl.Trainer(
        accelerator=accelerator,
        devices=1,
        max_epochs=1,
        callbacks=callbacks,
        logger=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, torch.utils.data.DataLoader(rows, batch_size=8))


# -- the three looks -------------------------------------------------------------------------------


def host_time(folder: Path, accelerator: str, rounds: int) -> dict[str, Any]:
    rank, model = _Rank(folder), _Turns()
    _train(model, [pl.Callback(), rank.callback], BLOCK * 2 * rounds + 1, accelerator)
    median = {name: statistics.median(times) / 1e3 for name, times in model.times.items()}
    mean = {name: statistics.fmean(times) / 1e3 for name, times in model.times.items()}
    return {
        "median_step_us": median,
        "mean_step_us": mean,
        "telemetry_us": median[TELEMETRY] - median[EMPTY],
        "telemetry_mean_us": mean[TELEMETRY] - mean[EMPTY],
        "steps": {name: len(times) for name, times in model.times.items()},
        "errors": rank.errors,
    }


def synchronisations(folder: Path, accelerator: str, steps: int) -> dict[str, Any]:
    """Calls a step that wait, by instrument."""
    rank = _Rank(folder)
    activities, wanted = [ProfilerActivity.CPU], READS
    if accelerator == "cuda":
        activities, wanted = [*activities, ProfilerActivity.CUDA], WAITS
    found: dict[str, Any] = {}
    for name, callback in (
        (EMPTY, pl.Callback()),
        (TELEMETRY, rank.callback),
        (CONTROL, _AsksForTheLoss()),
    ):
        look = rank.look if name == TELEMETRY else _do_nothing
        model = _Counted(steps, activities, look)
        _train(model, [callback], WARM_UP + steps + 1, accelerator)
        found[name] = a_step(calls_in_window(model.profile.events(), wanted), steps)
    return {"steps": steps, "calls_a_step": found, "errors": rank.errors}


def guarded_hooks(folder: Path, accelerator: str, steps: int) -> dict[str, Any]:
    rank = _Rank(folder)
    model = _Guarded(rank.callback, rank.look)
    _train(model, [rank.callback], WARM_UP + steps, accelerator)
    return {"calls": dict(model.calls), "errors": rank.errors}


def _guard_works(accelerator: str) -> bool | None:
    """Whether torch's guard notices a wait at all; None where there is no such guard."""
    if accelerator != "cuda":
        return None
    value = torch.ones(1, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        value.item()
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def _do_nothing() -> None:
    """Without telemetry there is nothing to have look."""


# -- the report ------------------------------------------------------------------------------------


def measure(accelerator: str, steps: int, rounds: int) -> dict[str, Any]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        places = [Path(folder, name) for name in ("time", "count", "guard")]
        for place in places:
            place.mkdir()
        figures: dict[str, Any] = {
            "device": torch.cuda.get_device_name() if accelerator == "cuda" else accelerator,
            "torch": torch.__version__,
            "lightning": version("lightning"),
            "host_time": host_time(places[0], accelerator, rounds),
            "synchronisations": synchronisations(places[1], accelerator, steps),
            "guard": guarded_hooks(places[2], accelerator, steps),
        }
    figures["guard"]["notices_a_wait"] = _guard_works(accelerator)
    return figures


def judge(figures: dict[str, Any]) -> dict[str, bool]:
    counted, guard = figures["synchronisations"], figures["guard"]
    calls = counted["calls_a_step"]
    return {
        f"host time of a step < {BOUND_US:g} us": figures["host_time"]["telemetry_us"] < BOUND_US,
        "no call that waits is added": calls[TELEMETRY] == calls[EMPTY],
        "the count notices one that is": sum(calls[CONTROL].values())
        >= sum(calls[EMPTY].values()) + 1,
        "torch's guard notices a wait": guard["notices_a_wait"] is not False,
        "telemetry and coordinator stayed on": not any(
            part["errors"] for part in (figures["host_time"], counted, guard)
        ),
        "every hook ran guarded": all(guard["calls"].get(name) for name in HOOKS),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="the figures are written here, as JSON")
    parser.add_argument("--accelerator", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=50, help="steps that are counted")
    parser.add_argument("--rounds", type=int, default=30, help="turns of each callback")
    options = parser.parse_args()
    if options.accelerator == "cuda" and not torch.cuda.is_available():
        print("torch sees no CUDA device", file=sys.stderr)
        return 2
    figures = measure(options.accelerator, options.steps, options.rounds)
    figures["checks"] = judge(figures)
    text = json.dumps(figures, indent=1)
    options.file.write_text(text)
    print(text)
    return int(not all(figures["checks"].values()))


if __name__ == "__main__":
    sys.exit(main())
