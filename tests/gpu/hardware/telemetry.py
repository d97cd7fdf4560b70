"""Section ``telemetry``: what telemetry costs a step, whether it ever waits, and its values.

Three measurements of the same small training on one GPU:

- host time: in one training an empty callback and telemetry take turns, so that both meet the same
  load; the median step of the one less that of the other, in CPU time of the training thread;
- synchronisations: torch's profiler counts the runtime calls that wait, in a training without
  telemetry and in one with it. A third one, whose callback asks for the loss's value, shows that
  the count would notice. The trace of the one with telemetry is kept;
- torch's own guard: ``set_sync_debug_mode("error")`` while telemetry's hooks run.

Then the values of CUDA tensors in the queue (``queued_values.py``).

In the rehearsal on the CPU, telemetry reads the loss and the one value that is logged in each step,
which it may do there. The count must find exactly that.
"""

from __future__ import annotations

import functools
import logging
import re
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ltui.training.rank.callback_factory import rebuild_callback
from ltui.training.shared.rank_environment import RankEnvironment
from tests.gpu.hardware.check import Check, Conditions, holds
from tests.gpu.hardware.queued_values import check_values

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
ALLOCATES = re.compile(r"cudaHostAlloc|cudaHostRegister|cudaMalloc|cudaFree")
READ = "aten::_local_scalar_dense"
READS = re.compile(READ + "$")
TRACE = "telemetry-trace.json.gz"


# -- counting --------------------------------------------------------------------------------------


def calls_in_window(events: Iterable[Any], wanted: re.Pattern[str]) -> dict[str, int]:
    """Return how often each wanted call began between the marks ``OPENS`` and ``CLOSES``.

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


def calls_per_step(calls: dict[str, int], steps: int) -> dict[str, float]:
    """Return how often each call is made in a step."""
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

    def __init__(self, steps: int, activities: list[ProfilerActivity], hurry: Callable[[], None]):
        super().__init__()
        self.steps = steps
        self.hurry = hurry
        self.profile = profile(activities=activities)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.hurry()
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

    def __init__(self, rank: Any, hurry: Callable[[], None]) -> None:
        super().__init__()
        self.rank, self.hurry = rank, hurry
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
        self.hurry()
        return super().training_step(batch, batch_idx)


class _AsksForTheLoss(pl.Callback):
    """A careless callback: the host waits for the GPU, every step."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        outputs["loss"].item()


class _Rank:
    """The callback of ltui, and the errors that it would report instead of raising."""

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

    def hurry(self) -> None:
        """Have telemetry read metrics and memory in this batch too, not some times a second."""
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


# -- the measurements ------------------------------------------------------------------------------


def host_time(folder: Path, accelerator: str, rounds: int) -> dict[str, Any]:
    """Train with an empty callback and telemetry in turns, and return what each step took."""
    rank, model = _Rank(folder), _Turns()
    _train(model, [pl.Callback(), rank.callback], BLOCK * 2 * rounds + 1, accelerator)
    median = {name: statistics.median(times) / 1e3 for name, times in model.times.items()}
    fast = {name: statistics.quantiles(times, n=10)[0] / 1e3 for name, times in model.times.items()}
    return {
        "median_step_us": median,
        "telemetry_us": median[TELEMETRY] - median[EMPTY],
        "telemetry_fast_us": fast[TELEMETRY] - fast[EMPTY],
        "steps": len(model.times[TELEMETRY]),
        "errors": rank.errors,
    }


def synchronisations(
    folder: Path, accelerator: str, steps: int, trace: Path | None = None
) -> dict[str, Any]:
    """Count the calls a step that wait, and those that allocate, by callback."""
    rank = _Rank(folder)
    activities, waits = [ProfilerActivity.CPU], READS
    if accelerator == "cuda":
        activities, waits = [*activities, ProfilerActivity.CUDA], WAITS
    found: dict[str, Any] = {"calls_a_step": {}, "allocations_a_step": {}}
    for name, callback in (
        (EMPTY, pl.Callback()),
        (TELEMETRY, rank.callback),
        (CONTROL, _AsksForTheLoss()),
    ):
        hurry = rank.hurry if name == TELEMETRY else _do_nothing
        model = _Counted(steps, activities, hurry)
        _train(model, [callback], WARM_UP + steps + 1, accelerator)
        events = model.profile.events()
        for kind, wanted in (("calls_a_step", waits), ("allocations_a_step", ALLOCATES)):
            found[kind][name] = calls_per_step(calls_in_window(events, wanted), steps)
        if name == TELEMETRY and trace is not None:
            model.profile.export_chrome_trace(str(trace))
    return {**found, "errors": rank.errors}


