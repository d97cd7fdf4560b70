"""Two nodes on one machine: each has a ``$LTUI_HOME`` of its own, and both use the loopback.

This needs no rights. What a cut link or another host name does is tested in ``two_machines.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from ltui.training.nodes.node_address import read_link_place
from ltui.training.store.find_run import find_run
from ltui.training.store.run_directory import RunDir
from tests.nodes.addresses import free_port_pair
from tests.required import required
from tests.system.conftest import Ltui


class TwoHomes:
    """The commands ``ltui`` of node 0 (``head``) and of node 1 (``agent``)."""

    def __init__(self, folder: Path) -> None:
        self.head = Ltui(_new(folder / "head"), _new(folder / "project"))
        self.agent = Ltui(_new(folder / "agent"), folder / "project")

    def run(self, *settings: str, preset: str = "quickstart", words: Sequence[str] = ()) -> RunDir:
        """Start a run of two nodes with one rank on each, and let node 1 join."""
        values = ("trainer.num_nodes=2", "trainer.devices=1", *settings)
        sets = (word for value in values for word in ("--set", value))
        place = ("--address", "127.0.0.1", "--port", free_port_pair())
        self.head("run", preset, "--detach", *place, *sets, *words)
        self.join()
        return find_run(self.head.home, "last")

    def join(self, *, follow: bool = False) -> None:
        """Let node 1 join the last run. ``follow``: and wait until its part has ended."""
        run_dir = find_run(self.head.home, "last")
        place = required(read_link_place(run_dir))
        where, key = f"{place.address}:{place.port}", str(run_dir.path / "node.key")
        words = ("join", where, "--key-file", key)
        if follow:
            self.agent(*words, check=None)
        else:
            self.agent(*words, "--detach")

    def resume(self) -> None:
        """Resume the last run on both nodes."""
        self.head("resume", "last", "--detach")
        self.join()

    def steps_on_record(self) -> dict[int, list[int]]:
        """Return rank -> the steps of which the history has the training loss."""
        text = self.head("export", "last", "--metric", "train/loss", "--format", "json").stdout
        rows: list[dict[str, Any]] = json.loads(text)
        return {r: [row["step"] for row in rows if row["rank"] == r] for r in (0, 1)}

    def processes(self) -> list[psutil.Process]:
        """Return everything that lives in one of the homes."""
        return [*self.head.processes(), *self.agent.processes()]


@pytest.fixture
def two_homes(tmp_path: Path) -> Iterator[TwoHomes]:
    """Return two nodes without a run; what they leave running is killed afterwards."""
    homes = TwoHomes(tmp_path)
    yield homes
    for process in homes.processes():
        try:
            process.kill()
        except psutil.Error:
            continue


def _new(folder: Path) -> Path:
    folder.mkdir(mode=0o700)
    return folder
