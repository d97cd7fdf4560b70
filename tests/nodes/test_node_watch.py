"""State of a machine by the age of its reports and by probes, and offsets of its clocks.

The probes are of real sockets and real processes on loopback.
"""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ltui.training.nodes.messages import (
    HEAD_LOST_S,
    HEAD_LOST_VARIABLE,
    NODE_GONE_S,
    NODE_GONE_VARIABLE,
    head_lost_s,
    node_gone_s,
)
from ltui.training.nodes.node_watch import (
    ClockOffset,
    LinkCut,
    NodeWatch,
    ProbeResult,
    ProbeSocket,
    probe,
    probe_all,
)
from ltui.training.state.run_snapshot import NodeState
from tests.nodes.addresses import LOOPBACKS
from tests.nodes.link_fixtures import freeze


def connected() -> NodeWatch:
    """Return a machine that reported at 10 s and answers probes."""
    watch = NodeWatch(gone_after_s=60.0)
    watch.heard(10.0, "10.0.0.2", 7)
    watch.probed(ProbeResult.ACCEPTED, 10.0)
    watch.heard(10.0, "10.0.0.2", 7)
    assert watch.update(10.1, ended=False) == "joined"
    return watch


def states_at(watch: NodeWatch, *times_s: float) -> list[NodeState]:
    states = []
    for now_s in times_s:
        watch.update(now_s, ended=False)
        states.append(watch.state)
    return states


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
    assert states_at(watch, 69.0, 71.0) == [NodeState.UNREACHABLE, NodeState.GONE]


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
    assert states_at(watch, 22.0, 36.0) == [NodeState.UNREACHABLE, NodeState.FROZEN]
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


MS, SECOND = 10**6, 10**9


class Offsets(NamedTuple):
    mono_ns: int
    wall_s: float


