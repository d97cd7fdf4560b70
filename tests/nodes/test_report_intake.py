"""What the head makes of the reports of an agent."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ltui.training.config.run_spec import Nodes, RunSpec
from ltui.training.nodes.barrier_mirror import BarrierMirror
from ltui.training.nodes.link_wire import MAX_PER_MINUTE
from ltui.training.nodes.messages import (
    JoinOffer,
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
from ltui.training.state.run_snapshot import GpuSnapshot, Verdict
from ltui.training.store.run_directory import RunDir
from ltui.training.supervise.node_reports import NodeReports, RemoteNode, ReportIntake


def offer(node: int) -> JoinOffer:
    nodes = Nodes(count=2, rank=0, address="127.0.0.1", port=1)
    spec = RunSpec(id="r", name="r", created_at=0.0, cwd="/", python="python", nodes=nodes)
    return make_offer(spec, node, {}, Orders(attempt=1))


def test_an_agent_that_is_refused_again_and_again_does_not_fill_the_history(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    places = NodePlaces(run_id="r", count=2, version=own_version(), offer=offer)
    intake = ReportIntake(
        run_dir, Orders(attempt=1), {}, places, BarrierMirror(run_dir.queue_dir(1))
    )
    for number in range(1000):
        other = ReportMessage(
            NodeReport(node=1, version=f"{number // 2}", host="b", machine_id="m")
        )
        answer = decode(intake.report("1", encode(other)))
        assert isinstance(answer, OrdersMessage)
        assert f"it runs ltui {number // 2}" in (answer.orders.refusal or "")
    assert len(intake.take_events()) == MAX_PER_MINUTE
    intake.close()


@pytest.mark.parametrize("fast_s", [90.0, -90.0, 0.0])
def test_times_of_readings_are_those_of_the_heads_clock(tmp_path: Path, fast_s: float) -> None:
    """The clock of node 1 is fast by so many seconds. Ages of its GPUs must not depend on that."""
    run_dir, node = RunDir(tmp_path), RemoteNode(1, NodeWatch())
    places = NodePlaces(run_id="r", count=2, version=own_version(), offer=offer)
    barrier = BarrierMirror(run_dir.queue_dir(1))
    intake = ReportIntake(run_dir, Orders(attempt=1), {1: node}, places, barrier)
    there = time.time() + fast_s
    machine = MachineObservations(
        gpus=(GpuSnapshot(index=0, node=1, sampled_at=there - 1.0), GpuSnapshot(index=1, node=1)),
        gpu_verdicts=(Verdict(kind="gpu_heat", level="warning", cause="heat", began=there - 20.0),),
    )
    report = NodeReport(
        node=1,
        version=own_version(),
        host="b",
        machine_id="m",
        attempt=1,
        sent_ns=time.monotonic_ns(),
        sent_at=there,
        machine=machine,
    )
    intake.report("1", encode(ReportMessage(report)))
    intake.close()
    reports = NodeReports({1: node})
    sampled, never = reports.gpus()
    (verdict,) = reports.gpu_verdicts()
    assert sampled.sampled_at == pytest.approx(time.time() - 1.0, abs=30.0)
    assert never.sampled_at is None
    assert verdict.began == pytest.approx(time.time() - 20.0, abs=30.0)
