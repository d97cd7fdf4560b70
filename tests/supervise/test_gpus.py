"""Supervisors on a stand-in driver: findings, XIDs, a hung driver, and runs that wait for GPUs."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ltui.training.lifecycle.launch_run import launch
from ltui.training.lifecycle.supervisor_client import ControlClient
from ltui.training.state.run_snapshot import RunSnapshot, RunState, Verdict
from ltui.training.store.history_reader import RunStore
from ltui.training.store.run_directory import RunDir
from tests.gpu.standin import nvml_stand_in
from tests.supervise.conftest import Runs

SHOW_GPUS = "import os, time; print('given', os.environ['CUDA_VISIBLE_DEVICES']); time.sleep(60)"


@pytest.fixture
def steer(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """``steer("gpus 2 h100")``: what supervisors started from now on see, and live ones soon."""
    script = tmp_path / "gpus.txt"
    for name, value in nvml_stand_in.environment(library.parent, script, {}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return lambda text: nvml_stand_in.write_script(script, text)


def waiting_for(runs: Runs, gpus: str) -> RunDir:
    spec = runs.spec(sys.executable, "-u", "-c", SHOW_GPUS).with_changes(gpus=gpus)
    return launch(spec, runs.home)


def given(runs: Runs, run: RunDir) -> str:
    """Return the GPUs that were visible to the engine."""
    runs.until(run, lambda s: s.state is not RunState.QUEUED)
    log = run.engine_log_path(1)
    runs.until(run, lambda s: log.exists() and "given" in log.read_text())
    return log.read_text().split()[1]


def uuid(index: int) -> str:
    return f"GPU-5eed0000-0000-4000-8000-{index:012x}"


@pytest.mark.slow
def test_gpus_findings_and_xids(runs: Runs, steer: Callable[[str], None]) -> None:
    steer("gpus 2 h100\n")
    run = runs.training()
    shown = runs.until(run, lambda s: len(s.gpus) == 2 and s.gpus[0].sm_activity is not None)
    assert shown.gpu_note is None
    assert shown.gpus[0].throttle_reasons == ()
    steer("gpus 2 h100\nset * remapped_pending 1\nxid 1 79\n")
    # Slow readings take turns among GPUs: the second joins the first.
    full = runs.until(run, lambda s: any(v.place == "GPUs 0, 1" for v in s.verdicts))
    (memory,) = [v for v in full.verdicts if v.kind == "gpu_repair"]
    assert memory.cause.startswith("GPUs 0, 1: faulty memory is retired only after a reset")
    assert memory.level == "warning"
    runs.until(run, lambda s: any(v.kind == "gpu_xid" for v in s.verdicts))
    steer("gpus 2 h100\n")
    runs.until(run, lambda s: all(v.kind != "gpu_repair" for v in s.verdicts))
    ended = runs.end(run, "stop")
    assert not [v for v in ended.verdicts if v.kind.startswith("gpu_") and v.ended is None]
    with RunStore(run) as store:
        (event,) = [e for e in store.events() if e.kind == "gpu_error"]
        assert "XID 79: the GPU fell off the bus" in event.text
        assert all(v.ended is not None for v in store.verdicts() if v.kind == "gpu_repair")
        history = store.gpu_history(0, 60.0)
        assert len(history["t"]) > 1
        assert set(history["power_w"]) == {540.0}


@pytest.mark.slow
def test_a_straggler_is_reported_with_the_problem_of_its_gpu(
    runs: Runs, steer: Callable[[str], None]
) -> None:
    steer("gpus 2 h100\nset 1 throttle 0x40 temp 93\n")
    run = runs.training("--gpus", "--slow-rank", "1", "--slow", "0.2")
    shown = runs.until(run, lambda s: any("GPU 1: thermal" in v.cause for v in straggling(s)))
    (straggler,) = straggling(shown)
    assert straggler.culprits == (1,)
    assert "it spends the time in forward" in straggler.cause
    assert "cooling" in (straggler.remedy or "")
    steer("gpus 2 h100\nprocess 1 1 2e9\n")
    runs.until(run, lambda s: any("GPU 1: used by another" in v.cause for v in straggling(s)))
    runs.end(run, "stop")


def straggling(snapshot: RunSnapshot) -> list[Verdict]:
    return [v for v in snapshot.verdicts if v.kind == "straggler" and v.ended is None]


@pytest.mark.slow
def test_a_rank_that_waits_for_its_gpu_is_not_called_a_busy_loop(
    runs: Runs, steer: Callable[[str], None]
) -> None:
    steer("gpus 1 h100\nset 0 util 100 power 121\n")
    run = runs.training("--gpus", "--spin-at", "20", ranks=1)
    shown = runs.until(run, lambda s: any(v.level == "stalled" for v in s.verdicts))
    (verdict,) = [v for v in shown.verdicts if v.level == "stalled"]
    assert (verdict.kind, verdict.culprits) == ("waits_for_gpu", (0,))
    assert "in spin for its GPU, which does not finish its kernels" in verdict.cause
    assert "(GPU 0: 100 % utilisation, 121 W of 700 W)" in verdict.cause
    runs.end(run, "kill")


def test_a_hung_driver_holds_nobody_up(runs: Runs, steer: Callable[[str], None]) -> None:
    steer("gpus 2 h100\n")
    run = runs.training()
    runs.until(run, lambda s: len(s.gpus) == 2)
    steer("gpus 2 h100\nhang 0 DeviceGetTemperature forever\n")
    hung = runs.until(run, lambda s: s.gpu_note is not None)
    assert "driver has not answered for" in (hung.gpu_note or "")
    assert any(v.kind == "gpu_unreadable" for v in hung.verdicts)
    step = hung.global_step or 0
    assert ControlClient(run).request({"cmd": "pause"})["ok"]
    runs.until(run, lambda s: s.state is RunState.PAUSED)
    runs.order(run, "continue")
    runs.until(run, lambda s: (s.global_step or 0) > step + 5)
    assert runs.end(run, "stop").state is RunState.STOPPED
    lock = os.open(run.lock_path, os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(lock)


def test_runs_wait_for_free_gpus(runs: Runs, steer: Callable[[str], None]) -> None:
    steer("gpus 2 h100\nset * mem_used 0\n" + f"process 0 {os.getpid()} 1e9\n")
    first = waiting_for(runs, "free:1")
    assert given(runs, first) == uuid(1)
    second = waiting_for(runs, "free:1")
    queued = runs.until(second, lambda s: f"reserved for {first.id}" in (s.detail or ""))
    assert queued.state is RunState.QUEUED
    assert f"GPU 0: used by pid {os.getpid()}" in (queued.detail or "")
    runs.end(first, "stop")
    assert given(runs, second) == uuid(1)
    runs.end(second, "kill")


def test_two_waiting_runs_never_get_the_same(runs: Runs, steer: Callable[[str], None]) -> None:
    busy = f"gpus 4 h100\nset * mem_used 0\nprocess * {os.getpid()} 1e9\n"
    steer(busy)
    waiting = [waiting_for(runs, "free:2") for _ in range(2)]
    for run in waiting:
        runs.until(run, lambda s: s.state is RunState.QUEUED and "0 of the 2" in (s.detail or ""))
    steer("gpus 4 h100\nset * mem_used 0\n")
    got = [set(given(runs, run).split(",")) for run in waiting]
    assert got[0] | got[1] == {uuid(i) for i in range(4)}
    for run in waiting:
        runs.end(run, "kill")


def test_gpus_that_are_not_read_yet_are_waited_for(
    runs: Runs, steer: Callable[[str], None]
) -> None:
    steer("gpus 2 h100\nset * mem_used 0\nhang 1 DeviceGetPowerUsage forever\n")
    run = waiting_for(runs, "free:2")
    runs.until(run, lambda s: s.state is RunState.QUEUED and "not answered" in (s.detail or ""))
    steer("gpus 2 h100\nset * mem_used 0\n")
    assert set(given(runs, run).split(",")) == {uuid(0), uuid(1)}
    runs.end(run, "kill")


def test_waiting_where_there_are_no_gpus_fails(runs: Runs, steer: Callable[[str], None]) -> None:
    steer("gpus 0 h100\n")
    ended = runs.ended(waiting_for(runs, "free:1"))
    assert ended.state is RunState.FAILED
    assert "there are none" in (ended.detail or "")
