"""The messages between agents and head survive their encoding, and damage is refused."""

from __future__ import annotations

import pytest

from ltui.training.diagnosis.evidence import HostEvidence
from ltui.training.diagnosis.judge_input import Death
from ltui.training.lifecycle.elastic_log import WorkerFailure
from ltui.training.lifecycle.run_processes import EngineExit
from ltui.training.nodes.messages import (
    LogPart,
    MachineObservations,
    NodeReport,
    Orders,
    OrdersMessage,
    RankObservations,
    ReportMessage,
    StopOrder,
    merge_ranks,
)
from ltui.training.process.identity import ProcessIdentity
from ltui.training.process.rank_usage import RankUsage


def report() -> NodeReport:
    return NodeReport(
        node=1,
        version="1",
        host="b",
        attempt=2,
        ranks=(2, 3),
        engine_exit=EngineExit(exit_code=1, killed=(7,)),
        failures=(WorkerFailure(2, -9, True),),
        observations=RankObservations(
            dead=(2,), deaths={2: Death(signal="SIGKILL")}, stopped_workers={3: (8, 9)}
        ),
        machine=MachineObservations(
            processes={3: ProcessIdentity(7, 8)},
            usage={2: RankUsage(50.0, 1 << 20, None)},
            host=HostEvidence(host="b", cores=2),
        ),
        logs=(LogPart(name="rank-00002.log", at=5),),
    )


def test_a_report_survives_its_encoding() -> None:
    message = ReportMessage(report(), b"rows", b"{}", b"queues", [(report().logs[0], b"line")])
    assert ReportMessage.decode(message.encode()) == message


def test_orders_survive_their_encoding() -> None:
    orders = Orders(
        attempt=3,
        stop=StopOrder(elapsed_s=1.5, timeout_s=60.0, telemetry=True),
        logs={"engine.log": 12},
        changes=("a=1",),
    )
    message = OrdersMessage(orders, b"rows", b"positions")
    assert OrdersMessage.decode(message.encode()) == message


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"\xff"],
        [b"[]", b"", b"", b""],
        [b"[" * 200_000, b"", b"", b""],
        [b'{"protocol": 99, "node": 1}', b"", b"", b""],
        [b'{"protocol": 1}', b"", b"", b""],
        ReportMessage(report(), logs=[]).encode()[:-1],
    ],
)
def test_damaged_reports_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(ValueError, match=r"."):
        ReportMessage.decode(frames)


def test_observations_of_machines_are_merged() -> None:
    own = RankObservations(stopped_pids={0: 11}, oom_kills=None)
    other = RankObservations(dead=(2,), silent_s={3: 1.0}, oom_kills=2)
    merged = merge_ranks([own, other])
    assert merged == RankObservations(
        dead=(2,), stopped_pids={0: 11}, silent_s={3: 1.0}, oom_kills=2
    )
