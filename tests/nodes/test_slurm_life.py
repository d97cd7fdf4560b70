"""The life of a run under a real SLURM: submitted, queued, warned, requeued, stopped.

And ``srun ltui exec`` in a batch script of the user's own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ltui.training.slurm.job_record import JobRecord, Life, read_record
from ltui.training.store.find_run import find_run
from ltui.training.store.history_place import read_place
from ltui.training.store.run_checkpoints import list_checkpoints, verify
from tests.ltui_command import LTUI
from tests.nodes.slurm_cluster import SlurmCluster, in_cluster, slurm_cluster
from tests.nodes.test_ways_to_start import PLACE_SCRIPT
from tests.required import required
from tests.system.conftest import Ltui
from tests.waiting import wait_for

pytestmark = [pytest.mark.timeout(1500), pytest.mark.xdist_group("slurm")]

SETTINGS = ("trainer.max_epochs=2000", "trainer.devices=1", "data.init_args.loader=torch")
PRESET = ("quickstart", *(word for setting in SETTINGS for word in ("--set", setting)))
TIMES = int(os.environ.get("LTUI_SIGNAL_TIMES", "1"))
"""How often each signal is sent to a job."""
FOR_EVER = (sys.executable, "-c", "import time; time.sleep(3600)")


class Login(Ltui):
    """A login node of the cluster."""

    def __init__(self, home: Path, cwd: Path, cluster: SlurmCluster) -> None:
        super().__init__(home, cwd)
        self.cluster = cluster
        self.environment = dict(in_cluster(cluster, home))

    def wait(
        self, wanted: Callable[[dict[str, Any]], object], seconds: float = 600, run: str = "last"
    ) -> dict[str, Any]:
        return super().wait(wanted, seconds, run)

    def submit(self, *words: str) -> str:
        """Submit a run and return the number of its job."""
        self("submit", *words)
        return required(self.record().first_job_id)

    def record(self) -> JobRecord:
        return required(read_record(find_run(self.home, "last")))

    def wait_for_life(self, number: int, *, ended: bool = False) -> None:
        """Wait until the job has started that many times, or the last start has ended."""

        def come() -> bool:
            lives = self.record().lives
            return len(lives) >= number and (not ended or lives[number - 1].ended_at is not None)

        wait_for(come, seconds=600, period_s=0.2)

    def life(self, number: int) -> Life:
        """Wait until the job has ended for that many times. Return how."""
        self.wait_for_life(number, ended=True)
        return self.record().lives[number - 1]

    def continues(self, number: int) -> None:
        """Wait until start ``number`` of the job trains on from where the last one ended."""
        self.wait_for_life(number)
        before, after = self.record().lives[number - 2 : number]
        assert after.start_step == before.end_step
        assert before.end_step
        self.wait(lambda s: s["attempt"] == number and (s["global_step"] or 0) > after.start_step)

    def stop_for_good(self, job_id: str, number: int) -> None:
        """Stop the run in start ``number`` of its job, which is then not requeued."""
        self("stop", "last")
        life = self.life(number)
        assert (life.outcome, life.requeued) == ("stopped", False)
        assert self.show()["state"] == "stopped"
        wait_for(lambda: self.cluster.job_state(job_id), wanted=lambda s: s == "FAILED")

    def job_log(self) -> str:
        """What the jobs of the run printed."""
        logs = sorted(self.cwd.parent.glob("**/*-[0-9]*.log"))
        return "".join(path.read_text() for path in logs)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm") / "cluster") as running:
        yield running


@pytest.fixture
def login(
    private_home: Path, tmp_path: Path, cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Login]:
    project = tmp_path / "project"
    project.mkdir()
    command = Login(private_home, project, cluster)
    # The test reads the state of a run in its own process, too.
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, command.environment[name])
    yield command
    cluster.call("scancel", "--user=root", code=None)
    wait_for(lambda: not cluster.call("squeue", "-h").stdout.strip(), seconds=300)
    for process in command.processes():
        try:
            process.kill()
        except psutil.Error:
            continue


def state(name: str) -> Any:
    return lambda snapshot: snapshot["state"] == name


@pytest.mark.slow
def test_a_run_waits_for_the_job_of_another_one(login: Login) -> None:
    lasts = (sys.executable, "-c", "import time; time.sleep(75)")
    fails = (sys.executable, "-c", "import time; time.sleep(5); raise SystemExit(3)")
    quick = (sys.executable, "-c", "print('done')")
    login("submit", "--name", "first", "--", *lasts)
    login("submit", "--name", "second", "--after", "first:ok", "--", *quick)
    login.wait(lambda s: "waits for another job" in (s["detail"] or ""), run="second")
    login.wait(state("finished"), run="second")
    assert login.show("second")["started_at"] >= login.show("first")["ended_at"]
    login("submit", "--name", "bad", "--", *fails)
    login("submit", "--name", "never", "--after", "bad:ok", "--", *quick)
    login("submit", "--name", "anyway", "--after", "bad", "--", *quick)
    login.wait(state("finished"), run="anyway")
    login.wait(lambda s: s["state"] != "queued" or "never" in (s["detail"] or ""), run="never")
    assert not login.show("never")["started_at"]


def test_a_waiting_run_is_listed_and_taken_out_of_the_queue(login: Login) -> None:
    job_id = login.submit("--sbatch=begin=now+3600", "--", *FOR_EVER)
    waiting = login.wait(lambda s: "expected start" in (s["detail"] or ""))
    assert waiting["state"] == "queued"
    assert waiting["detail"].startswith("queued in SLURM: waits for its start time, expected start")
    assert "still queued" in login("wait", "last", "--for-at-most", "1", check=4).stdout
    refused = login("pause", "last", check=2)
    assert "it waits in SLURM's queue, so it cannot pause." in refused.stderr
    assert "cancelled while it waited in SLURM's queue" in login("stop", "last").stdout
    assert login.show()["state"] == "stopped"
    assert login.cluster.job_state(job_id) == "CANCELLED"
    login("delete", "last")


def test_a_job_that_is_cancelled_in_the_queue_is_a_stopped_run(login: Login) -> None:
    job_id = login.submit("--sbatch=begin=now+3600", "--", *FOR_EVER)
    login.cluster.call("scancel", job_id)
    cancelled = login.wait(lambda s: s["state"] != "queued", seconds=120)
    assert cancelled["state"] == "stopped"
    assert f"job {job_id} was cancelled" in cancelled["detail"]
    refused = login("stop", "last", check=2)
    assert refused.stderr.count("\n") == 1
    refused = login("resume", "last", check=2)
    assert "there is nothing to resume from" in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_what_slurm_rejects_is_one_sentence(login: Login) -> None:
    done = login("submit", "--partition", "nowhere", "--", "true", check=2)
    assert done.stderr.count("\n") == 1
    assert "did not accept the job (invalid partition specified: nowhere; " in done.stderr
    done = login("submit", "--gpus-per-node", "8", "--", "true", check=2)
    assert done.stderr.count("\n") == 1
    assert not list((login.home / "runs").iterdir())


@pytest.mark.slow
def test_a_value_reaches_sbatch_as_it_was_given(login: Login) -> None:
    comment = """it's "quoted" $HOME `x` \\ #no #SBATCH --nodes=9"""
    job_id = login.submit("--sbatch=begin=now+3600", f"--sbatch=comment={comment}", "--", "true")
    shown = login.cluster.call("scontrol", "-o", "show", "job", job_id).stdout
    assert f"Comment={comment} " in shown
    # A range while the job waits.
    assert re.search(r" NumNodes=1(-1)? ", shown), shown


