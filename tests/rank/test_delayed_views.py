"""The rule of the step consensus with copies of the table that arrive late.

Ranks of one machine share one table. Here every node has a table of its own, and the functions of
``nodes/barrier_mirror.py`` copy rows between them: late, repeated, in any order, and while the
ranks go on between any two accesses to a word. The rule must still make all ranks act at one
boundary, and agree on every checkpoint.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from ltui.training.nodes.barrier_mirror import (
    TableKey,
    merge_rows,
    missing_ranks,
    needs_exchange,
    pack_copy,
    read_rows,
    unpack_copy,
)
from ltui.training.rank.coordination import step_consensus
from ltui.training.rank.coordination.step_consensus import Action, BarrierTable, boundary_position
from tests.rank.simulated_rank import SimulatedRank

STEPS = 12


class InterruptedWords:
    """The words of a table, between whose accesses the ranks go on."""

    def __init__(self, words: memoryview[int], interrupt: Callable[[], None]) -> None:
        self._words, self._interrupt = words, interrupt

    def __getitem__(self, index: int) -> int:
        self._interrupt()
        return self._words[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._interrupt()
        self._words[index] = value

    def __len__(self) -> int:
        return len(self._words)


class Node:
    """A machine with a table for all ranks of the run, of which some run here."""

    def __init__(self, path: Path, ranks: range, world: int, interrupt: Callable[[], None]) -> None:
        self.ranks, self.world = ranks, world
        self.tables = {rank: BarrierTable(path, rank, world) for rank in ranks}
        self.table = self.tables[ranks[0]]
        self.words = InterruptedWords(self.table.words, interrupt)

    def send(self, *, all_ranks: bool) -> bytes:
        ranks = range(self.world) if all_ranks else self.ranks
        return pack_copy(TableKey(self.world, 0), read_rows(self.words, ranks))

    def receive(self, frame: bytes) -> None:
        merge_rows(self.words, unpack_copy(frame)[1])

    def close(self) -> None:
        for table in self.tables.values():
            table.close()


class Simulation:
    """Some nodes with some ranks, connected in a star around the head or each with each."""

    def __init__(self, folder: Path, dice: random.Random) -> None:
        folder.mkdir()
        self.dice = dice
        sizes = [dice.randint(1, 3) for _ in range(dice.randint(2, 4))]
        world = sum(sizes)
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        self.nodes = [
            Node(folder / f"{index}.bin", range(start, start + size), world, self.interrupt)
            for index, (start, size) in enumerate(zip(starts, sizes, strict=True))
        ]
        self.head = self.nodes[0]
        self.lead = dice.choice([1, 1, 3])
        self.copy_chance = dice.choice([0.02, 0.2, 0.7])
        self.repeat_chance = dice.choice([0.0, 0.2])
        self.interrupt_chance = dice.choice([0.0, 0.02, 0.1])
        self.is_star = dice.random() < 0.7
        self.requests = dice.choice([
            [Action.PAUSE, Action.CONTINUE, Action.STOP],
            [Action.CHECKPOINT, Action.PAUSE, Action.CONTINUE],
            [Action.CHECKPOINT],
            [],
        ])  # fmt: skip
        self.request_at, self.plan_at = dice.randint(1, 8), dice.choice([0, dice.randint(1, 9)])
        self.plan = dice.randint(1, 10)
        self.failing = dice.choice([-1, dice.randrange(world)])
        self.ranks = [
            SimulatedRank(
                node.tables[rank],
                STEPS,
                self.publish if rank == 0 else None,
                partial(self.save, rank),
            )
            for node in self.nodes
            for rank in node.ranks
        ]
        self.alive = list(self.ranks)
        self.in_flight: list[tuple[Node, bytes]] = []

    def save(self, rank: int, number: int) -> bool:
        return rank != self.failing

    def publish(self, step: int) -> None:
        table = self.head.table
        if self.plan_at and step >= self.plan_at:
            self.plan_at = 0
            table.plan_stop(boundary_position(1, self.plan), 0)
        if self.requests and step >= self.request_at and table.can_publish():
            table.publish(self.requests.pop(0))

    def interrupt(self) -> None:
        if self.dice.random() < self.interrupt_chance:
            for _ in range(self.dice.randint(1, 12)):
                self.advance()

    def advance(self) -> None:
        """Let one rank make its next access to a word."""
        if not self.alive:
            return
        rank = self.dice.choice(self.alive)
        if rank.step - min(r.step for r in self.ranks) >= self.lead:
            return  # the collectives hold it back
        if next(rank.program, "end") == "end":
            self.alive.remove(rank)

    def copy(self) -> None:
        """Read the rows of one node, or store some that were read before."""
        dice = self.dice
        if dice.random() < self.copy_chance:
            source, target = dice.sample(self.nodes, 2)
            if self.is_star and self.head not in (source, target):
                target = self.head
            all_ranks = self.is_star and source is self.head
            self.in_flight.append((target, source.send(all_ranks=all_ranks)))
        if self.in_flight and dice.random() < self.copy_chance:
            index = dice.randrange(len(self.in_flight))
            target, frame = self.in_flight[index]
            target.receive(frame)
            if dice.random() >= self.repeat_chance:
                self.in_flight.pop(index)

    def run(self, rounds: int = 400_000) -> None:
        for _ in range(rounds):
            if not self.alive:
                break
            self.copy()
            self.advance()
        where = [(r.step, r.acted_at) for r in self.ranks]
        assert not self.alive, f"ranks wait forever at {where}"
        assert len({tuple(rank.acted_at) for rank in self.ranks}) == 1, where
        assert len({tuple(rank.saved) for rank in self.ranks}) == 1
        for node in self.nodes:
            for source in self.nodes:
                node.receive(source.send(all_ranks=False))
            assert not needs_exchange(node.table.words) or self.requests_are_late()
            assert missing_ranks(node.table.words) == []

    def close(self) -> None:
        for node in self.nodes:
            node.close()

    def requests_are_late(self) -> bool:
        """Return True if a request was published too late for any rank to act on it."""
        return not self.ranks[0].acted_at or self.ranks[0].done != self.head.table.words[0]


def test_delayed_copies_never_part_the_ranks(tmp_path: Path) -> None:
    """150 runs of 2 to 12 ranks on 2 to 4 nodes, with slow and fast, single and repeated copies."""
    served, saved, planned = Counter[int](), Counter[bool](), 0
    for seed in range(150):
        simulation = Simulation(tmp_path / str(seed), random.Random(seed))
        simulation.run()
        simulation.close()
        acted_at = simulation.ranks[0].acted_at
        served[len(acted_at)] += 1
        saved.update(simulation.ranks[0].saved)
        planned += bool(simulation.plan_at == 0 and acted_at and acted_at[-1][1] is Action.STOP)
    # A run may end before a request has reached every node; most do not.
    assert sum(count for number, count in served.items() if number) > 100
    assert served[3] + served[4] > 15
    assert saved[True] > 25
    assert saved[False] > 25
    assert planned > 25


@pytest.mark.slow
def test_the_simulation_notices_a_rule_that_trusts_old_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without what a rank has seen, rank 0 may take an old row for a rank that waits again."""
    rule = step_consensus.next_move
    monkeypatch.setattr(
        step_consensus,
        "next_move",
        lambda seen, states, acted, position, request: rule(
            [request] * len(seen), states, acted, position, request
        ),
    )
    for seed in range(400):
        simulation = Simulation(tmp_path / str(seed), random.Random(seed))
        with contextlib.suppress(AssertionError):
            simulation.run(20_000)
        simulation.close()
        requests = {request for rank in simulation.ranks for request in rank.acted_at}
        if len(requests) > max(len(rank.acted_at) for rank in simulation.ranks):
            return  # Two ranks acted on one request at different steps.
    pytest.fail("no ranks acted at different steps")