class Clocks:
    """A head and an agent, whose reports arrive after a delay."""

    def __init__(self, mono_ns: int = 0, skew_s: float = 0.0) -> None:
        self.now_ns = 1000 * SECOND
        self.mono_ns, self.skew_s = mono_ns, skew_s
        self.offset = ClockOffset()

    def report(self, delay_ns: int = MS // 5, after_ns: int = SECOND // 4) -> Offsets:
        self.now_ns += after_ns
        sent_ns, arrived_ns = self.now_ns - delay_ns, self.now_ns
        self.offset.update(
            sent_ns - self.mono_ns,
            1.7e9 + sent_ns / 1e9 + self.skew_s,
            arrived_ns,
            1.7e9 + arrived_ns / 1e9,
        )
        return Offsets(self.offset.monotonic_ns, self.offset.wall_s)


@given(
    mono_s=st.integers(-(10**6), 10**6),
    skew_s=st.floats(-100, 100),
    delays=st.lists(st.integers(0, 3 * SECOND), min_size=1, max_size=100),
)
def test_the_least_delay_counts(mono_s: int, skew_s: float, delays: list[int]) -> None:
    clocks = Clocks(mono_s * SECOND, skew_s)
    for delay_ns in (*delays, 0):
        offsets = clocks.report(delay_ns, after_ns=SECOND // 100)
    assert 0 <= offsets.mono_ns - mono_s * SECOND <= 2 * MS
    assert offsets.wall_s == pytest.approx(-skew_s, abs=0.02)


def test_messages_after_a_cut_of_the_link_do_not_shift_the_times() -> None:
    clocks = Clocks(-7 * SECOND, 90.0)
    before = [clocks.report() for _ in range(100)][-1]
    clocks.now_ns += 120 * SECOND
    for delay_s in range(120, 0, -1):  # What was sent during the cut arrives at once.
        assert clocks.report(delay_s * SECOND, after_ns=0) == before
    for _ in range(100):
        assert clocks.report() == before
    assert -clocks.offset.wall_s == pytest.approx(90.0, abs=0.01)


def test_a_change_is_published_only_if_it_matters() -> None:
    clocks, dice = Clocks(), random.Random(1)
    clocks.report(MS // 10)
    published = {clocks.report(dice.randint(MS // 10, 5 * MS)) for _ in range(2000)}
    assert len(published) == 1


def test_slow_drift_is_followed() -> None:
    clocks = Clocks()
    for _ in range(4 * 3600):
        clocks.mono_ns += 50_000 // 4  # 50 millionths
        offsets = clocks.report()
    assert abs(offsets.mono_ns - clocks.mono_ns) < 6 * MS


@pytest.mark.parametrize("jump_s", [-3600, -60, 60, 3600])
def test_a_suspended_machine_is_noticed(jump_s: int) -> None:
    clocks = Clocks(5 * SECOND)
    for _ in range(100):
        clocks.report()
    clocks.mono_ns += jump_s * SECOND
    for _ in range(50):  # 12 seconds
        offsets = clocks.report()
    assert abs(offsets.mono_ns - clocks.mono_ns) <= 3 * MS


@pytest.mark.parametrize("jump_s", [-90.0, 90.0])
def test_a_jump_of_the_wall_clock_is_followed_and_moves_no_age(jump_s: float) -> None:
    clocks = Clocks(5 * SECOND)
    before = [clocks.report() for _ in range(20)][-1]
    clocks.skew_s += jump_s
    offsets = clocks.report(delay_ns=4 * SECOND)
    assert offsets.mono_ns == before.mono_ns
    assert offsets.wall_s == pytest.approx(before.wall_s - jump_s, abs=0.02)


# -- probes ----------------------------------------------------------------------------------------

_AGENT = """
import sys, time
from ltui.training.nodes.node_watch import ProbeSocket
kept = ProbeSocket(sys.argv[1])
print(kept.port, flush=True)
time.sleep(600)
"""


@pytest.fixture
def kept() -> Iterator[ProbeSocket]:
    made = ProbeSocket("127.0.0.1")
    yield made
    made.close()


@pytest.mark.parametrize("address", LOOPBACKS)
def test_a_frozen_process_accepts_and_a_dead_one_refuses(address: str) -> None:
    command = [sys.executable, "-c", _AGENT, address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as agent:
        try:
            assert agent.stdout is not None
            port = int(agent.stdout.readline())
            assert probe(address, port, 10.0) is ProbeResult.ACCEPTED
            freeze(agent.pid)
            assert probe(address, port, 10.0) is ProbeResult.ACCEPTED
        finally:
            agent.kill()
    assert probe(address, port, 10.0) is ProbeResult.REFUSED


def test_many_probes_never_fill_the_queue_of_a_frozen_process(kept: ProbeSocket) -> None:
    results = {probe("127.0.0.1", kept.port, 10.0) for _ in range(400)}
    assert results == {ProbeResult.ACCEPTED}


def test_a_machine_that_does_not_answer_is_unreachable() -> None:
    # A listener whose queue is full answers no further connection, as a machine that is down.
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address: tuple[str, int] = listener.getsockname()
        with contextlib.ExitStack() as stack:
            stack.enter_context(socket.create_connection(address, 10.0))
            for _ in range(8):
                connection = stack.enter_context(socket.socket())
                connection.setblocking(False)
                connection.connect_ex(address)
            assert probe(*address, 0.3) is ProbeResult.UNREACHABLE


def test_all_targets_are_probed_at_the_same_time(kept: ProbeSocket) -> None:
    ended = ProbeSocket("127.0.0.1")
    targets = dict.fromkeys(range(20), ("127.0.0.1", kept.port)) | {7: ("127.0.0.1", ended.port)}
    ended.close()
    results = probe_all({**targets, "no address": ("host.invalid", 1)}, 10.0)
    assert results.pop("no address") is ProbeResult.UNREACHABLE
    assert results.pop(7) is ProbeResult.REFUSED
    assert set(results.values()) == {ProbeResult.ACCEPTED}


def test_only_the_given_address_is_bound(kept: ProbeSocket) -> None:
    assert probe("127.0.0.2", kept.port, 10.0) is ProbeResult.REFUSED
