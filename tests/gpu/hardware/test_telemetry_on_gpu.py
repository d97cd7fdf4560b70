"""Runs ``check_telemetry.py`` where there is a CUDA GPU; elsewhere its counting and a rehearsal."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from tests.required import required

PROGRAM = Path(__file__).with_name("check_telemetry.py")


@pytest.fixture(scope="module")
def check():
    spec = required(importlib.util.spec_from_file_location("check_telemetry", PROGRAM))
    module = importlib.util.module_from_spec(spec)
    required(spec.loader).exec_module(module)
    return module


def _events(*named):
    """Events of one microsecond, ten apart."""
    return [
        SimpleNamespace(name=name, time_range=SimpleNamespace(start=10 * at, end=10 * at + 1))
        for at, name in enumerate(named)
    ]


def _run(*arguments, timeout):
    return subprocess.run(
        [sys.executable, str(PROGRAM), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def test_only_calls_that_wait_are_counted_and_only_in_the_window(check):
    events = _events(
        "cudaDeviceSynchronize",
        check.OPENS,
        "cudaLaunchKernel",
        "cudaMemcpyAsync",
        "cudaMemcpy2DAsync",
        "cudaStreamSynchronize",
        "Memcpy DtoH (Device -> Pinned)",
        "Memcpy DtoH (Device -> Pageable)",
        "cudaEventQuery",
        "cudaEventRecord",
        "cudaStreamWaitEvent",
        "cudaEventSynchronize",
        "cudaMemcpy",
        "cudaStreamSynchronize",
        check.CLOSES,
        "cudaDeviceSynchronize",
        "cudaStreamSynchronize",
    )
    calls = check.calls_in_window(reversed(events), check.WAITS)
    assert calls == {
        "cudaStreamSynchronize": 2,
        "cudaEventSynchronize": 1,
        "cudaMemcpy": 1,
        "Memcpy DtoH (Device -> Pageable)": 1,
    }
    assert check.a_step(calls, 2)["cudaStreamSynchronize"] == 1.0


def test_a_profile_without_the_window_is_refused(check):
    with pytest.raises(ValueError, match="marks"):
        check.calls_in_window(_events("cudaStreamSynchronize"), check.WAITS)


def test_counting_reads_a_real_profile(check):
    value = torch.ones(1)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        value.item()
        with record_function(check.OPENS):
            pass
        for _ in range(3):
            value.item()
        with record_function(check.CLOSES):
            pass
        value.item()
    assert check.calls_in_window(profiled.events(), check.READS) == {"aten::_local_scalar_dense": 3}
    assert check.calls_in_window(profiled.events(), check.WAITS) == {}


@pytest.mark.slow
def test_rehearsal_without_a_gpu_counts_what_telemetry_does(tmp_path):
    """On the CPU telemetry does read the loss, once a step: the same script has to find that."""
    file = tmp_path / "figures.json"
    options = ("--accelerator", "cpu", "--steps", 6, "--rounds", 1)
    done = _run(file, *options, timeout=110)
    assert done.returncode == 1, done.stdout + done.stderr
    figures = json.loads(file.read_text())
    calls = figures["synchronisations"]["calls_a_step"]
    reads = {name: found.get("aten::_local_scalar_dense", 0) for name, found in calls.items()}
    assert reads["telemetry"] == reads["control"] == reads["empty"] + 1
    checks = figures["checks"]
    assert not checks["no call that waits is added"]
    assert checks["the count notices one that is"]
    assert checks["telemetry and coordinator stayed on"], figures
    assert checks["every hook ran guarded"], figures["guard"]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_says_that_there_is_no_gpu(tmp_path):
    done = _run(tmp_path / "figures.json", timeout=60)
    assert done.returncode == 2
    assert done.stderr.endswith("torch sees no CUDA device\n")


@pytest.mark.timeout(300)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_telemetry_never_waits_for_the_gpu(tmp_path):
    done = _run(tmp_path / "figures.json", timeout=280)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
