"""A run on two machines whose connection is cut: while it trains, pauses, saves and stops."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

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

    def __init__(self, run: MachinesRun, *words: str) -> None:
        self.output = ""
        self._thread = threading.Thread(target=self._run, args=(run, words), daemon=True)
        self._thread.start()

    def _run(self, run: MachinesRun, words: tuple[str, ...]) -> None:
        name, *options = words
        self.output = run.ltui(name, run.run_dir.id, *options, code=None)

    def ended(self) -> str:
        """Return what it printed, once it has ended."""
        self._thread.join(240)
        assert not self._thread.is_alive()
        return self.output


def check_no_record_is_missing(run: MachinesRun) -> None:
    """Fail if a step of a rank is neither in the history nor in a recorded gap."""
    snapshot = run.snapshot()
    for rank in snapshot.ranks:
        steps = run.recorded_steps(rank.rank)
        missing = set(range(1, max(steps) + 1)) - steps
        assert len(missing) <= rank.missed_records, f"rank {rank.rank}: {sorted(missing)}"


@pytest.mark.parametrize("cut_s", [5, 30, 120])
def test_training_survives_a_cut_and_no_record_is_lost(two_machines: Machines, cut_s: int) -> None:
    run = start_run(two_machines)
    problems: set[tuple[str, str]] = set()

    def problem() -> tuple[NodeState, frozenset[tuple[str, str]]]:
        snapshot = run.snapshot()
        verdicts = frozenset((v.kind, v.level) for v in snapshot.verdicts if v.ended is None)
        problems.update(verdicts)
        return snapshot.nodes[1].state, verdicts

    with cut(two_machines, two_machines[1]):
        began_s = time.monotonic()
        if cut_s > 5:
            named_s = run.wait_for_node(NodeState.UNREACHABLE)
            print(f"unreachable after {named_s:.1f} s")
            shown = run.show()
            assert "no answer from 10.77.0.2 for" in shown
            assert "its link is cut or it is down" in shown
        seen = observe(problem, cut_s - (time.monotonic() - began_s))
    print(*seen, sep="\n")
    wait_for(problem, wanted=lambda now: now[0] is NodeState.CONNECTED)
    restored_s = time.monotonic()
    before = run.rank_steps()

    def is_moving() -> bool:
        problem()
        return all(now > then + 20 for now, then in zip(run.rank_steps(), before, strict=True))

    wait_for(is_moving, seconds=2 * cut_s + 60)
    print(f"trains again {time.monotonic() - restored_s:.1f} s after the first report")
    wait_for(run.verdicts, wanted=lambda verdicts: not verdicts)
    allowed = {
        (VerdictKind.NODE_UNREACHABLE, VerdictLevel.WARNING),
        (VerdictKind.TRANSPORT, VerdictLevel.WARNING),
    }
    if cut_s > 5:
        allowed.add((VerdictKind.NODE_UNREACHABLE, VerdictLevel.STALLED))
    assert problems <= allowed
    if cut_s > 5:
        assert any(kind == VerdictKind.NODE_UNREACHABLE for kind, _ in problems)
    assert run.snapshot().state is RunState.RUNNING
    run.stop()
    check_no_record_is_missing(run)
    texts = [event.text for event in run.events("node")]
    assert cut_s == 5 or any("its link is cut" in text for text in texts), texts
    assert cut_s == 5 or any("reports again" in text for text in texts), texts


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
    print(said)
    assert "machine-1" in said or "at step" in said
    run.wait_for_steps()
    run.stop()
    check_no_record_is_missing(run)


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
    print(request.ended())
    run.wait_for_steps()
    run.stop()
    check_no_record_is_missing(run)


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
    with cut(two_machines, two_machines[1]):
        run.wait_for_node(NodeState.UNREACHABLE)
        began_s = time.monotonic()
        request = Command(run, "stop", "--timeout", str(STOP_TIMEOUT_S))
        wait_for(_detail(run, details), wanted=lambda state: state not in LIVE, seconds=120)
        print(f"ended after {time.monotonic() - began_s:.1f} s")
        said = request.ended()
        run.wait_until_empty(0)
    print(said, *details, sep="\n")
    assert "killed because the ranks did not stop together" in said
    assert "machine-1 does not answer" in said
    assert any("machine-1 does not answer" in (detail or "") for detail in details)
    run.wait_until_empty(1, seconds=180)


def _detail(run: MachinesRun, details: set[str | None]) -> Callable[[], RunState]:
    def read() -> RunState:
        snapshot = run.snapshot()
        details.add(snapshot.detail)
        return snapshot.state

    return read
