"""Model FLOP utilisation: the counted operations, the peak, and the figure that ltui shows.

A GPT trains under ltui with ``LTUI_COUNT_FLOPS=1``. The operations that ltui counts must be those
that follow from the shapes of the model, once in each attempt. The utilisation that it shows must
be that of the script's own time of a step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ltui.training.gpu.flop_utilisation import TERA, peak_flops
from ltui.training.lifecycle.run_status import resolve_snapshot
from ltui.training.models.gpt import BYTES
from ltui.training.state.run_snapshot import LIVE, RunSnapshot, RunState
from ltui.training.store.history_reader import RunStore, StoredEvent
from ltui.training.store.run_directory import RunDir
from tests.gpu.hardware.check import Check, Conditions, holds
from tests.gpu.hardware.detached_run import DetachedRun
from tests.gpu.hardware.timed_training import (
    GPT_MODEL,
    PRECISION,
    Plan,
    Timing,
    gpt_shape,
    read_timing,
)
from tests.ltui_command import run_ltui
from tests.run_module import ROOT
from tests.system.conftest import Ltui

NAME = "flops"
UTILISATION_BOUND, RATE_BOUND = 0.02, 0.01
"""Largest relative difference between a figure of ltui and the script's."""
AFTER_STOP = 10
"""Steps of the resumed attempt."""
POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class GptFlops:
    """Floating point operations of one batch of a GPT, forward and backward."""

    products: int
    """Of the products with weights: one forward, and one each for the gradients of its factors."""
    attention_product: int
    """Of one product of attention, between all queries and all keys."""
    layers: int

    @property
    def fused(self) -> int:
        """As torch counts it: fused attention computes the scores again in its backward pass."""
        return self.products + self.layers * (2 + 5) * self.attention_product

    @property
    def separate(self) -> int:
        """If attention is computed by separate products, and in the formula of PaLM."""
        return self.products + self.layers * (2 + 4) * self.attention_product


def gpt_flops(*, width: int, layers: int, context: int, batch: int) -> GptFlops:
    """Return the operations that follow from the shapes; a product of m x k and k x n has 2mkn."""
    tokens = batch * context
    weights = layers * (3 + 1 + 4 + 4) * width**2 + width * BYTES
    return GptFlops(6 * weights * tokens, 2 * tokens * context * width, layers)


def checks(conditions: Conditions) -> Iterator[Check]:
    """Compare the peak with products alone, then what a training counted and showed; resume it."""
    device, rate = _products(conditions)
    peak = peak_flops(device, PRECISION)
    yield Check(
        f"peak of {device} in the table, TFLOP/s in bf16",
        None if peak is None else peak / TERA,
        "an entry",
        None if conditions.rehearsal else peak is not None,
    )
    yield Check("TFLOP/s of large bf16 matrix products", None if rate is None else rate / TERA)
    yield from _trained(conditions, peak)


def _trained(conditions: Conditions, peak: float | None) -> Iterator[Check]:
    small = conditions.rehearsal
    plan = Plan(
        model=GPT_MODEL,
        accelerator=conditions.accelerator,
        small=small,
        warm_up=5 if small else 30,
        # Longer than the 10 s that a rate of ltui covers, so that this is steady at the end.
        steps=200 if small else 250,
        further=2 + AFTER_STOP,
    )
    result = conditions.folder / "training.json"
    result.unlink(missing_ok=True)
    run, snapshots = _train_until_stop(conditions, plan, result)
    timing = read_timing(result)
    if timing is None:
        yield holds("the training reached its last measured step", False)
        return
    shape = gpt_shape(small=small)
    formula = gpt_flops(
        width=shape["width"],
        layers=shape["layers"],
        context=shape["context"],
        batch=timing.batch,
    )
    yield Check("million parameters, samples in a batch", [timing.parameters / 1e6, timing.batch])
    events = _flops_events(run)
    yield from counted(events, formula, attempts=1)
    last = last_before(snapshots, plan.warm_up + plan.steps)
    separate = bool(events) and events[0].data["flops"] == formula.separate
    flops = formula.separate if separate else formula.fused
    yield shown_utilisation(last, flops, timing, peak)
    yield shown_rate(last, timing, rehearsal=small)
    yield Check("TFLOP/s of the training, by the script", flops / timing.step_s / TERA)
    run_ltui(
        *("resume", NAME), environment=_environment(), timeout=max(1.0, conditions.seconds_left())
    )
    resumed = resolve_snapshot(run)
    yield holds(
        "the resumed attempt ended",
        (resumed.attempt, resumed.state) == (2, RunState.FINISHED),
        f"attempt {resumed.attempt}: {resumed.state.value}",
    )
    yield from counted(_flops_events(run), formula, attempts=2)