@pytest.mark.slow
def test_a_run_is_requeued_before_the_time_limit_and_stops_for_good_when_asked(
    login: Login,
) -> None:
    job_id = login.submit(*PRESET, "--time", "3", "--checkpoint-time", "1")

    def requeued() -> Any:
        return next((x for x in login.record().lives if x.requeued and x.made_progress), None)

    first = wait_for(requeued, seconds=900, period_s=0.2)
    assert first.outcome == "stopped"
    # The next start must not come to its own limit before the test stops it.
    login.cluster.call("scontrol", "update", f"jobid={job_id}", "timelimit=60")
    waiting = login.wait(lambda s: s["state"] != "stopped")
    assert waiting["state"] in ("queued", "starting", "running"), waiting["detail"]
    number = login.record().lives.index(first) + 1
    login.continues(number + 1)
    assert login.show()["restarted_because"] == f"SLURM started job {job_id} again"
    login.stop_for_good(job_id, number + 1)


@pytest.mark.slow
def test_two_nodes_are_one_run_that_is_requeued_and_stopped(login: Login) -> None:
    job_id = login.submit(*PRESET, "--nodes", "2")
    running = login.wait_for_step(5, seconds=600)
    assert running["world_size"] == 2
    assert [(r["rank"], r["node"]) for r in running["ranks"]] == [(0, 0), (1, 1)]
    assert [n["state"] for n in running["nodes"]] == ["connected", "connected"]
    login.cluster.call("scancel", "-s", "USR2", job_id)
    first = login.life(1)
    assert (first.outcome, first.requeued) == ("stopped", True), login.job_log()
    assert (first.end_step or 0) >= 5
    login.continues(2)
    login.stop_for_good(job_id, 2)


