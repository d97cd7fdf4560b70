"""State of a machine by the age of its reports and by probes."""

from __future__ import annotations

import pytest

from ltui.training.nodes.messages import (
    HEAD_LOST_S,
    HEAD_LOST_VARIABLE,
    NODE_GONE_S,
    NODE_GONE_VARIABLE,
    head_lost_s,
    node_gone_s,
)
from ltui.training.nodes.node_watch import LinkCut, NodeWatch, ProbeResult
from ltui.training.state.run_snapshot import NodeState


def connected() -> NodeWatch:
    """Return a machine that reported at 10 s and answers probes."""
    watch = NodeWatch(gone_after_s=60.0)
    watch.heard(10.0, "10.0.0.2", 7)
    watch.probed(ProbeResult.ACCEPTED, 10.0)
    watch.heard(10.0, "10.0.0.2", 7)
    assert watch.update(10.1, ended=False) == "joined"
    return watch


@pytest.mark.parametrize(
    ("result", "state", "word"),
    [
        (ProbeResult.UNREACHABLE, NodeState.UNREACHABLE, "its link is cut or it is down"),
        (ProbeResult.REFUSED, NodeState.AGENT_DEAD, "its agent has ended 5 s ago"),
        (ProbeResult.ACCEPTED, NodeState.FROZEN, "its agent does not answer for 5 s"),
    ],
)
def test_the_probe_tells_why_a_machine_is_silent(
    result: ProbeResult, state: NodeState, word: str
) -> None:
    watch = connected()
    assert watch.target(12.5) == ("10.0.0.2", 7)
    watch.probed(result, 13.0)
    assert word in (watch.update(15.0, ended=False) or "")
    assert watch.state is state
    watch.heard(16.0, "10.0.0.2", 7)
    assert watch.update(16.1, ended=False) == "reports again"
    was_cut = state is NodeState.UNREACHABLE
    assert watch.last_cut == (LinkCut(10.0, 16.0) if was_cut else None)


def test_an_unreachable_machine_is_gone_after_the_limit() -> None:
    watch = connected()
    watch.probed(ProbeResult.UNREACHABLE, 13.0)
    states = []
    for now_s in (69.0, 71.0):
        watch.update(now_s, ended=False)
        states.append(watch.state)
    assert states == [NodeState.UNREACHABLE, NodeState.GONE]


def test_a_machine_that_answers_without_an_agent_is_not_called_unreachable() -> None:
    watch = connected()
    watch.probed(ProbeResult.REFUSED, 13.0)
    note = watch.update(71.0, ended=False)
    assert watch.state is NodeState.GONE
    assert note == "its agent has ended 61 s ago, its machine answers"


def test_an_agent_that_is_about_to_reconnect_after_a_cut_is_not_frozen() -> None:
    watch = connected()
    watch.probed(ProbeResult.UNREACHABLE, 20.0)
    watch.probed(ProbeResult.ACCEPTED, 21.0)
    states = []
    for now_s in (22.0, 36.0):
        watch.update(now_s, ended=False)
        states.append(watch.state)
    assert states == [NodeState.UNREACHABLE, NodeState.FROZEN]
    watch.heard(37.0, "10.0.0.2", 7)
    assert watch.last_cut == LinkCut(10.0, 37.0)


def test_a_probe_that_began_before_a_report_is_ignored() -> None:
    watch = connected()
    watch.probed(ProbeResult.UNREACHABLE, 39.0)
    watch.heard(40.5, "10.0.0.2", 7)
    watch.probed(ProbeResult.UNREACHABLE, 40.0)
    watch.heard(41.0, "10.0.0.2", 7)
    assert watch.last_cut == LinkCut(10.0, 40.5)


def test_late_reports_are_no_cut() -> None:
    watch = connected()
    watch.heard(12.5, "10.0.0.2", 7)
    assert watch.last_cut is None


def test_limits_of_silence_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (NODE_GONE_VARIABLE, HEAD_LOST_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    assert (node_gone_s(), head_lost_s()) == (NODE_GONE_S, HEAD_LOST_S)
    monkeypatch.setenv(NODE_GONE_VARIABLE, "20")
    monkeypatch.setenv(HEAD_LOST_VARIABLE, "45.5")
    assert (node_gone_s(), head_lost_s()) == (20.0, 45.5)
    for text in ("-1", "0", "soon", "inf", "nan"):
        monkeypatch.setenv(NODE_GONE_VARIABLE, text)
        assert node_gone_s() == NODE_GONE_S
