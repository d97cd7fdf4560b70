"""The quickstart preset on two machines: stopped, and resumed exactly on swapped machines.

The machines share no folder. Node 0 of the resumed run is the other machine, to which the run
directory is moved.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from ltui.training.nodes.link_key import KEY_FILE_NAME
from ltui.training.nodes.node_address import read_link_place
from ltui.training.state.run_snapshot import RunState
from ltui.training.store.run_checkpoints import checkpoint_to_resume
from ltui.training.store.run_directory import RunDir
from tests.nodes.run_of_machines import MachinesRun, start_head
from tests.nodes.two_machines import Machines, ltui_on, open_machines, run_on
from tests.required import required
from tests.waiting import wait_for

EPOCHS, STEPS_AN_EPOCH = 12, 45
LIMIT_S = 600


def start(machines: Machines) -> MachinesRun:
    """Start a run on machines of which each sees an empty folder instead of the other's home."""
    for machine, other in ((machines[0], machines[1]), (machines[1], machines[0])):
        other.home.mkdir(parents=True)
        run_on(machine, ["mount", "-t", "tmpfs", "tmpfs", str(other.home)], code=0)
    run = start_head(machines, epochs=EPOCHS)
    join(run)
    return run


def join(run: MachinesRun) -> None:
    """Let the other machine join, to which a person has copied the key."""
    key = run.machines[1].folder / KEY_FILE_NAME
    shutil.copy(run.run_dir.path / KEY_FILE_NAME, key)
    ltui_on(run.machines[1], "join", run.place, "--key-file", str(key), "--detach", code=0)


def resume_swapped(run: MachinesRun) -> MachinesRun:
    first, second = run.machines
    moved = RunDir(second.home / "runs" / run.run_dir.id)
    moved.path.parent.mkdir(parents=True, exist_ok=True)
    run.run_dir.path.rename(moved.path)
    ltui_on(second, "resume", moved.id, "--detach", "--address", second.address, code=0)
    place = required(wait_for(lambda: read_link_place(moved), seconds=30))
    swapped = MachinesRun(Machines((second, first), run.machines.switch), moved, place.port)
    join(swapped)
    return swapped


def values(run: MachinesRun) -> dict[tuple[str, int, int], float]:
    """Return all values of the metrics by name, rank and step."""
    words = ("export", run.run_dir.id, "--format", "json")
    rows = json.loads(ltui_on(run.machines[0], *words, code=0).stdout)
    return {(row["metric"], row["rank"], row["step"]): row["value"] for row in rows}


def weights(run: MachinesRun) -> Any:
    import torch  # takes seconds, and only this test of the module needs it

    info = required(checkpoint_to_resume(run.run_dir.checkpoints_dir))
    return torch.load(info.path, weights_only=True)["state_dict"]


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
def test_quickstart_resumes_exactly_on_swapped_machines(tmp_path: Path) -> None:
    stop_at = random.SystemRandom().randrange(1, EPOCHS // 2 * STEPS_AN_EPOCH)
    print(f"stop from step {stop_at} on")
    with open_machines(tmp_path / "never") as machines:
        never = start(machines)
        assert never.wait_for_end(LIMIT_S).state is RunState.FINISHED
        expected, reference = values(never), weights(never)
    with open_machines(tmp_path / "resumed") as machines:
        run = start(machines)
        wait_for(lambda: (run.snapshot().global_step or 0) >= stop_at, seconds=LIMIT_S)
        run.stop()
        saved = required(checkpoint_to_resume(run.run_dir.checkpoints_dir))
        assert stop_at <= saved.global_step < EPOCHS * STEPS_AN_EPOCH
        assert list(run.agent_dir().checkpoints_dir.iterdir()) == []
        swapped = resume_swapped(run)
        assert swapped.wait_for_end(LIMIT_S).state is RunState.FINISHED
        assert not any("Not exact" in event.text for event in swapped.events("note"))
        (resumed,) = swapped.events("resumed")
        assert str(saved.global_step) in resumed.text
        assert values(swapped) == expected
        found = weights(swapped)
    assert len([key for key in expected if key[:2] == ("train/loss", 0)]) == EPOCHS * STEPS_AN_EPOCH
    assert found.keys() == reference.keys()
    assert all(found[name].equal(reference[name]) for name in reference)
