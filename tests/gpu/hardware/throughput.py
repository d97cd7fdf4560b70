"""Training steps with ltui and without it: does telemetry cost throughput on a GPU?

A GPT and ResNet-50 in bf16 train by the same script (``timed_training.py``), alone and under
``ltui exec``, each time in a new process, as a user starts it. The two take turns in the order
ABBA, so that a drift of the clocks or of the temperature meets both. The median of the ratios of
the pairs is judged. How much successive runs without ltui differ shows what can be resolved.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ltui.training.store.find_run import find_run
from ltui.training.store.history_reader import RunStore
from tests.gpu.hardware.check import Check, Conditions, holds
from tests.gpu.hardware.timed_training import GPT_MODEL, RESNET, Plan, Timing, read_timing
from tests.ltui_command import LTUI
from tests.run_module import ROOT

BOUND = 0.005
"""Largest relative difference of throughput."""
OWN_RATE_BOUND = 0.01
"""Largest relative difference between ltui's rate of the measured steps and the script's."""
PAIRS = 5
MEASURED_S, LEAST_MEASURED_S = 10.0, 3.0
"""Seconds of measured steps in a run if the time suffices, and the fewest."""
WARM_UP_S = 2.0
FEWEST_STEPS = 10
"""Fewest steps before the measured ones, and fewest measured steps."""
REHEARSED_STEPS = {GPT_MODEL: 40, RESNET: 4}
SPARE_S = 15.0
"""Seconds of the section that are left unused."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One run without ltui and one with it."""

    without: float
    """Samples per second."""
    with_ltui: float
    rate_error: float | None
    """Rate of the steps in ltui's history over the script's, less 1; None if it is not there."""

    @property
    def ratio(self) -> float:
        return self.with_ltui / self.without


def checks(conditions: Conditions) -> Iterator[Check]:
    """Compare both models; the second one has the time that the first one left."""
    for model, share in ((GPT_MODEL, 0.5), (RESNET, 1.0)):
        seconds = (conditions.seconds_left() - SPARE_S) * share
        yield from _compare(conditions, model, time.monotonic() + seconds)


def _compare(conditions: Conditions, model: str, deadline: float) -> Iterator[Check]:
    """Run the pairs of one model and yield each as soon as it is known."""
    steps, pairs = (2, 1) if conditions.rehearsal else (FEWEST_STEPS, PAIRS)
    plan = Plan(
        model=model,
        accelerator=conditions.accelerator,
        small=conditions.rehearsal,
        warm_up=steps,
        steps=steps,
    )
    began = time.monotonic()
    # Not measured: it loads the files of torch from the disk, and says how long a step takes.
    first = _run(conditions, plan, f"{model}-first", with_ltui=True)
    if first is None:
        yield holds(f"{model}: the first run reached its last step", False)
        return
    yield Check(
        f"{model}: device, million parameters, samples in a batch, GB that torch allocated",
        [
            first.device,
            first.parameters / 1e6,
            first.batch,
            None if first.peak_bytes is None else first.peak_bytes / 1e9,
        ],
    )
    now = time.monotonic()
    start_s = now - began - first.step_s * 2 * steps
    plan = replace(plan, batch=first.batch, steps=REHEARSED_STEPS[model])
    if not conditions.rehearsal:
        plan = lengthened(plan, first.step_s, (deadline - now) / (2 * pairs) - start_s)
    pair_s = 2 * (start_s + first.step_s * (plan.warm_up + plan.steps))
    found: list[Pair] = []
    for number in range(1, pairs + 1):
        if time.monotonic() + pair_s > deadline + SPARE_S:
            break
        pair = _run_pair(conditions, plan, number)
        if pair is None:
            yield holds(f"{model}: both runs of pair {number} reached their last step", False)
            continue
        found.append(pair)
        yield Check(
            f"{model}, pair {number}: samples/s without ltui, with ltui, ratio",
            [pair.without, pair.with_ltui, round(pair.ratio, 5)],
        )
    yield Check(f"{model}: alternating pairs", len(found), f">= {pairs}", len(found) >= pairs)
    if found:
        yield Check(f"{model}: measured steps in a run", plan.steps)
        yield from judged(model, found, rehearsal=conditions.rehearsal)