@pytest.mark.slow
@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077], ids=oct)
def test_a_stopped_run_is_resumed_by_new_jobs_until_it_is_finished(
    login: Login, private_tmpdir: Path, umask: int
) -> None:
    """Each job has a number of its own, so other ports. No node has a folder of ltui's yet."""
    login.environment["TMPDIR"] = str(private_tmpdir)
    before = os.umask(umask)  # sbatch gives it to the job
    try:
        jobs = [login.submit(*PRESET, "--nodes", "2")]
        for attempt in (1, 2):
            step = login.show()["global_step"] or 0
            login("wait", "last", "--until", f"step>={step + 5}", timeout=600)
            running = login.show()
            assert (running["attempt"], running["world_size"]) == (attempt, 2)
            login("stop", "last")
            login("wait", "last", check=3)
            login.wait_for_life(attempt, ended=True)
            last = login.show()
            assert (last["state"], last["global_step"]) == (
                "stopped",
                login.record().lives[-1].end_step,
            )
            more = ("--set", f"trainer.max_epochs={last['epoch'] + 2}") if attempt == 2 else ()
            login("resume", "last", *more)
            jobs.append(str(login.record().next_job_id))
        login("wait", "last", timeout=600)
    finally:
        os.umask(before)
    assert len(set(jobs)) == 3, jobs
    assert [life.job_id for life in login.record().lives] == jobs
    assert login.steps_on_record() == list(range(1, login.show()["global_step"] + 1))
    (left,) = private_tmpdir.glob("ltui-*")
    assert left.stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
def test_a_preempted_run_continues_when_the_other_job_has_ended(login: Login) -> None:
    login.submit(*PRESET, "--sbatch=exclusive", "--time", "10")
    login.wait_for_step(5, seconds=600)
    script = login.cwd / "urgent.sh"
    script.write_text("#!/bin/sh\nsleep 3600\n")
    urgent = login.cluster.call(
        "sbatch", "--parsable", "-p", "urgent", "-N2", "--exclusive", str(script), cwd=login.cwd
    ).stdout.strip()
    login.wait_for_life(1, ended=True)
    waiting = login.wait(state("queued"))
    assert [c["ok"] for c in waiting["checkpoints"]] == [True]
    login.cluster.call("scancel", urgent)
    login.continues(2)


@pytest.mark.slow
def test_a_run_without_progress_is_not_started_a_fourth_time(login: Login) -> None:
    job_id = login.submit("--", *FOR_EVER)
    for number in (1, 2, 3):
        login.wait_for_life(number)
        login.wait(state("running"))
        login.cluster.call("scancel", "-s", "USR2", job_id)
        login.wait_for_life(number, ended=True)
    ended = login.wait(state("stopped"))
    assert ended["detail"].endswith(
        "not requeued: no progress in 3 starts of its job (it has no checkpoint yet)"
    )
    assert [life.requeued for life in login.record().lives] == [True, True, False]


