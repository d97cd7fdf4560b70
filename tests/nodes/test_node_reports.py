"""What the head makes of the reports of agents, and how an agent ends."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from ltui.training.config.run_spec import Nodes, RunSpec
from ltui.training.lifecycle.elastic_log import WorkerFailure
from ltui.training.lifecycle.run_processes import EngineExit
from ltui.training.lifecycle.supervisor_client import AttemptPlan
from ltui.training.nodes.barrier_mirror import BarrierMirror
from ltui.training.nodes.link_key import KEY_FILE_NAME, LinkKey
from ltui.training.nodes.link_wire import MAX_PER_MINUTE
from ltui.training.nodes.messages import (
    JoinDecline,
    JoinRequest,
    MachineObservations,
    NodeReport,
    Orders,
    OrdersMessage,
    ReportMessage,
    decode,
    encode,
    own_version,
)
from ltui.training.nodes.node_places import NodePlaces, make_offer
from ltui.training.nodes.node_watch import NodeWatch
from ltui.training.process.identity import write_lock_text
from ltui.training.state.record_fold import FoldState, fold
from ltui.training.state.run_snapshot import GpuSnapshot, NodeState, Verdict
from ltui.training.store.run_directory import RunDir
from ltui.training.supervise.node_agent import NodeAgent
from ltui.training.supervise.node_reports import NodeReports, RemoteNode, ReportIntake, end_text
from ltui.training.supervise.remote_nodes import RemoteNodes
from ltui.training.supervise.speed.limit_meter import LimitMeter
from ltui.training.tensor_queue.heartbeat_table import HeartbeatSlot, RankActivity
from tests.state.records import steps

SPEC = RunSpec(
    id="r",
    name="r",
    created_at=0.0,
    cwd="/",
    python="python",
    command=("true",),
    nodes=Nodes(count=2, rank=0, address="127.0.0.1", port=1, control_port=0),
)


def a_report(node: int = 1, **fields: Any) -> NodeReport:
    common = {"version": own_version(), "host": "b", "machine_id": str(node), "attempt": 1}
    times = {"sent_ns": time.monotonic_ns(), "sent_at": time.time()}
    return NodeReport(node=node, **{**common, **times, **fields})


@pytest.fixture
def intake(tmp_path: Path) -> Iterator[ReportIntake]:
    """The intake of a run on two nodes, which knows node 1."""
    run_dir, orders = RunDir(tmp_path), Orders(attempt=1)
    places = NodePlaces(
        run_id="r",
        count=2,
        version=own_version(),
        offer=lambda node: make_offer(SPEC, node, {}, orders),
    )
    known = {1: RemoteNode(1, NodeWatch())}
    made = ReportIntake(run_dir, orders, known, places, BarrierMirror(run_dir.queue_dir(1)))
    yield made
    made.close()


def test_an_agent_that_is_refused_again_and_again_does_not_fill_the_history(
    intake: ReportIntake,
) -> None:
    for number in range(1000):
        other = a_report(version=f"{number // 2}")
        answer = decode(intake.report("1", encode(ReportMessage(other))))
        assert isinstance(answer, OrdersMessage)
        assert f"it runs ltui {number // 2}" in (answer.orders.refusal or "")
    assert len(intake.take_events()) == MAX_PER_MINUTE


def test_node_0_says_why_a_machine_did_not_join(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "runs" / "r")
    for folder in (run_dir.path / "engine", run_dir.queue_dir(1)):
        folder.mkdir(parents=True)
    LinkKey.read_or_create(run_dir.path / KEY_FILE_NAME)
    remote = RemoteNodes(run_dir, SPEC, 1, AttemptPlan(number=1))
    try:
        for message in (
            JoinRequest(version=own_version(), host="gpu-02", machine="m", pid=1),
            JoinDecline(node=1, machine="m", reason="/d is missing."),
        ):
            remote._intake.report("join-1", encode(message))
        why = "gpu-02 cannot join: /d is missing"
        assert remote.waiting_text() == f"waiting for node 1 of 2 to join, 0 s of 600 s; {why}"
        later_s = time.monotonic() + 601
        failed = remote.failure(later_s, patience_s=1.0)
        assert failed == f"node 1 did not join within 600 s; {why}"
    finally:
        remote.close()


@pytest.mark.parametrize("fast_s", [90.0, -90.0, 0.0])
def test_times_of_readings_are_those_of_the_heads_clock(
    intake: ReportIntake, fast_s: float
) -> None:
    """The clock of node 1 is fast by so many seconds. Ages of its GPUs must not depend on that."""
    there = time.time() + fast_s
    machine = MachineObservations(
        gpus=(GpuSnapshot(index=0, node=1, sampled_at=there - 1.0), GpuSnapshot(index=1, node=1)),
        gpu_verdicts=(Verdict(kind="gpu_heat", level="warning", cause="heat", began=there - 20.0),),
    )
    report = a_report(sent_at=there, machine=machine)
    intake.report("1", encode(ReportMessage(report)))
    reports = NodeReports(intake._nodes)
    sampled, never = reports.gpus()
    (verdict,) = reports.gpu_verdicts()
    assert sampled.sampled_at == pytest.approx(time.time() - 1.0, abs=30.0)
    assert never.sampled_at is None
    assert verdict.began == pytest.approx(time.time() - 20.0, abs=30.0)


@pytest.mark.parametrize(("waits", "kind"), [(0.6, "communication"), (0.05, "rank")])
def test_the_counts_of_other_machines_show_that_every_rank_waits(
    intake: ReportIntake, waits: float, kind: str
) -> None:
    """The counts come over a slow link. Rank 0 is on node 0 and sleeps 60 % of the time."""
    queue_dir = intake._run_dir.queue_dir(1)
    queue_dir.mkdir(parents=True, exist_ok=True)
    slot, meter = HeartbeatSlot(queue_dir, 0), LimitMeter(queue_dir)
    reports, state = NodeReports(intake._nodes), FoldState()
    gpu = GpuSnapshot(index=0, node=1, utilisation_percent=1e9, ranks=(1,))
    for second in range(13):
        for beat in range(10):
            slot.count(waits=beat < 6, moved=None, slept=False)
        counts = 10 * (second + 1), round(10 * (second + 1) * waits), 0, 0, 0
        machine = MachineObservations(activity={1: counts, 0: (0,) * 5, 7: counts}, gpus=(gpu,))
        report = a_report(machine=machine, ranks=(1, 0))
        assert isinstance(decode(intake.report("1", encode(ReportMessage(report)))), OrdersMessage)
        for rank in (0, 1):
            rows = steps(1, 1.0, first=second + 1, start_s=second)
            state = fold(state, rank, rows)
        activity = reports.activity()
        assert set(activity) == {0, 1}
        meter.update(float(second), True, {}, state, reports.gpus(), activity)
    assert meter.limit is not None
    assert meter.limit.kind == kind
    assert {load.gpu_percent for load in meter.loads(state)} == {None}


def test_what_a_machine_counted_before_the_first_report_is_left_out(intake: ReportIntake) -> None:
    """A new supervisor begins while rank 1, on node 1, has waited for hours."""
    queue_dir = intake._run_dir.queue_dir(1)
    queue_dir.mkdir(parents=True, exist_ok=True)
    meter, state = LimitMeter(queue_dir), FoldState()
    for second in range(13):
        state = fold(state, 1, steps(1, 1.0, first=second + 1, start_s=second))
        others = {1: RankActivity(9000 + 2 * second, 9000, 0, 0, 0)} if second else {}
        meter.update(float(second), True, {}, state, (), others)
    (load,) = meter.loads(state)
    assert (load.beats, load.waiting) == (22, 0)


def test_counts_that_cannot_be_are_refused(intake: ReportIntake) -> None:
    for counts in ((-1, 0, 0, 0, 0), (1 << 60, 0, 0, 0, 0)):
        machine = MachineObservations(activity={1: counts})
        message = ReportMessage(a_report(machine=machine, ranks=(1,)))
        answer = decode(intake.report("1", encode(message)))
        assert isinstance(answer, OrdersMessage)
        assert "damaged" in str(answer.orders.refusal)


def test_a_machine_that_does_not_answer_delays_only_an_end_without_force() -> None:
    ended, cut_off = (RemoteNode(number, NodeWatch()) for number in (1, 2))
    ended.watch.state, ended.report = NodeState.ENDED, a_report(engine_exit=EngineExit(exit_code=0))
    cut_off.watch.state, cut_off.report = NodeState.UNREACHABLE, a_report(2)
    reports = NodeReports({1: ended, 2: cut_off})
    assert not reports.engines_ended(of_all=True)
    assert reports.engines_ended(of_all=False)
    cut_off.watch.state = NodeState.CONNECTED
    assert not reports.engines_ended(of_all=False)
    cut_off.watch.state = NodeState.GONE
    assert reports.engines_ended(of_all=True)


@pytest.mark.parametrize(
    ("end", "failures", "last_line", "text"),
    [
        (EngineExit(error="its shim process was killed"), (), None, "its shim process was killed"),
        (EngineExit(signal=9), (), None, "signal 9"),
        (EngineExit(exit_code=2), (), None, "exit code 2"),
        (EngineExit(exit_code=1), ((3, -9),), None, "rank 3 was killed by signal 9"),
        (EngineExit(exit_code=1), ((3, 4),), None, "rank 3 exited with code 4"),
        (None, ((1, 1),), "ValueError: no", "rank 1 exited with code 1: ValueError: no"),
    ],
)
def test_an_engine_ended_by_its_first_failed_rank(
    end: EngineExit | None, failures: tuple[tuple[int, int], ...], last_line: str | None, text: str
) -> None:
    failed = tuple(WorkerFailure(rank=r, exit_code=code, first=True) for r, code in failures)
    assert end_text(a_report(engine_exit=end, failures=failed, last_line=last_line)) == text


class _Agent(NodeAgent):
    """An agent with a real lock, whose attempt ends as it is told."""

    def __init__(self, lock: int, end: AttemptPlan | Exception | None) -> None:
        self.live = Mock(lock=lock)
        self._link, self._barrier, self._tails, self._probe = Mock(), Mock(), Mock(), None
        self._acknowledged = {}
        vars(self)["_supervise"] = Mock(return_value=None)
        vars(self)["_finish"] = Mock(side_effect=[end])


@pytest.mark.parametrize(
    ("end", "holds_lock"), [(AttemptPlan(), True), (None, False), (OSError("injected"), True)]
)
def test_an_attempt_is_closed_once_and_its_lock_is_kept_for_who_continues(
    end: AttemptPlan | Exception | None, holds_lock: bool, tmp_path: Path
) -> None:
    path = tmp_path / "supervisor.lock"
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    write_lock_text(lock, path)
    agent = _Agent(lock, end)
    agent.live.close = closed = Mock()  # type: ignore[method-assign]
    if isinstance(end, Exception):
        with pytest.raises(OSError, match="injected"):
            agent.run()
    else:
        assert agent.run() is end
    assert closed.call_count == 1
    assert bool(path.read_text()) is holds_lock