def lengthened(plan: Plan, step_s: float, run_s: float) -> Plan:
    """Return the plan with as many steps as fit into ``run_s`` seconds, within the limits."""
    measured_s = min(MEASURED_S, max(LEAST_MEASURED_S, run_s - WARM_UP_S))
    return replace(
        plan,
        warm_up=max(FEWEST_STEPS, math.ceil(WARM_UP_S / step_s)),
        steps=max(FEWEST_STEPS, math.ceil(measured_s / step_s)),
    )


def judged(model: str, pairs: Sequence[Pair], *, rehearsal: bool) -> Iterator[Check]:
    """Yield the checks of one model. The time of the few steps of a rehearsal is not judged."""
    without, with_ltui = [p.without for p in pairs], [p.with_ltui for p in pairs]
    yield Check(f"{model}: samples/s without ltui, median, least, most", _spread(without))
    yield Check(f"{model}: samples/s with ltui, median, least, most", _spread(with_ltui))
    ratios = [pair.ratio for pair in pairs]
    median = statistics.median(ratios)
    yield Check(
        f"{model}: throughput with ltui / without, median of the pairs",
        f"{median:.4f}",
        f"{1 - BOUND} to {1 + BOUND}",
        None if rehearsal else abs(median - 1) <= BOUND,
    )
    yield Check(f"{model}: this ratio in the pairs, least to most", _range(ratios))
    noise = [after / before for before, after in itertools.pairwise(without)]
    if noise:
        yield Check(
            f"{model}: noise: a run without ltui / the one before it, least to most", _range(noise)
        )
    errors = [pair.rate_error for pair in pairs if pair.rate_error is not None]
    largest = max(errors, key=abs, default=None)
    yield Check(
        f"{model}: rate of these steps in ltui's history / the script's, least like 1",
        None if largest is None else f"{1 + largest:.4f}",
        f"{1 - OWN_RATE_BOUND} to {1 + OWN_RATE_BOUND}",
        len(errors) == len(pairs) and all(abs(error) <= OWN_RATE_BOUND for error in errors),
    )


def _spread(values: Sequence[float]) -> list[float]:
    return [statistics.median(values), min(values), max(values)]


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.4f} to {max(values):.4f}"


def _run_pair(conditions: Conditions, plan: Plan, number: int) -> Pair | None:
    """Return a pair. Every second one begins with ltui, so that the order of all runs is ABBA."""
    timings: dict[bool, Timing | None] = {}
    for with_ltui in (False, True) if number % 2 else (True, False):
        name = f"{plan.model}-{number}-{'ltui' if with_ltui else 'bare'}"
        timings[with_ltui] = _run(conditions, plan, name, with_ltui=with_ltui)
    bare, watched = timings[False], timings[True]
    if bare is None or watched is None:
        return None
    own_step_s = stored_step_s(conditions.home, plan, f"{plan.model}-{number}-ltui")
    return Pair(
        without=bare.samples_per_s,
        with_ltui=watched.samples_per_s,
        rate_error=None if own_step_s is None else watched.step_s / own_step_s - 1,
    )


def _run(conditions: Conditions, plan: Plan, name: str, *, with_ltui: bool) -> Timing | None:
    """Train once; output goes to ``NAME.log``. Return None if the steps were not measured."""
    result = conditions.folder / f"{name}.json"
    result.unlink(missing_ok=True)
    command, environment = plan.command(result), dict(os.environ)
    if with_ltui:
        command = [*LTUI, "exec", "--plain", "--name", name, "--", *command]
    else:
        environment = {k: v for k, v in environment.items() if not k.startswith("LTUI_")}
    with (conditions.folder / f"{name}.log").open("wb") as log:
        subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )
    return read_timing(result)


def stored_step_s(home: Path, plan: Plan, name: str) -> float | None:
    """Return the mean duration of the measured steps in ltui's history; None if one is missing."""
    first = plan.warm_up + 1
    with RunStore(find_run(home, name)) as store:
        curve = store.curve(
            "step/seconds",
            first_step=first,
            last_step=first + plan.steps - 1,
            max_points=2 * plan.steps,
        )
    return float(curve.mean.mean()) if len(curve) == plan.steps else None
