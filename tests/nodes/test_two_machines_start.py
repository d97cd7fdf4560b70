"""Machines that join late, twice, with another version, or with other clocks."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from ltui.training.state.run_snapshot import NodeState, RunState
from ltui.training.state.verdicts import VerdictKind
from ltui.training.store.run_checkpoints import list_checkpoints, verify
from tests.nodes.run_of_machines import MachinesRun, observe, start_head, start_run
from tests.nodes.two_machines import Machine, Machines, ltui_on, open_machines
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LATE_S = 60
SKEW_S = 90.0
_CLOCK = Path(__file__).parent.parent / "chaos" / "shifted_clock.c"


def test_a_machine_that_joins_late(two_machines: Machines) -> None:
    run = start_head(two_machines)
    seen = observe(lambda: (run.snapshot().state, run.node_state()), LATE_S)
    assert {value for _, value in seen} <= {
        (RunState.STARTING, NodeState.JOINING),
        (RunState.QUEUED, NodeState.JOINING),
    }
    shown = run.show()
    line = next(line for line in shown.splitlines() if "waiting for node 1" in line)
    print(line)
    assert re.search(rf"waiting for node 1 of 2 to join, \d+ s of 600 s; .*{run.place}", line)
    run.join()
    run.wait_for_steps()
    run.stop()


def test_a_machine_that_never_joins(two_machines: Machines) -> None:
    run = start_head(two_machines, words=("--join-timeout", "5"))
    ended = run.wait_for_end()
    print(ended.detail)
    assert ended.state is RunState.FAILED
    assert (ended.detail or "").startswith("node 1 did not join within 5 s")
    run.wait_until_empty(0)
    refused = run.join(code=2)
    print(refused)
    assert refused.count("\n") == 1
    assert f"Nothing listens at {run.place}: the head has ended or not started." in refused
    assert not list((two_machines[1].home / "nodes").glob("*"))
    run.wait_until_empty(1)


def test_machines_that_are_refused(two_machines: Machines) -> None:
    run = start_head(two_machines)
    wrong = two_machines[1].folder / "wrong.key"
    ltui_on(two_machines[1], "key", code=0)
    wrong.write_text(ltui_on(two_machines[1], "key", code=0).stdout)
    wrong.chmod(0o600)
    refused = ltui_on(two_machines[1], "join", run.place, "--key-file", str(wrong), code=2)
    print(refused.stderr)
    assert refused.stderr.count("\n") == 1
    assert "key" in refused.stderr
    # Another version: metadata of the package that stands before the installed one.
    metadata = two_machines[1].folder / "other" / "ltui_train-99.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: ltui-train\nVersion: 99.0\n")
    said = run.join(env={"PYTHONPATH": str(metadata.parent)}, code=2)
    print(said)
    assert "this machine has ltui 99.0, and node 0 has" in said
    assert not list((two_machines[1].home / "nodes").glob("*"))
    run.join()
    run.wait_for_steps()
    # A second machine for a place that is taken: the first one with another home.
    second = two_machines[0]
    words = ("join", run.place, "--key-file", str(run.run_dir.path / "node.key"), "--node", "1")
    refused = ltui_on(second, *words, env={"LTUI_HOME": str(second.folder / "home")}, code=2)
    print(refused.stderr)
    assert refused.stderr.count("\n") == 1
    assert f"node 1 of {run.run_dir.id} is taken: machine-1 has joined as it" in refused.stderr
    run.stop()


def test_one_host_name_and_no_ipv4(tmp_path: Path) -> None:
    with open_machines(tmp_path, ipv6=True, host_names=("node", "node")) as machines:
        run = start_run(machines)
        assert [node.name for node in run.snapshot().nodes] == ["node", "node#2"]
        shown = run.show()
        assert "node#2" in shown
        assert "fd77::2" in shown
        run.stop()


def test_one_home_for_both_machines(tmp_path: Path) -> None:
    """As if ``$LTUI_HOME`` were on a shared file system."""
    with open_machines(tmp_path, shared_home=True) as machines:
        run = start_run(machines)
        run.ltui("checkpoint", run.run_dir.id)
        # Each machine reads the same list of runs.
        for machine in machines:
            listed = ltui_on(machine, "runs", "--json", code=0).stdout
            (only,) = json.loads(listed)
            assert (only["id"], only["state"]) == (run.run_dir.id, "running")
        run.stop()
        saved = list_checkpoints(run.run_dir.checkpoints_dir)
        assert [info.reason for info in saved] == ["request", "stop"]
        assert all(verify(info).ok for info in saved)


def check_ages(run: MachinesRun, allowed: frozenset[str] = frozenset()) -> None:
    """Watch a run for some seconds: nothing is old, and nothing is wrong but what is allowed."""

    def read() -> tuple[set[str], float]:
        snapshot = run.snapshot()
        kinds = {v.kind for v in snapshot.verdicts if v.ended is None}
        ages = [rank.age_s or 0.0 for rank in snapshot.ranks]
        assert kinds <= allowed, snapshot.verdicts
        return kinds, max(ages)

    seen = observe(read, 15)
    oldest_s = max(age for _, (_, age) in seen)
    print(f"oldest pulse: {oldest_s:.1f} s")
    assert oldest_s < SKEW_S / 2
    assert all(rank.state.value == "ok" for rank in run.snapshot().ranks)


def test_a_clock_that_is_fast_by_ninety_seconds(tmp_path: Path) -> None:
    with open_machines(tmp_path, clock_skew_s=SKEW_S, uptime_skew_s=100_000) as machines:
        run = start_run(machines)
        check_ages(run)
        skew_s = run.snapshot().nodes[1].clock_skew_s
        assert skew_s == pytest.approx(SKEW_S, abs=2.0)
        run.stop()


def _with_settable_clock(machine: Machine) -> Path:
    """Let the clock of a machine be shifted by the seconds in a file. Return its path."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("a clock that jumps needs a C compiler")
    library, clock = machine.folder / "shifted_clock.so", machine.folder / "clock"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, _CLOCK, "-ldl"], check=True)
    _set(clock, 0)
    machine.environment |= {"LD_PRELOAD": str(library), "LTUI_TEST_CLOCK": str(clock)}
    return clock


def _set(clock: Path, seconds: int) -> None:
    """Store the seconds in place, because the processes have mapped the file."""
    with open(clock, "r+b" if clock.exists() else "wb") as file:
        file.write(seconds.to_bytes(8, "little", signed=True))


def test_a_clock_that_jumps_during_the_run(two_machines: Machines) -> None:
    clock = _with_settable_clock(two_machines[1])
    run = start_run(two_machines)
    _set(clock, 3600)
    began_s = time.monotonic()
    verdict = wait_for(
        lambda: next((v for v in run.verdicts() if v.kind == VerdictKind.CLOCK_JUMP), None),
        seconds=60,
    )
    assert verdict is not None
    print(f"named after {time.monotonic() - began_s:.1f} s: {verdict.cause}")
    assert verdict.nodes == (1,)
    check_ages(run, frozenset({VerdictKind.CLOCK_JUMP.value}))
    run.stop()
