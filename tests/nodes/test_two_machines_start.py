"""Machines that join late or not at all, of one name or home, or with other clocks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ltui.training.state.run_snapshot import NodeState, RunState
from ltui.training.state.verdicts import VerdictKind
from ltui.training.store.run_checkpoints import list_checkpoints, verify
from tests.ltui_command import answer
from tests.nodes.run_of_machines import MachinesRun, observe, start_head, start_run
from tests.nodes.two_machines import (
    Machines,
    ltui_on,
    open_machines,
    set_clock,
    with_settable_clock,
)
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LATE_S = 15
SKEW_S = 90.0


def test_a_machine_that_joins_late(two_machines: Machines) -> None:
    run = start_head(two_machines)
    seen = observe(lambda: (run.snapshot().state, run.node_state()), LATE_S)
    assert {*seen} <= {
        (RunState.STARTING, NodeState.JOINING),
        (RunState.QUEUED, NodeState.JOINING),
    }
    shown = run.show()
    line = next(line for line in shown.splitlines() if "waiting for node 1" in line)
    assert re.search(rf"waiting for node 1 of 2 to join, \d+ s of 600 s; .*{run.place}", line)
    run.join()
    run.wait_for_steps()
    run.stop()


def test_a_machine_that_never_joins(two_machines: Machines) -> None:
    run = start_head(two_machines, words=("--join-timeout", "5"))
    ended = run.wait_for_end()
    assert ended.state is RunState.FAILED
    assert (ended.detail or "").startswith("node 1 did not join within 5 s")
    run.wait_until_empty(0)
    refused = run.join(code=2)
    assert refused.count("\n") == 1
    assert f"Nothing listens at {run.place}: the head has ended or not started." in refused
    assert not list((two_machines[1].home / "nodes").glob("*"))
    run.wait_until_empty(1)


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
            (only,) = answer(listed)
            assert (only["id"], only["state"]) == (run.run_dir.id, "running")
        run.stop()
        saved = list_checkpoints(run.run_dir.checkpoints_dir)
        assert [info.reason for info in saved] == ["request", "stop"]
        assert all(verify(info).ok for info in saved)


def check_ages(run: MachinesRun, allowed: frozenset[str] = frozenset()) -> None:
    """Watch a run for some seconds: nothing is old, and nothing is wrong but what is allowed."""

    def age_s() -> float:
        snapshot = run.snapshot()
        kinds = {v.kind for v in snapshot.verdicts if v.ended is None}
        assert kinds <= allowed, snapshot.verdicts
        return max(rank.age_s or 0.0 for rank in snapshot.ranks)

    seen = observe(age_s, 15)
    assert max(seen) < SKEW_S / 2
    assert all(rank.state.value == "ok" for rank in run.snapshot().ranks)


def test_a_clock_that_is_fast_by_ninety_seconds(tmp_path: Path) -> None:
    with open_machines(tmp_path, clock_skew_s=SKEW_S, uptime_skew_s=100_000) as machines:
        run = start_run(machines)
        check_ages(run)
        skew_s = run.snapshot().nodes[1].clock_skew_s
        assert skew_s == pytest.approx(SKEW_S, abs=2.0)
        run.stop()


def test_a_clock_that_jumps_during_the_run(two_machines: Machines) -> None:
    clock = with_settable_clock(two_machines[1])
    run = start_run(two_machines)
    set_clock(clock, 3600)
    jumped = wait_for(
        lambda: [v for v in run.verdicts() if v.kind == VerdictKind.CLOCK_JUMP], seconds=60
    )
    assert jumped[0].nodes == (1,)
    check_ages(run, frozenset({VerdictKind.CLOCK_JUMP.value}))
    run.stop()
