"""Healthy but unusual runs, for which no verdict may ever be reported.

Together they train for more than ten minutes. Every snapshot is checked, and the run's events at
the end, so that a verdict that was active only briefly counts too.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field

from ltui.training.state.run_snapshot import LIVE
from ltui.training.store.history_reader import RunStore
from tests.faults.fault import Fault
from tests.faults.run import POLL_S, FaultRun, started_run

Disturbance = Callable[[FaultRun], None]


@dataclass(frozen=True, slots=True)
class HealthyRun:
    """A healthy run of the catalogue."""

    id: str
    title: str
    seconds: float
    """Seconds for which it is watched, unless it ends before."""
    _: KW_ONLY
    env: Mapping[str, str] = field(default_factory=dict)
    inject: str = "none"
    ranks: int = 2
    disturb: Disturbance | None = None
    """Function that disturbs the run once it trains."""
    ends: bool = False
    """True if it must end by itself."""
    first_step: int = 1

    def as_fault(self) -> Fault:
        return Fault(
            id=self.id, title=self.title, expected=(), inject=self.inject, ranks=self.ranks,
            env={"ZOO_BATCHES": "100000", **self.env},
        )  # fmt: skip


@dataclass(slots=True)
class HealthyResult:
    """The result of watching a healthy run."""

    quiet: HealthyRun
    watched_s: float = 0.0
    verdicts: list[str] = field(default_factory=list)
    error: str | None = None


def watch_healthy_run(quiet: HealthyRun) -> HealthyResult:
    """Watch a healthy run and record every verdict."""
    result = HealthyResult(quiet)
    try:
        with started_run(quiet.as_fault()) as run:
            _watch(quiet, run, result)
    except AssertionError as error:
        result.error = str(error)[:2000]
    return result


def _watch(quiet: HealthyRun, run: FaultRun, result: HealthyResult) -> None:
    run.until(lambda s: s.state not in LIVE or s.ranks)
    begun = time.monotonic()
    disturbed = None
    while time.monotonic() < begun + quiet.seconds:
        seen = run.snapshot()
        if seen is not None:
            _record(result, [f"{v.level} {v.kind} {v.culprits}: {v.cause}" for v in seen.verdicts])
            if seen.state not in LIVE:
                if seen.state.value not in ("finished", "stopped"):
                    result.error = f"it ended as {seen.state.value}: {seen.detail}\n{run.log()}"
                break
            trains = (seen.global_step or 0) >= quiet.first_step
            if quiet.disturb is not None and trains and not disturbed:
                disturbed = True
                quiet.disturb(run)
        time.sleep(POLL_S)
    else:
        if quiet.ends:
            result.error = f"it did not come to its end\n{run.log()}"
    result.watched_s = time.monotonic() - begun
    with RunStore(run.run_dir) as store:
        texts = [e.text for e in store.events() if e.kind.startswith("verdict")]
    _record(result, texts)


def _record(result: HealthyResult, texts: list[str]) -> None:
    result.verdicts += [text for text in texts if text not in result.verdicts]


# Disturbances.


def pause_run(run: FaultRun) -> None:
    """Pause the run for eight seconds and continue it, three times."""
    for _ in range(3):
        run.ltui("pause", "last")
        run.until(lambda s: s.state.value == "paused", 30)
        time.sleep(8)
        run.ltui("continue", "last")
        run.until(lambda s: s.state.value == "running", 30)
        time.sleep(5)


def suspend_run(run: FaultRun) -> None:
    """Stop all processes of the run for twenty seconds, supervisor included, twice."""
    for _ in range(2):
        pids = [process.pid for process in run.processes()]
        _signal_all(pids, signal.SIGSTOP)
        time.sleep(20)
        _signal_all(pids, signal.SIGCONT)
        time.sleep(10)


def _signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _use_processor(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(10000))


def load_bursts(run: FaultRun) -> None:
    """Run three busy processes for each core for six seconds, four times."""
    for _ in range(4):
        fork = multiprocessing.get_context("fork").Process
        count = 3 * (os.cpu_count() or 1)
        burners = [fork(target=_use_processor, args=(6,), daemon=True) for _ in range(count)]
        for burner in burners:
            burner.start()
        for burner in burners:
            burner.join()
        time.sleep(4)


QUIET: tuple[HealthyRun, ...] = (
    HealthyRun("plain", "nothing at all", 40, ranks=3),
    HealthyRun("to_the_end", "a run that comes to its end", 60, ends=True, ranks=3,
        env={"ZOO_BATCHES": "300", "ZOO_EPOCHS": "2", "ZOO_VAL_BATCHES": "5"}),
    HealthyRun("long_validation", "a long validation after short steps", 50,
        env={"ZOO_BATCHES": "40", "ZOO_VAL_BATCHES": "40", "ZOO_VAL_PACE_S": "0.5",
            "ZOO_EPOCHS": "9"}),
    HealthyRun("long_validation_end", "20 s of work at the end of a validation", 50,
        env={"ZOO_BATCHES": "40", "ZOO_VAL_BATCHES": "5", "ZOO_VAL_END_S": "20",
            "ZOO_EPOCHS": "9"}),
    HealthyRun("long_first_step", "a first step of 25 s", 45, env={"ZOO_FIRST_STEP_S": "25"}),
    HealthyRun("prepares", "rank 0 prepares data for 40 s", 60, inject="prepares"),
    HealthyRun("uploads", "rank 0 waits for a program of 15 s at each epoch's end", 50,
        inject="uploads", env={"ZOO_BATCHES": "60", "ZOO_EPOCHS": "999"}),
    HealthyRun("exits_late", "one rank exits 8 s after the others", 60, ends=True,
        inject="exits_late", env={"ZOO_BATCHES": "60"}),
    HealthyRun("busy_first_step", "one rank computes for 20 s in its first step", 40,
        inject="warms_up"),
    HealthyRun("slow_checkpoint", "checkpoints that take 6 s", 45,
        env={"ZOO_SAVE_EVERY": "100", "ZOO_SAVE_S": "6"}),
    HealthyRun("accumulation", "gradient accumulation over 16 batches", 30,
        env={"ZOO_ACCUMULATE": "16"}),
    HealthyRun("compiling", "one rank compiles for half a minute", 90, inject="compiles",
        env={"ZOO_FULL_IMPORTS": "1"}),
    HealthyRun("slow_model", "steps of 6 s", 60, env={"ZOO_PACE_S": "6"}),
    HealthyRun("paused", "paused by the user, three times", 60, disturb=pause_run),
    HealthyRun("suspended", "a suspended laptop, twice", 70, disturb=suspend_run),
    HealthyRun("bursts", "bursts of load", 50, disturb=load_bursts, first_step=30),
    HealthyRun("no_validation_epoch", "validation in every third epoch", 40,
        env={"ZOO_BATCHES": "30", "ZOO_VAL_BATCHES": "40", "ZOO_VAL_EVERY": "3",
            "ZOO_EPOCHS": "999"}),
    HealthyRun("short_epochs", "hundreds of epochs of three batches", 60,
        env={"ZOO_BATCHES": "3", "ZOO_VAL_BATCHES": "1", "ZOO_EPOCHS": "100000"}),
    HealthyRun("worker_epochs", "workers that start anew in every epoch", 40, inject="workers",
        env={"ZOO_BATCHES": "60", "ZOO_EPOCHS": "100000"}),
    HealthyRun("jitter", "up to a second of noise in every batch", 40, inject="jitter"),
    HealthyRun("pauses", "2 s pauses every fifty steps", 40, inject="pauses"),
    HealthyRun("long_epoch_end", "8 s of work at each epoch's end", 45,
        env={"ZOO_BATCHES": "60", "ZOO_EPOCH_END_S": "8", "ZOO_EPOCHS": "999"}),
    HealthyRun("single", "one rank alone", 25, ranks=1),
)  # fmt: skip