def guarded_hooks(folder: Path, accelerator: str, steps: int) -> dict[str, Any]:
    """Train while torch refuses every wait in telemetry's hooks."""
    rank = _Rank(folder)
    model = _Guarded(rank.callback, rank.hurry)
    _train(model, [rank.callback], WARM_UP + steps, accelerator)
    return {
        "calls": dict(model.calls),
        "errors": rank.errors,
        "notices_a_wait": _guard_works(accelerator),
    }


def _guard_works(accelerator: str) -> bool | None:
    """Return whether torch's guard notices a wait at all; None where there is no such guard."""
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
    """Without telemetry there is nothing to hurry."""


# -- the checks ------------------------------------------------------------------------------------


def checks(conditions: Conditions) -> Iterator[Check]:
    """Make the three measurements, then send values through the queue."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    accelerator, folder = conditions.accelerator, conditions.folder
    rounds, steps = (1, 6) if conditions.rehearsal else (30, 50)
    runs = {name: conditions.home / name for name in ("time", "count", "guard")}
    for run in runs.values():
        run.mkdir()
    yield from judge_host_time(
        host_time(runs["time"], accelerator, rounds), rehearsal=conditions.rehearsal
    )
    added = {READ: 2.0} if conditions.rehearsal else {}
    counted = synchronisations(runs["count"], accelerator, steps, folder / TRACE)
    yield from judge_synchronisations(counted, added)
    yield from judge_guard(guarded_hooks(runs["guard"], accelerator, steps))
    yield from check_values(folder, torch.device(accelerator, 0))


def judge_host_time(figures: dict[str, Any], *, rehearsal: bool) -> Iterator[Check]:
    """Judge the difference of the medians."""
    cost = figures["telemetry_us"]
    ok = None if rehearsal else cost <= BOUND_US
    yield Check("telemetry: host time of a step, us", cost, f"<= {BOUND_US:g}", ok)
    # As `make bench` measures it, because other programs disturb these steps least.
    yield Check("telemetry: the same, of the fastest tenth, us", figures["telemetry_fast_us"])
    yield Check("telemetry: steps that were timed", figures["steps"])
    yield Check("step without telemetry, us", figures["median_step_us"][EMPTY])
    yield _stayed_on("host time", figures)


def judge_synchronisations(figures: dict[str, Any], added: dict[str, float]) -> Iterator[Check]:
    """Judge the counts. ``added``: calls a step that telemetry may add."""
    calls = figures["calls_a_step"]
    wanted = {name: calls[EMPTY].get(name, 0.0) + added.get(name, 0.0) for name in added}
    wanted = {**calls[EMPTY], **wanted}
    measured, expected = (str(counts or "none") for counts in (calls[TELEMETRY], wanted))
    what = "telemetry: calls a step that wait"
    yield Check(what, measured, expected, calls[TELEMETRY] == wanted)
    notices = sum(calls[CONTROL].values()) >= sum(calls[EMPTY].values()) + 1
    yield holds("the count notices one that is added", notices, str(calls[CONTROL]))
    allocations = figures["allocations_a_step"]
    yield Check(
        "telemetry: allocations a step",
        str(allocations[TELEMETRY] or "none"),
        f"{allocations[EMPTY] or 'none'} without it",
    )
    yield _stayed_on("profile", figures)


def judge_guard(figures: dict[str, Any]) -> Iterator[Check]:
    """Judge the training whose hooks were not allowed to wait."""
    notices = figures["notices_a_wait"]
    yield Check("torch's guard notices a wait", notices, "yes", notices)
    missing = [name for name in HOOKS if not figures["calls"].get(name)]
    yield Check("hooks that did not run under the guard", missing, "none", not missing)
    yield _stayed_on("guard", figures)


def _stayed_on(part: str, figures: dict[str, Any]) -> Check:
    errors = list(dict.fromkeys(figures["errors"]))
    return Check(f"errors of telemetry and coordinator, {part}", errors, "none", not errors)
