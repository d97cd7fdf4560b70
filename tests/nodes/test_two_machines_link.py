"""A run on two machines whose connection is cut: while it trains, pauses, saves and stops."""

from __future__ import annotations

import threading
import time

import pytest

from ltui.training.config.run_spec import VerdictLevel
from ltui.training.state.run_snapshot import LIVE, NodeState, RunState
from ltui.training.state.verdicts import VerdictKind
from tests.nodes.run_of_machines import MachinesRun, cut, observe, start_run
from tests.nodes.two_machines import Machines
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STOP_TIMEOUT_S = 15


class Command:
    """An ``ltui`` command on machine 0 that runs while the test does something else."""

    def __init__(self, run: MachinesRun, name: str, *options: str) -> None:
        self.output = ""

        def work() -> None:
            self.output = run.ltui(name, run.run_dir.id, *options, code=None)

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def ended(self) -> str:
        """Return what it printed, once it has ended."""
        self._thread.join(240)
        assert not self._thread.is_alive()
        return self.output


def stop_and_check_no_record_is_missing(run: MachinesRun) -> None:
    """Fail if a step of a rank is neither in the history nor in a recorded gap."""
    run.stop()
    for rank in run.snapshot().ranks:
        steps = run.recorded_steps(rank.rank)
        missing = set(range(1, max(steps) + 1)) - steps
        assert len(missing) <= rank.missed_records, f"rank {rank.rank}: {sorted(missing)}"


@pytest.mark.parametrize("cut_s", [5, 30, 120])
def test_training_survives_a_cut_and_no_record_is_lost(two_machines: Machines, cut_s: int) -> None:
    run = start_run(two_machines)
    problems: set[tuple[str, str]] = set()

    def problem() -> NodeState:
        snapshot = run.snapshot()
        problems.update((v.kind, v.level) for v in snapshot.verdicts if v.ended is None)
        return snapshot.nodes[1].state

    def stalled() -> list[tuple[object, ...]]:
        problem()
        found = [v for v in run.verdicts() if v.level == VerdictLevel.STALLED]
        return [
            (v.nodes, v.culprits, v.waiting, "rank 0 on machine-0 waits" in v.cause) for v in found
        ]

    with cut(two_machines, two_machines[1]):
        began_s = time.monotonic()
        if cut_s > 5:
            run.wait_for_node(NodeState.UNREACHABLE)
            shown = run.show()
            assert "no answer from 10.77.0.2 for" in shown
            assert "its link is cut or it is down" in shown
        if cut_s == 120:
            assert wait_for(stalled, seconds=60)[0] == ((1,), (), (0,), True)
        observe(problem, cut_s - (time.monotonic() - began_s))
    wait_for(problem, wanted=lambda state: state is NodeState.CONNECTED)
    before = run.rank_steps()

    def is_moving() -> bool:
        problem()
        return all(now > then + 20 for now, then in zip(run.rank_steps(), before, strict=True))

    wait_for(is_moving, seconds=2 * cut_s + 60)
    wait_for(run.verdicts, wanted=lambda verdicts: not verdicts)
    allowed = {
        (VerdictKind.NODE_UNREACHABLE, VerdictLevel.WARNING),
        (VerdictKind.TRANSPORT, VerdictLevel.WARNING),
    }
    if cut_s > 5:
        allowed.add((VerdictKind.NODE_UNREACHABLE, VerdictLevel.STALLED))
        assert any(kind == VerdictKind.NODE_UNREACHABLE for kind, _ in problems)
    assert problems <= allowed
    assert run.snapshot().state is RunState.RUNNING
    stop_and_check_no_record_is_missing(run)
    texts = [event.text for event in run.events("node")]
    for words in ("its link is cut", "reports again"):
        assert cut_s == 5 or any(words in text for text in texts), texts


@pytest.mark.parametrize("command", ["pause", "checkpoint"])
def test_a_request_during_a_cut_is_carried_out_at_one_step(
    two_machines: Machines, command: str
) -> None:
    run = start_run(two_machines)
    with cut(two_machines, two_machines[1]):
        request = Command(run, command)
        run.wait_for_node(NodeState.UNREACHABLE)
        assert run.snapshot().state in LIVE
        time.sleep(5)
    said = request.ended()
    if command == "pause":
        run.wait_for_state(RunState.PAUSED)
        first, second = run.rank_steps()
        assert first == second
        assert run.ltui("continue", run.run_dir.id).startswith(run.run_dir.id)
    else:
        wait_for(lambda: run.snapshot().checkpoints)
    assert "machine-1" in said or "at step" in said
    run.wait_for_steps()
    stop_and_check_no_record_is_missing(run)


def test_a_pause_lasts_through_a_cut_and_ends_after_it(two_machines: Machines) -> None:
    run = start_run(two_machines)
    run.ltui("pause", run.run_dir.id)
    run.wait_for_state(RunState.PAUSED)
    paused_at = run.rank_steps()
    assert paused_at[0] == paused_at[1]
    with cut(two_machines, two_machines[1]):
        run.wait_for_node(NodeState.UNREACHABLE)
        request = Command(run, "continue")
        time.sleep(5)
    request.ended()
    run.wait_for_steps()
    stop_and_check_no_record_is_missing(run)


def test_a_stop_during_a_short_cut_saves_at_one_step(two_machines: Machines) -> None:
    run = start_run(two_machines)
    with cut(two_machines, two_machines[1]):
        request = Command(run, "stop", "--timeout", "120")
        run.wait_for_node(NodeState.UNREACHABLE)
        time.sleep(3)
    assert "checkpoint verified" in request.ended()
    run.wait_until_all_are_empty()
    first, second = run.rank_steps()
    assert first == second


def test_a_stop_during_a_long_cut_ends_and_names_who_is_missing(two_machines: Machines) -> None:
    run = start_run(two_machines)
    details: set[str | None] = set()

    def state() -> RunState:
        snapshot = run.snapshot()
        details.add(snapshot.detail)
        return snapshot.state

    with cut(two_machines, two_machines[1]):
        run.wait_for_node(NodeState.UNREACHABLE)
        request = Command(run, "stop", "--timeout", str(STOP_TIMEOUT_S))
        wait_for(state, wanted=lambda now: now not in LIVE, seconds=120)
        said = request.ended()
        run.wait_until_empty(0)
    assert "killed because the ranks did not stop together" in said
    assert "machine-1 does not answer" in said
    assert any("machine-1 does not answer" in (detail or "") for detail in details)
    run.wait_until_empty(1, seconds=180)
