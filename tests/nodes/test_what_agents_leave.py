"""What is left on a machine after its part of a run: nothing that the head has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ltui.training.nodes.node_address import read_link_place
from ltui.training.store.find_run import find_run
from ltui.training.store.run_directory import RunDir
from tests.nodes.addresses import free_port_pair
from tests.nodes.two_homes import TwoHomes
from tests.required import required
from tests.waiting import wait_for

LINES = 60_000
"""Lines of 60 bytes that each node writes just before it ends: more than a few reports carry."""

PROGRAM = f"""
import os, pathlib, sys, time
done = pathlib.Path("done")
if os.environ["NODE_RANK"] == "1":
    for number in range({LINES}):
        print(f"{{number:059d}}")
    sys.stdout.flush()
    done.touch()
    sys.exit("fail" in sys.argv)
while not done.exists():
    time.sleep(0.05)
"""


def _run(two_homes: TwoHomes, *words: str) -> tuple[RunDir, subprocess.CompletedProcess[str]]:
    """Run the program on two nodes to its end. Return the run and the end of ``ltui join``."""
    argv = ("--num-nodes", "2", "--detach", "--address", "127.0.0.1", "--port", free_port_pair())
    two_homes.head("exec", *argv, "--", sys.executable, "-c", PROGRAM, *words)
    run_dir = find_run(two_homes.head.home, "last")
    place = required(read_link_place(run_dir))
    key = str(run_dir.path / "node.key")
    joined = two_homes.agent("join", f"{place.address}:{place.port}", "--key-file", key, check=None)
    return run_dir, joined


@pytest.mark.parametrize("fails", [False, True])
def test_the_whole_log_travels_and_only_evidence_stays(two_homes: TwoHomes, fails: bool) -> None:
    run_dir, _ = _run(two_homes, *(["fail"] if fails else []))
    log: Path = run_dir.logs_dir(1) / "engine-1.log"
    lines = wait_for(lambda: log.read_text().splitlines(), wanted=lambda x: len(x) >= LINES)
    assert lines[LINES - 1] == f"{LINES - 1:059d}"
    folder = two_homes.agent.home / "nodes"
    assert [path.name for path in folder.iterdir()] == ([f"{run_dir.id}-1"] if fails else [])
