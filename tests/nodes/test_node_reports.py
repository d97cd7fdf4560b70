"""What the head derives from the last reports of all machines."""

from __future__ import annotations

import time

from ltui.training.lifecycle.run_processes import EngineExit
from ltui.training.nodes.messages import NodeReport
from ltui.training.nodes.node_watch import NodeWatch
from ltui.training.state.run_snapshot import NodeState
from ltui.training.supervise.node_reports import NodeReports, RemoteNode


def reporting(number: int, state: NodeState, engine_exit: EngineExit | None) -> RemoteNode:
    report = NodeReport(
        node=number,
        version="1",
        host=f"machine-{number}",
        machine_id=str(number),
        pid=number,
        attempt=1,
        sent_ns=time.monotonic_ns(),
        sent_at=time.time(),
        engine_exit=engine_exit,
    )
    watch = NodeWatch()
    watch.state = state
    return RemoteNode(number, watch, report=report)


def test_a_machine_that_does_not_answer_delays_only_an_end_without_force() -> None:
    ended = reporting(1, NodeState.ENDED, EngineExit(exit_code=0))
    cut_off = reporting(2, NodeState.UNREACHABLE, None)
    reports = NodeReports({1: ended, 2: cut_off})
    assert not reports.engines_ended(of_all=True)
    assert reports.engines_ended(of_all=False)
    cut_off.watch.state = NodeState.CONNECTED
    assert not reports.engines_ended(of_all=False)
    cut_off.watch.state = NodeState.GONE
    assert reports.engines_ended(of_all=True)
