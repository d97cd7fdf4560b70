"""Copies of the barrier table: files, restarts, ranks that end, and damaged frames.

``tests/rank/test_delayed_views.py`` shows that late copies never part the ranks.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ltui.training.nodes import barrier_mirror
from ltui.training.nodes.barrier_mirror import BarrierMirror, StopPlanCopy, TableCopy, unpack_copy
from ltui.training.rank.coordination.step_consensus import (
    DEPARTED,
    Action,
    BarrierTable,
    Move,
    boundary_position,
    passed_state,
    table_name,
    waiting_state,
)
from tests.waiting import wait_for

HERE = boundary_position(1, 10)


class Node:
    """The queue folder of a node and its supervisor or agent."""

    def __init__(self, folder: Path, ranks: range, world: int) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.ranks, self.world = folder, ranks, world
        self.tables = self.start(0, 29500)
        self.mirror = BarrierMirror(folder)

    def start(self, restarts: int, group: int) -> list[BarrierTable]:
        path = self.folder / table_name(restarts, self.world, group)
        self.tables = [BarrierTable(path, rank, self.world) for rank in self.ranks]
        return self.tables


@pytest.fixture(autouse=True)
def fresh_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(barrier_mirror, "_OPEN_READ_S", -1.0)


@pytest.fixture
def nodes(tmp_path: Path) -> list[Node]:
    return [Node(tmp_path / "0", range(2), 4), Node(tmp_path / "1", range(2, 4), 4)]


def exchange(nodes: list[Node]) -> None:
    head, agent = nodes
    head.mirror.merge(agent.mirror.export(), 1)
    agent.mirror.merge(head.mirror.export(1))


def set_acted(nodes: list[Node], number: int) -> None:
    for node in nodes:
        wait(node, number)
        for table in node.tables:
            table.set_acted(number)


def wait(node: Node, number: int, position: int = HERE) -> None:
    for table in node.tables:
        table.set_seen(number)
        table.set_state(waiting_state(position))


def test_a_request_is_carried_out_on_both_nodes(nodes: list[Node]) -> None:
    head, agent = nodes
    exchange(nodes)
    assert not head.mirror.is_open()
    number = head.tables[0].publish(Action.CHECKPOINT, 77)
    assert head.mirror.is_open()
    wait(head, number)
    assert head.mirror.missing_ranks() == [2, 3]
    exchange(nodes)
    assert agent.tables[1].request() == (number, Action.CHECKPOINT)
    assert agent.tables[1].control_id() == 77
    assert agent.mirror.is_open()
    wait(agent, number)
    assert head.tables[0].next_move(HERE, number) is Move.WAIT
    exchange(nodes)
    assert head.mirror.missing_ranks() == []
    for table in (*head.tables, *agent.tables):
        assert table.next_move(HERE, number) is Move.ACT
        table.set_acted(number)
    assert not head.tables[0].all_acted()
    exchange(nodes)
    assert head.tables[0].all_acted()
    for table in head.tables:
        table.set_save_result(1, ok=True)
    assert head.mirror.is_open()
    exchange(nodes)
    for table, ok in zip(agent.tables, (True, False), strict=True):
        table.set_save_result(1, ok=ok)
    exchange(nodes)
    assert head.tables[0].save_results(1) is False
    assert agent.tables[0].save_results(1) is False
    assert not head.mirror.is_open()
    assert not agent.mirror.is_open()


def test_a_planned_stop_is_replaced_and_cancelled_everywhere(nodes: list[Node]) -> None:
    head, agent = nodes
    old = b""
    for stop_at, epochs in ((HERE, 0), (0, 3), (0, 0)):
        head.tables[0].plan_stop(stop_at, epochs)
        frame = head.mirror.export()
        agent.mirror.merge(frame)
        if old:
            agent.mirror.merge(old)  # a late copy
        old = frame
        words = agent.tables[0].words
        assert (words[BarrierTable.STOP_AT], words[BarrierTable.STOP_EPOCHS]) == (stop_at, epochs)
    words = head.tables[0].words
    words[BarrierTable.PLAN_VERSION] += 1
    words[BarrierTable.STOP_AT] = HERE
    agent.mirror.merge(head.mirror.export())
    assert not agent.tables[0].is_stop_planned(HERE), "a plan that is being written is not copied"


def test_own_rows_are_never_written(nodes: list[Node]) -> None:
    head, agent = nodes
    wait(agent, 5)
    exchange(nodes)
    for table in agent.tables:
        table.set_state(0)  # the ranks start again
    exchange(nodes)
    exchange(nodes)
    column = agent.tables[0].words[BarrierTable.ROW + BarrierTable.STATE :: BarrierTable.ROW]
    assert column.tolist() == [0, 0, 0, 0]
    pids = head.tables[0].words[BarrierTable.ROW + BarrierTable.PID :: BarrierTable.ROW].tolist()
    assert pids == [os.getpid(), os.getpid(), 0, 0]


def test_rows_of_earlier_workers_are_ignored(nodes: list[Node]) -> None:
    """Torch elastic counts restarts on each node. Only the worker group is the same on both."""
    head, agent = nodes
    for table in agent.tables:
        table.set_state(DEPARTED)
    late = agent.mirror.export()
    head.start(1, 29611)
    assert not head.mirror.merge(late, 1)
    number = head.tables[0].publish(Action.STOP)
    wait(head, number)
    assert head.tables[0].next_move(HERE, number) is Move.WAIT
    assert not head.mirror.merge(agent.mirror.export(), 1)
    agent.start(0, 29611)
    wait(agent, number)
    exchange(nodes)
    assert head.tables[0].next_move(HERE, number) is Move.ACT


def test_a_rank_that_starts_late_is_waited_for(tmp_path: Path) -> None:
    head = Node(tmp_path / "0", range(2), 4)
    number = head.tables[0].publish(Action.STOP)
    wait(head, number)
    (tmp_path / "1").mkdir()
    mirror = BarrierMirror(tmp_path / "1")
    assert mirror.export() == b""
    assert not mirror.merge(head.mirror.export()), "there is no table yet"
    assert head.tables[0].next_move(HERE, number) is Move.WAIT
    agent = Node(tmp_path / "1", range(2, 4), 4)
    exchange([head, agent])
    assert agent.tables[0].request() == (number, Action.STOP)
    wait(agent, number)
    exchange([head, agent])
    assert head.tables[0].next_move(HERE, number) is Move.ACT


def test_an_ended_rank_of_another_node_is_noticed(tmp_path: Path) -> None:
    head = Node(tmp_path / "0", range(1), 2)
    (tmp_path / "1").mkdir()
    path = tmp_path / "1" / table_name(0, 2, 29500)
    code = (
        "import sys; from pathlib import Path; "
        "from ltui.training.rank.coordination.step_consensus import BarrierTable; "
        "BarrierTable(Path(sys.argv[1]), 1, 2); sys.stdin.read()"
    )
    rank = subprocess.Popen([sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE)
    mirror = BarrierMirror(tmp_path / "1")
    wait_for(lambda: head.mirror.merge(mirror.export(), 1), seconds=60)
    assert head.tables[0].dead_peers() == []
    rank.communicate()

    def dead_peers() -> list[int]:
        head.mirror.merge(mirror.export(), 1)
        return head.tables[0].dead_peers()

    assert wait_for(dead_peers, seconds=60) == [1]


def test_the_ranks_that_have_not_saved_yet_are_missing(nodes: list[Node]) -> None:
    head, agent = nodes
    number = head.tables[0].publish(Action.CHECKPOINT)
    exchange(nodes)
    set_acted(nodes, number)
    exchange(nodes)
    assert head.mirror.missing_ranks() == []
    for table in (*head.tables, agent.tables[0]):
        table.set_save_result(1, ok=True)
    exchange(nodes)
    assert head.mirror.missing_ranks() == [3]
    agent.tables[1].set_state(DEPARTED)
    exchange(nodes)
    assert head.mirror.missing_ranks() == []


def test_nothing_is_published_while_a_node_is_unreachable(nodes: list[Node]) -> None:
    head, agent = nodes
    head.tables[0].plan_stop(HERE, 0)
    exchange(nodes)
    for node in nodes:
        node.mirror.set_unreachable(1)
        assert not node.tables[0].can_publish()
        assert not node.tables[0].is_stop_planned(HERE), "training goes on"
        node.mirror.set_unreachable(0)
        assert node.tables[0].can_publish()
        assert node.tables[0].is_stop_planned(HERE)
    exchange(nodes)
    head.mirror.set_unreachable(1)
    exchange(nodes)
    assert agent.tables[0].can_publish(), "each node finds out by itself"


def test_a_pause_needs_no_fast_exchange(nodes: list[Node]) -> None:
    """Only the next request matters then, and the head sends that at once."""
    number = nodes[0].tables[0].publish(Action.PAUSE)
    set_acted(nodes, number)
    exchange(nodes)
    exchange(nodes)
    assert not any(node.mirror.is_open() for node in nodes)


def test_copies_of_1024_ranks_are_small(tmp_path: Path) -> None:
    head = Node(tmp_path / "0", range(1024), 1024)
    number = head.tables[0].publish(Action.STOP)
    dice = random.Random(0)
    for table in head.tables:
        table.set_seen(number)
        table.set_state(waiting_state(HERE) - dice.choice([0, 0, 0, 1]))
    assert len(head.mirror.export()) < 4000


def test_copying_while_ranks_run_never_shows_a_row_ahead_of_itself(tmp_path: Path) -> None:
    """In every copy, a rank that has passed a boundary after an action has also acted."""
    source, target = Node(tmp_path / "0", range(1), 2), Node(tmp_path / "1", range(1, 2), 2)
    done = threading.Event()

    def run() -> None:
        number = 0
        while not done.is_set():
            number += 1
            position = boundary_position(1, number)
            table = source.tables[0]
            table.set_seen(number)
            table.set_state(waiting_state(position))
            table.set_acted(number)
            table.set_state(passed_state(position))

    thread = threading.Thread(target=run)
    thread.start()
    words, row = target.tables[0].words, BarrierTable.ROW
    steps = set()
    try:
        for _ in range(200):
            target.mirror.merge(source.mirror.export(), 1)
            seen, state, acted = (
                words[row + word]
                for word in (BarrierTable.SEEN, BarrierTable.STATE, BarrierTable.ACTED)
            )
            step = (state >> 1 >> 19) & ((1 << 30) - 1)
            assert acted >= (step if state & 1 else step - 1)
            assert step >= seen - 1
            steps.add(step)
    finally:
        done.set()
        thread.join()
    assert len(steps) > 1, "the rank did not run between two copies"


@given(frame=st.binary(max_size=300))
def test_random_frames_are_refused(frame: bytes) -> None:
    with pytest.raises(ValueError, match="damaged"):
        unpack_copy(frame)


@pytest.mark.parametrize(
    "content",
    [
        (),
        ((2, 1), None, False),
        ((2, 1), {"request": 0, "control_id": 0, "plan": (0, 0, 0), "ranks": [0]}, False),
        ((2, 1), TableCopy(0, 0, StopPlanCopy(), [0], [[1]] * 4), False),
        ((2, 1), TableCopy(0, 0, StopPlanCopy(), [0], [[1]] * 4 + [[1, 2]]), False),
        ((2, 1), TableCopy(0, 0, StopPlanCopy(), [2], [[1]] * 5), False),
        ((2, 1), TableCopy(0, 0, StopPlanCopy(), [-1], [[1]] * 5), False),
        ((2, 1), TableCopy(0, 0, StopPlanCopy(), ["0"], [[1]] * 5), False),  # type: ignore[list-item]
        b"\x93\x92\x02\x01\x81\xa1x" + b"\x91" * 100_000 + b"\x00\xc2",
        bytes((64 << 20) + 1),
    ],
    ids=(
        "empty", "no-copy", "no-columns", "few-columns", "long-column", "rank-of-another",
        "negative-rank", "text", "nested-too-deeply", "too-large",
    ),
)  # fmt: skip
def test_a_frame_with_wrong_content_is_refused(content: object) -> None:
    data = content if isinstance(content, bytes) else msgspec.msgpack.encode(content)
    with pytest.raises(ValueError, match="damaged"):
        unpack_copy(zlib.compress(data, 1))


def test_damaged_frames_are_refused(nodes: list[Node]) -> None:
    frame = nodes[0].mirror.export()
    for cut in range(len(frame)):
        with pytest.raises(ValueError, match="damaged"):
            unpack_copy(frame[:cut])