@pytest.mark.slow
def test_a_following_job_continues_where_scontrol_is_missing(login: Login, tmp_path: Path) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("sbatch", "srun"):
        (programs / name).symlink_to(str(shutil.which(name, path=login.environment["PATH"])))
    path = f"{programs}:{Path(sys.executable).parent}"
    job_id = login.submit("--name", "chain", f"--sbatch=export=ALL,PATH={path}", *PRESET)
    login.wait_for_step(5, seconds=600)
    login.cluster.call("scancel", "-s", "USR2", job_id)
    login.continues(2)
    first, second = login.record().lives
    assert first.job_id == job_id
    assert second.job_id not in ("", job_id)


@pytest.mark.slow
def test_a_node_that_does_not_see_the_home_trains_all_the_same(login: Login) -> None:
    job_id = login.submit("--sbatch=begin=now+4", "--sbatch=output=private-%j.log", *PRESET)
    elsewhere = login.home.with_name("only-on-the-login-node")
    login.home.rename(elsewhere)
    on_node = wait_for(
        lambda: list(login.home.glob("runs/*/slurm/lives.json")), seconds=60, period_s=0.2
    )
    login.wait_for_step(5, seconds=600)
    assert "does not see the directory in which the run was submitted" in login.job_log()
    assert len(on_node) == 1
    seen = Login(elsewhere, login.cwd, login.cluster)
    shown = seen.wait(state("running"))
    assert shown["detail"] == f"job {job_id} runs on 127.0.0.11"
    stopped = login("stop", "last")
    assert "checkpoint verified" in stopped.stdout
    # The job records its end after the run has ended.
    wait_for(
        lambda: json.loads(on_node[0].read_text())["lives"][0]["outcome"],
        wanted=lambda outcome: outcome == "stopped",
        seconds=60,
    )


@pytest.mark.slow
def test_the_history_on_the_disk_of_a_node_is_whole_in_the_shared_folder(
    login: Login, tmp_path: Path
) -> None:
    """SLURM kills what is left of a job, so the job must not end before the last copy."""
    disk = tmp_path / "disk"
    disk.mkdir()
    login.environment["LTUI_HISTORY_DIR"] = str(disk)
    job_id = login.submit("--name", "copied", *PRESET)
    login.wait_for_step(5, seconds=600)
    run = find_run(login.home, "last")
    folder = required(required(read_place(run)).folder)
    assert folder.is_relative_to(disk)
    login.cluster.call("scancel", "-s", "USR2", job_id)
    last = required(login.life(1).end_step)
    wait_for(lambda: required(read_place(run)).folder is None, seconds=60)
    assert not folder.exists()
    assert login.steps_on_record() == list(range(1, last + 1))
    login.wait_for_life(2)
    login.wait(lambda s: s["attempt"] == 2 and (s["global_step"] or 0) > last + 5)
    login.stop_for_good(job_id, 2)
    assert required(read_place(run)).folder is None
    last = required(login.life(2).end_step)
    assert login.steps_on_record() == list(range(1, last + 1))


@pytest.mark.slow
@pytest.mark.parametrize("time", range(TIMES))
@pytest.mark.parametrize("signal", ["TERM", "INT", "USR1", "USR2"])
def test_a_signal_to_every_process_of_the_job_is_one_checkpoint(
    login: Login, signal: str, time: int
) -> None:
    job_id = login.submit(*PRESET, "--nodes", "2", "--set", "data.init_args.workers=2")
    running = login.wait_for_step(5, seconds=600)
    for rank in running["ranks"]:
        # The signal must find workers. They are started anew in every epoch.
        wait_for(psutil.Process(rank["pid"]).children, wanted=lambda c: len(c) >= 2, seconds=60)
    login.cluster.call("scancel", "-s", signal, job_id)
    if signal != "TERM":
        # To the batch script and srun, too. On SIGTERM, srun kills all processes of the step.
        login.cluster.call("scancel", "--full", "-s", signal, job_id)
    life = login.life(1)
    assert life.outcome == "stopped", login.job_log()
    assert life.requeued == signal.startswith("USR")
    (checkpoint,) = list_checkpoints(find_run(login.home, "last").checkpoints_dir)
    assert verify(checkpoint).ok
    assert all(Path(f"{checkpoint.path}.rank-{rank:05d}").exists() for rank in (0, 1))
    assert checkpoint.global_step == life.end_step
    assert (life.end_step or 0) >= 5


_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


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


@pytest.mark.slow
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
