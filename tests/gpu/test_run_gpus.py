"""From the driver's C interface to a run's picture: ranks, owners, findings, events."""

from __future__ import annotations

import os
import re
import subprocess
import time

import pytest

from ltui.training.state.run_snapshot import GpuSnapshot
from tests.waiting import wait_for


@pytest.fixture(scope="module")
def two_ranks():
    """Two processes that stand for ranks, as launched with CUDA_VISIBLE_DEVICES=1,0."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "1,0", "LTUI_RUN_ID": "brave-owl-3f2a"}
    processes = [subprocess.Popen(["sleep", "600"], env=env) for _ in range(2)]
    yield [process.pid for process in processes]
    for process in processes:
        process.kill()
        process.wait()


def watch(under, script, pids, *, state="OK"):
    run = under(script)
    ranks = ", ".join(
        f"RankSnapshot(rank={rank}, pid={pid}, device='cuda:{rank}', state=RankState.{state})"
        for rank, pid in enumerate(pids)
    )
    run.ask(f"kept.update(run=RunGpus('brave-owl-3f2a', period_s=0.1), ranks=({ranks},))")
    return run


def look_when(run, holds, now=None):
    sample = f"kept['run'].sample(kept['ranks'], {now})"
    return wait_for(lambda: run.ask(sample), wanted=holds, seconds=90.0)


def test_ranks_and_owners(under, two_ranks):
    script = (
        f"gpus 2 h100\nprocess 1 {two_ranks[0]} 30e9\nprocess 1 {os.getpid()} 2e9\n"
        f"process 0 {two_ranks[1]} 31e9\n"
    )
    run = watch(under, script, two_ranks)
    view = look_when(run, lambda v: len(v.gpus) == 2 and v.note is None)
    assert all(isinstance(gpu, GpuSnapshot) for gpu in view.gpus)
    assert [gpu.ranks for gpu in view.gpus] == [(1,), (0,)]
    owners = {p.pid: (p.owner, p.rank, p.memory_bytes) for p in view.gpus[1].processes}
    assert owners == {
        two_ranks[0]: ("rank", 0, 30_000_000_000),
        os.getpid(): ("foreign", None, 2_000_000_000),
    }
    (finding,) = look_when(run, lambda v: v.findings).findings
    assert finding.ranks == (0,)
    assert f"pid {os.getpid()}" in finding.sentence
    assert finding.sentence.startswith("GPU 1: used by another process (")


def test_a_hung_collective_where_the_driver_lists_no_processes(under, two_ranks):
    """The ranks are then those of the visible devices."""
    script = "gpus 2 h100\nset 0 power 71 util 100 sm_activity 12\n"
    refusal = "fail * DeviceGetComputeRunningProcesses NO_PERMISSION\n"
    run = watch(under, script + refusal, two_ranks, state="STALLED")
    # Time is an argument: half a minute of looks in a moment, at readings that are no older.
    began = time.time() - 40.0
    look_when(run, lambda v: len(v.gpus) == 2 and v.gpus[0].sm_activity is not None, now=began)
    for second in range(30):
        view = run.ask(f"kept['run'].sample(kept['ranks'], {began + second})")
    assert [gpu.ranks for gpu in view.gpus] == [(1,), (0,)]
    assert [finding.sentence for finding in view.findings] == [
        "GPU 0: power 71 W at 100 % utilisation for 29 s: kernels wait in a collective"
    ]


def test_xids_become_events_with_their_rank(under, two_ranks):
    run = watch(under, "gpus 2 h100\n", two_ranks)
    look_when(run, lambda v: len(v.gpus) == 2)
    run.steer("gpus 2 h100\nxid 1 79\nlost 1\n")
    seen = []

    def both(view):
        seen.extend(view.events)
        return view.gpus[1].error == "fell off the bus" and seen

    view = look_when(run, both)
    assert [(e.text, e.data["ranks"], e.data["xid"]) for e in seen] == [
        ("GPU 1 (rank 0): XID 79: the GPU fell off the bus", [0], 79)
    ]
    assert view.gpus[1].xid_code == 79
    assert {f.kind for f in view.findings} == {"xid"}


def test_a_hang_is_told_in_note_gpu_and_finding(under, two_ranks):
    run = watch(under, "gpus 2 h100\n", two_ranks)
    look_when(run, lambda v: len(v.gpus) == 2 and v.note is None)
    run.steer("gpus 2 h100\nhang 0 DeviceGetTemperature forever\n")
    view = look_when(run, lambda v: v.note is not None)
    hanging = view.note.partition(" (")[0]
    assert re.fullmatch(r"driver has not answered for \d+ s", hanging)
    assert (view.gpus[0].error, view.gpus[0].power_w) == (hanging, 540)
    assert [f.sentence for f in view.findings] == [f"GPU 0: {hanging}"]
    assert run.close() == 0
