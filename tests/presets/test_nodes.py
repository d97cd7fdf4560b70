"""A preset on two nodes: here two homes on one machine, an ``ltui run`` in each, as a person or
``srun`` would start them on two machines."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.system.conftest import Ltui

NODES = 2


class Node(Ltui):
    """One of the machines."""

    def __init__(self, folder: Path, rank: int, port: int) -> None:
        home, cwd = folder / f"home-{rank}", folder / f"project-{rank}"
        for made in (home, cwd):
            made.mkdir()
        super().__init__(home, cwd)
        self.environment |= {
            "NODE_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "CUDA_VISIBLE_DEVICES": "",
        }

    def start(self, epochs: int) -> None:
        settings = (
            f"trainer.num_nodes={NODES}",
            "trainer.devices=1",
            f"trainer.max_epochs={epochs}",
            "data.init_args.loader=torch",
        )
        words = [word for setting in settings for word in ("--set", setting)]
        self("run", "quickstart", "--detach", *words)


@contextmanager
def two_nodes(folder: Path, epochs: int) -> Iterator[list[Node]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nodes = [Node(folder, rank, port) for rank in range(NODES)]
    try:
        for node in nodes:
            node.start(epochs)
        yield nodes
    finally:
        for node in nodes:
            for process in node.processes():
                try:
                    process.kill()
                except psutil.Error:
                    continue
            node.wait_until_alone(60)


def ended(snapshot: dict[str, Any]) -> bool:
    return snapshot["state"] in ("finished", "stopped", "failed", "crashed", "lost")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_each_node_trains_and_shows_its_own_ranks(tmp_path: Path) -> None:
    with two_nodes(tmp_path, epochs=2) as nodes:
        shown = [node.wait(ended, seconds=200) for node in nodes]
        for rank, (node, snapshot) in enumerate(zip(nodes, shown, strict=True)):
            assert snapshot["state"] == "finished", snapshot["detail"]
            assert snapshot["world_size"] == NODES
            assert [r["rank"] for r in snapshot["ranks"]] == [rank]
            assert snapshot["ranks"][0]["local_rank"] == 0
            assert snapshot["ranks"][0]["state"] == "ended"
            # 1,438 images in batches of 16 on two ranks.
            assert snapshot["global_step"] == 2 * 45
            assert node.steps_on_record(rank) == list(range(1, 2 * 45 + 1))
        accuracies = {snapshot["metrics"]["val/accuracy"]["last"] for snapshot in shown}
        assert len(accuracies) == 1


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("LTUI_PRESETS") != "all", reason="make presets runs it")
@pytest.mark.timeout(400)
def test_a_stop_on_one_node_ends_both(tmp_path: Path) -> None:
    with two_nodes(tmp_path, epochs=2000) as nodes:
        for node in nodes:
            node.wait(lambda s: (s["global_step"] or 0) >= 5, seconds=200)
        refused = nodes[1]("pause", "last", check=None)
        assert refused.returncode == 2
        assert "several nodes" in refused.stderr
        nodes[0]("stop", "last")
        stopped, other = (node.wait(ended, seconds=120) for node in nodes)
        assert stopped["state"] == "stopped", stopped["detail"]
        assert other["state"] == "failed", other["detail"]
        for node in nodes:
            node.wait_until_alone(60)
