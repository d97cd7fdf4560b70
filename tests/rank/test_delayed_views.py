"""The rule of the step consensus with copies of the table that arrive late.

Ranks of one machine share one table. Here every node has a table of its own, and a copier carries
the rows of a node's ranks, and rank 0's header, to the other nodes: late, in any order of nodes,
and several times. The rule must still make all ranks act at one boundary.
"""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path

from ltui.training.rank.coordination.step_consensus import Action, BarrierTable
from tests.rank.simulated_rank import SimulatedRank

ROW, STATE, ACTED = BarrierTable._ROW, BarrierTable._STATE, BarrierTable._ACTED


class Node:
    """A machine with a table for all ranks of the run, of which some run here.

    The last word of a copy is rank 0's request, if the copy contains it. It is read before all rows
    and stored after all rows, so that no rank sees a request with rows that are older than it: in
    such rows rank 0 may still wait at the boundary at which it acted on the previous request.
    """

    def __init__(self, path: Path, ranks: range, world: int) -> None:
        self.ranks = ranks
        self.tables = {rank: BarrierTable(path, rank, world) for rank in ranks}
        self.table = self.tables[ranks[0]]
        self.inbox: dict[int, deque[list[tuple[int, int]]]] = {}

    def rows(self, include_header: bool) -> list[tuple[int, int]]:
        """Copy what this node writes: (index, word), in the order in which it must be stored.

        A rank stores first that it acted and then that it has passed the boundary. So the copy
        reads a rank's state before its acted word, and stores them the other way round.
        """
        words = self.table.words
        copied = []
        request = [(0, words[0])] if include_header else []
        for rank in self.ranks:
            row = ROW * (1 + rank)
            state = words[row + STATE]
            copied += [(row + ACTED, words[row + ACTED]), (row + STATE, state)]
        return copied + request

    def receive(self, copied: list[tuple[int, int]]) -> None:
        # Every word only grows: an old copy changes nothing.
        for index, word in copied:
            self.table.words[index] = max(self.table.words[index], word)

    def close(self) -> None:
        for table in self.tables.values():
            table.close()


def test_delayed_copies_never_part_the_ranks(tmp_path: Path) -> None:
    """400 runs of 2 to 12 ranks on 2 to 4 nodes, with slow and fast, single and repeated copies."""
    requests_served = [simulate(tmp_path / str(seed), random.Random(seed)) for seed in range(400)]
    # A run may end before a request has reached every node; most do not.
    assert sum(served > 0 for served in requests_served) > 200
    assert sum(served == 3 for served in requests_served) > 50


def simulate(folder: Path, dice: random.Random) -> int:
    """Run one simulation. Return the number of requests on which all ranks acted."""
    folder.mkdir()
    sizes = [dice.randint(1, 3) for _ in range(dice.randint(2, 4))]
    world, steps = sum(sizes), 12
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    nodes = [
        Node(folder / f"{index}.bin", range(start, start + size), world)
        for index, (start, size) in enumerate(zip(starts, sizes, strict=True))
    ]
    head = nodes[0]
    lead = dice.choice([1, 1, 3])
    copy_chance, old_copy_chance = dice.choice([0.02, 0.2, 0.7]), dice.choice([0.0, 0.2])
    requests = [Action.PAUSE, Action.CONTINUE, Action.STOP]
    request_at = dice.randint(1, 8)

    def publish(step: int) -> None:
        if requests and step >= request_at and head.table.all_acted():
            head.table.publish(requests.pop(0))

    ranks = [
        SimulatedRank(node.tables[rank], steps, publish if rank == 0 else None)
        for node in nodes
        for rank in node.ranks
    ]
    in_flight: list[tuple[Node, list[tuple[int, int]]]] = []
    alive = list(ranks)
    for _ in range(400_000):
        if not alive:
            break
        if dice.random() < copy_chance:
            source, target = dice.sample(nodes, 2)
            in_flight.append((target, source.rows(source is head)))
        if in_flight and dice.random() < copy_chance:
            index = dice.randrange(len(in_flight))
            target, copied = in_flight[index]
            target.receive(copied)
            if dice.random() >= old_copy_chance:
                in_flight.pop(index)
        rank = dice.choice(alive)
        if rank.step - min(r.step for r in ranks) >= lead:
            continue  # the collectives hold it back
        if next(rank.program, "end") == "end":
            alive.remove(rank)
    assert not alive, f"ranks wait forever at {[(r.step, r.acted_at) for r in ranks]}"
    assert len({tuple(rank.acted_at) for rank in ranks}) == 1
    for node in nodes:
        node.close()
    return len(ranks[0].acted_at)
