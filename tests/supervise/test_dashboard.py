"""The dashboard beside a real supervisor: it shows what that has stored, and its age."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from ltui.app.live.frame import Frame
from ltui.app.live.run_poller import RunPoller
from ltui.app.presentation.run_view import note_lines
from ltui.training.lifecycle.run_processes import shim_identity
from ltui.training.state.metric_name_patterns import THROUGHPUT, TOTAL_RANK
from ltui.training.state.run_snapshot import LIVE, RunState
from ltui.training.store.history_reader import RunStore
from ltui.training.store.run_directory import RunDir
from tests.required import required
from tests.waiting import wait_for

from .conftest import Runs


class Dashboard:
    """A poller without a screen."""

    def __init__(self, run: RunDir) -> None:
        self.poller = RunPoller(run)

    def until(self, wanted: Callable[[Frame], object]) -> Frame:
        return wait_for(
            lambda: self.poller.poll(time.time(), time.monotonic_ns()), wanted=wanted, period_s=0.1
        )


@pytest.fixture
def watched(runs: Runs) -> Iterator[tuple[RunDir, Dashboard]]:
    run = runs.training()
    dashboard = Dashboard(run)
    yield run, dashboard
    dashboard.poller.close()
    runs.until(run, lambda s: s.supervisor_pid is not None and s.detail is None)
    runs.end(run, "kill")


def stored_best(run: RunDir) -> float | None:
    with RunStore(run) as store:
        return store.snapshot().throughput.best_samples_per_s


def stored_losses(run: RunDir) -> list[float]:
    with RunStore(run) as store:
        return list(store.curve("train/loss").steps.tolist())


def test_curves_and_figures_are_those_of_the_supervisor(watched: tuple[RunDir, Dashboard]) -> None:
    run, dashboard = watched
    first = dashboard.until(lambda f: len(f.rates) == 3)
    later = dashboard.until(
        lambda f: len(f.curves["train/loss"]) > len(first.curves["train/loss"]) + 20
    )
    assert later.curves_version > first.curves_version
    steps = later.curves["train/loss"].steps.tolist()
    assert steps == list(range(1, len(steps) + 1)) == stored_losses(run)[: len(steps)]
    with RunStore(run) as store:
        total = store.curve(THROUGHPUT, rank=TOTAL_RANK)
    shown = later.rates[None]
    assert shown.mean.tolist() == total.mean[: len(shown)].tolist()
    assert THROUGHPUT in later.curve_names
    # The figure is the one that the chart will have as its next point.
    assert later.snapshot.throughput.samples_per_s == pytest.approx(float(shown.mean[-1]), rel=0.2)
    assert required(later.last_record_at) > required(first.last_record_at)
    assert [row[0] for row in later.last_steps.values()] == pytest.approx([steps[-1]] * 2, abs=3)


@pytest.mark.parametrize("killed", [False, True], ids=["frozen", "dead"])
def test_beside_a_supervisor_that_does_not_answer_ages_are_shown_and_no_old_rate(
    watched: tuple[RunDir, Dashboard], killed: bool
) -> None:
    run, dashboard = watched
    before = dashboard.until(lambda f: f.rates and len(f.rates[None]) > 4)
    # What is shown later is the stored snapshot, which is written once a second.
    wait_for(lambda: stored_best(run))
    pid, shim = required(before.snapshot.supervisor_pid), required(shim_identity(run)).pid
    os.kill(shim, signal.SIGSTOP)  # lest it starts another supervisor
    os.kill(pid, signal.SIGKILL if killed else signal.SIGSTOP)
    try:
        silent = dashboard.until(lambda f: not f.supervisor_answers)
        stored = stored_losses(run)
        # The ranks go on. Their position is in their pulses; everything else is as old as it says.
        later = dashboard.until(
            lambda f: (f.snapshot.global_step or 0) > required(silent.snapshot.global_step) + 20
        )
        assert later.snapshot.state is RunState.RUNNING
        assert later.snapshot_at <= silent.now
        assert any("does not answer; figures are" in line for line in note_lines(later))
        throughput = later.snapshot.throughput
        assert (throughput.samples_per_s, throughput.steps_per_s) == (None, None)
        assert throughput.best_samples_per_s is not None
        assert later.snapshot.eta_s is None
        assert [rank.samples_per_s for rank in later.snapshot.ranks] == [None, None]
        assert all(required(rank.age_s) < 10 for rank in later.snapshot.ranks)
        assert later.curves["train/loss"].steps.tolist() == stored
        assert required(later.last_record_at) < later.now
        stopped = required(later.snapshot.ranks[1].pid)
        os.kill(stopped, signal.SIGSTOP)
        dashboard.until(lambda f: required(f.snapshot.ranks[1].age_s) > 2)
        os.kill(stopped, signal.SIGCONT)
    finally:
        os.kill(shim, signal.SIGCONT)
        if not killed:
            os.kill(pid, signal.SIGCONT)
    back = dashboard.until(
        lambda f: f.supervisor_answers and f.curves["train/loss"].steps[-1] > stored[-1]
    )
    steps = back.curves["train/loss"].steps.tolist()
    assert steps == list(range(1, len(steps) + 1))


def test_the_last_steps_of_a_run_that_has_ended_are_shown(runs: Runs) -> None:
    gate = runs.cwd / "gate"
    run = runs.training("--steps", "60", "--gate", str(gate), "--gate-at", "20")
    dashboard = Dashboard(run)
    assert dashboard.until(lambda f: f.curves).snapshot.state in LIVE
    gate.touch()
    frame = dashboard.until(lambda f: f.snapshot.state not in LIVE)
    assert frame.snapshot.state is RunState.FINISHED
    assert frame.curves["train/loss"].steps.tolist() == list(range(1, 61))
    runs.ended(run)
