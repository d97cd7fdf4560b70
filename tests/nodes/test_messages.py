"""The messages between machines and head survive their encoding, and damage is refused.

How often agents report depends on the number of machines.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ltui.training.diagnosis.evidence import HostEvidence
from ltui.training.diagnosis.judge_input import Death
from ltui.training.lifecycle.elastic_log import WorkerFailure
from ltui.training.lifecycle.run_processes import EngineExit
from ltui.training.lifecycle.stop_escalation import StopEscalation
from ltui.training.lifecycle.supervisor_client import AttemptPlan
from ltui.training.nodes.messages import (
    JoinDecline,
    JoinOffer,
    JoinRefusal,
    JoinRequest,
    MachineObservations,
    Message,
    MessageError,
    NodeReport,
    Orders,
    OrdersMessage,
    RankObservations,
    ReportMessage,
    decode,
    encode,
    merge_ranks,
    readings_period_s,
    report_period_s,
)
from ltui.training.nodes.node_watch import SILENT_AFTER_S
from ltui.training.nodes.queue_tail import LogPart, QueueChunk, QueuePosition
from ltui.training.process.identity import ProcessIdentity
from ltui.training.process.process_activity import RankUsage


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
            dead=frozenset({2}), deaths={2: Death(signal="SIGKILL")}, stopped_workers={3: (8, 9)}
        ),
        machine=MachineObservations(
            processes={3: ProcessIdentity(7, 8)},
            usage={2: RankUsage(50.0, 1 << 20, None), 3: RankUsage(float("inf"), 1, None)},
            host=HostEvidence(host="b", cores=2),
        ),
    )


CHUNK = QueueChunk(2**64 - 1, 2, 4096, 8, 0, 1, bytes(8), b"pulse")
LOG = LogPart(name="rank-00002.log", at=5, data=b"line\xff")
JOIN = JoinRequest(version="1.0", host="b", machine="id of b", pid=7)
OFFER = JoinOffer(
    run_id="brave-owl-1", node=1, spec="id: x", versions={"python": "3.11"}, files=("/d",)
)
MESSAGES: list[Message] = [
    ReportMessage(report(), b"rows", b"{}", {2: CHUNK, 1000: CHUNK}, (LOG,)),
    OrdersMessage(
        Orders(
            attempt=3,
            stop=StopEscalation(-1.5, 60.0, telemetry=True),
            logs={"engine.log": 12},
            plan=AttemptPlan(number=3, resume_from=Path("/c"), changes=("a=1",)),
        ),
        b"rows",
        {3: QueuePosition(2**64 - 1, 5), 1000: QueuePosition(7, 0)},
    ),
    JOIN,
    replace(JOIN, node=2),
    OFFER,
    JoinRefusal(what="no."),
    JoinRefusal(what="no.", remedy="yes."),
    JoinDecline(node=1, machine="id of b", reason="no."),
]


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_survives_its_encoding(message: Message) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xff",
        b"\x90",
        b"\x91" * 200_000,
        b"\x81\xa4type\xa6report",
        b"\x81\xa4type\xa6letter",
        encode(MESSAGES[0]) + b"\x00",
        encode(JOIN).replace(b"\xa3pid\x07", b"\xa3pid\xa17"),
        encode(OFFER).replace(b"\x91\xa2/d", b"\x91\x01"),
        *(encode(MESSAGES[0])[:cut] for cut in range(1, 400, 7)),
        encode(ReportMessage(report(), queues={-1: CHUNK})),
    ],
)
def test_damaged_messages_are_refused(payload: bytes) -> None:
    with pytest.raises(MessageError, match="damaged"):
        decode(payload)


def test_a_file_name_that_is_not_utf8() -> None:
    """The path of the checkpoint arrives as it is; texts for people lose what no text can hold."""
    plan = AttemptPlan(resume_from=Path("/caf\udce9/c"), changes=("data.root=/caf\udce9",))
    orders = OrdersMessage(Orders(plan=plan), b"rows", {3: QueuePosition(7, 0)})
    assert decode(encode(orders)) == OrdersMessage(
        Orders(plan=replace(plan, changes=("data.root=/caf?",))), b"rows", {3: QueuePosition(7, 0)}
    )
    assert AttemptPlan.from_text(plan.to_text()) == plan


def test_the_plan_of_the_head_names_no_files_that_an_agent_moves_or_removes() -> None:
    common = AttemptPlan(number=3, resume_from=Path("/c"), resume_step=7, changes=("a=1",))
    plan = replace(common, recover=True, spec_path=Path("/home/u/spec.yaml"), skipped=("x",))
    assert plan.on_another_node() == common


@given(payload=st.binary(max_size=200))
def test_random_messages_are_refused(payload: bytes) -> None:
    with pytest.raises(MessageError):
        decode(payload)


def test_observations_of_machines_are_merged() -> None:
    own = RankObservations(stopped_pids={0: 11}, oom_kills=None)
    other = RankObservations(dead=frozenset({2}), silent_s={3: 1.0}, oom_kills=2)
    merged = merge_ranks([own, other])
    assert merged == RankObservations(
        dead=frozenset({2}), stopped_pids={0: 11}, silent_s={3: 1.0}, oom_kills=2
    )


def test_two_machines_report_four_times_a_second() -> None:
    assert report_period_s(2, urgent=False) == 0.25
    assert report_period_s(2, urgent=True) < 0.05
    assert readings_period_s(2) == 1.0


def test_many_machines_report_less_often_and_none_is_silent_if_one_report_is_lost() -> None:
    assert 128 / report_period_s(128, urgent=False) <= 128
    assert 128 / report_period_s(128, urgent=True) <= 700
    for nodes in (2, 32, 128, 2000):
        for urgent in (False, True):
            assert 2 * report_period_s(nodes, urgent=urgent) < SILENT_AFTER_S
