"""``srun ltui exec`` in a batch script of the user's own, on a real SLURM cluster."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ltui_command import LTUI
from tests.nodes.slurm_cluster import SlurmCluster, slurm_cluster
from tests.nodes.test_ways_to_start import PLACE_SCRIPT
from tests.waiting import wait_for

pytestmark = [pytest.mark.timeout(400), pytest.mark.xdist_group("slurm"), pytest.mark.slow]

_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm") / "cluster") as running:
        yield running


def run_batch(cluster: SlurmCluster, folder: Path, *lines: str) -> tuple[str, str]:
    """Run a batch script on two nodes. Return the state of the job and its output."""
    script = folder / "job.sh"
    head = ("#!/bin/bash", "#SBATCH --nodes=2 --ntasks-per-node=1 --output=job.log")
    script.write_text("\n".join([*head, *lines]) + "\n")
    job = cluster.call("sbatch", "--parsable", str(script), cwd=folder).stdout.strip()
    try:
        state = wait_for(
            lambda: cluster.job_state(job), wanted=lambda s: s in _ENDED, seconds=40, period_s=0.3
        )
    finally:
        cluster.call("scancel", job, code=None)
    return state, (folder / "job.log").read_text()


@pytest.mark.parametrize("key", ["by srun", "in the environment", "in a shared home"])
def test_all_tasks_of_a_step_are_one_run(cluster: SlurmCluster, tmp_path: Path, key: str) -> None:
    place = tmp_path / "place.py"
    place.write_text(PLACE_SCRIPT)
    own = "" if key == "in a shared home" else "-$SLURM_NODEID"
    ltui = " ".join([*LTUI, "exec", "--plain", "--", sys.executable, str(place), "1"])
    export = f'export LTUI_NODE_KEY="$({" ".join(LTUI)} key)"'
    state, output = run_batch(
        cluster,
        tmp_path,
        "export PYTHONUNBUFFERED=1 CUDA_VISIBLE_DEVICES=",
        export if key == "in the environment" else "",
        "srun --label --kill-on-bad-exit=1 bash -c "
        f"'export LTUI_HOME={tmp_path}/home{own}; exec {ltui}'",
    )
    assert state == "COMPLETED", output
    assert "as node 1 of 2; node 0 is" in output
    homes = [tmp_path / "home"] if own == "" else [tmp_path / f"home-{n}" for n in (0, 1)]
    (run,) = (homes[0] / "runs").iterdir()
    assert len(homes) == 1 or list((homes[1] / "runs").iterdir()) == []
    first, second = (
        (run / "logs" / "1" / name).read_text().split() for name in ("engine.log", "engine-1.log")
    )
    assert first[1:3] == ["0", "127.0.0.11"]
    assert second[1:3] == ["1", "127.0.0.11"]
    assert first[4:6] == second[4:6] == ["2", "None"]
    assert "LTUI_NODE_KEY" not in cluster.call("scontrol", "show", "job", code=None).stdout
