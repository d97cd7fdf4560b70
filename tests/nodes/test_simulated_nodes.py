"""A run on simulated machines: the real head and protocol, and ranks without torch."""

from __future__ import annotations

from pathlib import Path

from ltui.training.lifecycle.run_status import resolve_snapshot
from ltui.training.state.run_snapshot import NodeState, RunState
from tests.nodes.simulated_nodes import simulated_run


def test_all_ranks_of_many_machines_agree_on_a_stop(private_home: Path) -> None:
    with simulated_run(private_home, agents=6, ranks_per_agent=4, processes=2, step_s=0.2) as run:
        snapshot = resolve_snapshot(run.run_dir)
        assert [node.node for node in snapshot.nodes] == list(range(7))
        assert {rank.node for rank in snapshot.ranks} == set(range(7))
        assert len(snapshot.ranks) == 25
        assert {node.state for node in snapshot.nodes} <= {NodeState.CONNECTED, NodeState.SILENT}
        run.stop()
    ended = resolve_snapshot(run.run_dir)
    assert ended.state is RunState.STOPPED
    steps = {rank.global_step for rank in ended.ranks}
    assert len(steps) == 1, "the ranks have stopped at different steps"