def counted(events: Sequence[StoredEvent], formula: GptFlops, *, attempts: int) -> Iterator[Check]:
    """Yield the checks of what ltui counted until the end of an attempt."""
    after = f"after attempt {attempts}"
    places = [event.attempt for event in events]
    yield holds(
        f"{after}: counted once in each attempt", places == list(range(1, attempts + 1)), places
    )
    if not events:
        return
    flops = events[-1].data["flops"]
    yield Check(
        f"{after}: operations of a batch by ltui",
        f"{flops:.0f}",
        f"{formula.fused}, or {formula.separate} without fused attention",
        flops in (formula.fused, formula.separate),
    )
    if attempts == 1:
        yield Check("operations of a batch by ltui / PaLM's formula", flops / formula.separate)


def last_before(snapshots: Sequence[RunSnapshot], step: int) -> RunSnapshot | None:
    """Return the last snapshot of the measured steps."""
    measured = [s for s in snapshots if s.state in LIVE and (s.global_step or step + 1) <= step]
    return measured[-1] if measured else None


def shown_utilisation(
    shown: RunSnapshot | None, flops: int, timing: Timing, peak: float | None
) -> Check:
    """Compare the utilisation that ltui showed with that of the script's time of a step."""
    value = None if shown is None else shown.model_flop_utilisation
    what = "model FLOP utilisation that ltui showed"
    if peak is None:
        return Check(what, value, "n/a without a peak", shown is not None and value is None)
    own = flops / timing.step_s / peak
    agrees = value is not None and 0 < value <= 1 and abs(value / own - 1) <= UTILISATION_BOUND
    return Check(what, value, f"{own:.4f} by the script, to {UTILISATION_BOUND:.0%}", agrees)


def shown_rate(shown: RunSnapshot | None, timing: Timing, *, rehearsal: bool) -> Check:
    """Compare the steps per second that ltui showed with the script's."""
    value = None if shown is None else shown.throughput.steps_per_s
    own = 1 / timing.step_s
    agrees = value is not None and abs(value / own - 1) <= RATE_BOUND
    return Check(
        "steps/s that ltui showed",
        value,
        f"{own:.4f} by the script, to {RATE_BOUND:.0%}",
        None if rehearsal else agrees,
    )


def _environment() -> dict[str, str]:
    return {**os.environ, "LTUI_COUNT_FLOPS": "1"}


def _train_until_stop(
    conditions: Conditions, plan: Plan, result: Path
) -> tuple[RunDir, list[RunSnapshot]]:
    """Train until two steps after the measured ones; return the snapshots of that time."""
    ltui = Ltui(conditions.home, ROOT)
    ltui.environment = _environment()
    run = DetachedRun(ltui, "exec", NAME, "--", *plan.command(result))
    ltui("stop", NAME, "--at-step", str(plan.warm_up + plan.steps + 2))
    return run.run_dir, run.watch(conditions.seconds_left(), POLL_S)


def _flops_events(run: RunDir) -> list[StoredEvent]:
    with RunStore(run) as store:
        return [event for event in store.events() if event.kind == "flops"]


def _products(conditions: Conditions) -> tuple[str | None, float | None]:
    """Return the name of the device and its rate in large products; None if they fail."""
    result = conditions.folder / "matmul.json"
    result.unlink(missing_ok=True)
    program = [sys.executable, "-m", "tests.gpu.hardware.matmul_rate"]
    subprocess.run([*program, conditions.accelerator, str(result)], cwd=ROOT, check=False)
    if not result.exists():
        return None, None
    name, rate = json.loads(result.read_text())
    return name, rate
