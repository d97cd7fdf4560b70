"""``ltui submit`` with stand-ins for SLURM's commands: what is asked, refused and left behind."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from _pytest.capture import CaptureResult
from msgspec.structs import replace

from ltui.app.cli import main
from ltui.app.command_output import EXIT_STOPPED
from ltui.app.nodes.start_head import head_place
from ltui.app.slurm import job_nodes
from ltui.app.slurm.job_nodes import _write_nodes
from ltui.app.slurm.job_process import prepare
from ltui.app.slurm.job_submission import continue_run
from ltui.training.config.run_spec import RunSpec
from ltui.training.lifecycle.job_control import with_job
from ltui.training.lifecycle.launch_run import create_run_directory
from ltui.training.nodes.link_key import LinkKey
from ltui.training.nodes.node_address import LinkPlace, write_link_place
from ltui.training.problem import ProblemError
from ltui.training.slurm.batch_script import JobOptions
from ltui.training.slurm.job_record import (
    JobRecord,
    Life,
    read_record,
    write_lives,
    write_resubmitted,
    write_submission,
)
from ltui.training.slurm.slurm_client import ASK_S, QueueCache
from ltui.training.state.run_snapshot import RunState
from ltui.training.store.run_directory import RunDir
from tests.app.frames import snapshot
from tests.ltui_command import answer
from tests.required import required

STAND_IN = """#!{python}
import json, os, sys
with open({calls!r}, "a") as calls:
    calls.write(json.dumps([{name!r}, *sys.argv[1:]]) + "\\n")
sys.stdout.write({output!r})
sys.stderr.write({error!r})
sys.exit({code})
"""


class Slurm:
    """Stand-ins for SLURM's commands, in a folder that is the first on ``PATH``."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._calls = folder, folder / "calls.jsonl"
        folder.mkdir()
        self.add("true")

    def add(self, name: str, output: str = "", error: str = "", code: int = 0) -> None:
        path = self._folder / name
        values = {"name": name, "output": output, "error": error, "code": code}
        text = STAND_IN.format(python=sys.executable, calls=str(self._calls), **values)
        path.write_text(text)
        path.chmod(0o700)

    @property
    def path(self) -> str:
        # A machine may have the real commands, so its own folders are left out.
        return f"{self._folder}{os.pathsep}{Path(sys.executable).parent}"

    def calls(self, name: str) -> list[list[str]]:
        if not self._calls.exists():
            return []
        lines = map(json.loads, self._calls.read_text().splitlines())
        return [words[1:] for words in lines if words[0] == name]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    stand_ins = Slurm(tmp_path / "slurm-bin")
    monkeypatch.setenv("PATH", stand_ins.path)
    return stand_ins


Ltui = Callable[..., "CaptureResult[str]"]


@pytest.fixture
def ltui(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Ltui:
    """Run ``ltui`` in this process, which ends with a code, and return what it printed."""

    def run(*words: str, code: int) -> CaptureResult[str]:
        try:
            ended: object = main(words)
        except SystemExit as error:  # of argparse
            ended = error.code
        assert ended == code
        return capsys.readouterr()

    monkeypatch.chdir(tmp_path)
    return run


def runs(home: Path) -> list[str]:
    return sorted(p.name for p in (home / "runs").glob("*")) if home.exists() else []


@pytest.fixture
def run_dir(private_home: Path) -> RunDir:
    """A run that job 7 has begun, and an empty record of its lives."""
    made = RunDir(private_home / "runs" / "brave-owl-12ab")
    made.path.mkdir(parents=True)
    write_submission(made, RECORD)
    return made


RECORD = JobRecord(token="t", submitted_at=1.0, options=JobOptions(), first_job_id="7")


def write_life(run_dir: RunDir, *, requeued: bool) -> None:
    """Record that job 7 has stopped the run."""
    life = Life(
        job_id="7", started_at=1.0, ended_at=2.0, end_step=5, outcome="stopped", requeued=requeued
    )
    write_lives(run_dir, RECORD.with_lives([life]))


def test_the_copy_of_a_queued_run_does_not_cancel_its_job(
    ltui: Ltui, slurm: Slurm, private_home: Path
) -> None:
    slurm.add("sbatch", output="4711\n")
    slurm.add("squeue", output="4711|PENDING|Priority|N/A|N/A|\n")
    slurm.add("scancel")
    ltui("submit", "--", "true", code=0)
    (run_id,) = runs(private_home)
    shutil.copytree(private_home / "runs" / run_id, private_home / "runs" / "copy-0001")
    assert "it is not running" in ltui("stop", "copy-0001", code=2).err
    assert slurm.calls("scancel") == []
    ltui("stop", run_id, code=0)
    assert slurm.calls("scancel") == [["4711"]]


def test_frozen_code_is_that_of_the_submission_and_needs_a_folder_that_the_node_sees(
    ltui: Ltui, slurm: Slurm, private_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.add("sbatch", output="4711\n")
    (tmp_path / "train.py").write_text("1")
    command = ("--", sys.executable, "train.py")
    assert "several machines" in ltui("submit", "--freeze", "--nodes", "2", *command, code=2).err
    assert runs(private_home) == []
    ltui("submit", "--freeze", *command, code=0)
    (run_id,) = runs(private_home)
    run = RunDir(private_home / "runs" / run_id)
    assert (run.path / "code" / "frozen-1" / "train.py").read_text() == "1"
    token = required(read_record(run)).token
    assert prepare(run_id, token, "").path == run.path
    text = run.spec_path.read_text()
    monkeypatch.setenv("LTUI_HOME", str(tmp_path / "other"))
    monkeypatch.setenv("SLURM_TMPDIR", str(tmp_path / "node"))
    with pytest.raises(ProblemError, match="this node does not see the directory of the run"):
        prepare(run_id, token, text)
    assert runs(tmp_path / "other") == []


def test_a_folder_that_no_script_can_name_leaves_no_run(
    ltui: Ltui, slurm: Slurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, private_home: Path
) -> None:
    slurm.add("sbatch", output="4711\n")
    folder = tmp_path / "a\ntouch code"
    folder.mkdir()
    monkeypatch.chdir(folder)
    done = ltui("submit", "--", "true", code=2)
    assert "the value has a line break" in done.err
    assert slurm.calls("sbatch") == []
    assert runs(private_home) == []


def test_a_submitted_run_stands_in_the_list_as_queued(
    ltui: Ltui, slurm: Slurm, private_home: Path
) -> None:
    slurm.add("sbatch", output="4711\n")
    slurm.add("squeue", output="4711|PENDING|Priority|N/A|N/A|\n")
    done = ltui("submit", "--time", "90", "--name", "mine", "--", "true", code=0)
    assert "is queued in SLURM as job 4711" in done.out
    (run_id,) = runs(private_home)
    script = private_home / "runs" / run_id / "slurm" / "job.sh"
    assert slurm.calls("sbatch") == [["--parsable", str(script)]]
    assert oct(script.stat().st_mode & 0o777) == "0o600"
    (listed,) = answer(ltui("runs", "--json", code=0).out)
    assert listed["state"] == "queued"
    assert listed["detail"] == "queued in SLURM: waits for priority"
    shown = ltui("show", "mine", code=0).out
    assert "queued in SLURM: waits for priority" in shown
    assert len(slurm.calls("squeue")) == 1


def test_only_printing_leaves_nothing(ltui: Ltui, slurm: Slurm, private_home: Path) -> None:
    done = ltui("submit", "--nodes", "2", "--print", "--", "true", "it's", code=0)
    assert done.out.startswith("#!/bin/bash\n#SBATCH --job-name=")
    assert "#SBATCH --nodes=2\n" in done.out
    assert runs(private_home) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--", "true"], "sbatch was not found on PATH"),
        (["--time", "4h", "--", "true"], "not a time limit of SLURM"),
        (["--sbatch=nodes=2", "--", "true"], "Use --nodes."),
        (["--nodes", "0", "--", "true"], "not a whole number of 1 or more"),
        (["--print"], "there is nothing to run"),
        (["--print", "quickstart", "--", "true"], "a preset and a command are given"),
        (["--print", "--set", "a=1", "--", "true"], "a command has no configuration"),
        (["--print", "--", "no-such-program-here"], "no executable program of that name"),
        (["--print", "quikstart"], "Did you mean `quickstart`"),
        (["--print", "quickstart", "--set", "trainer.num_nodes=2"], "Use --nodes."),
        (
            ["--print", "quickstart", "--gpus-per-node=2", "--set", "trainer.accelerator=cpu"],
            "trains on the CPU",
        ),
    ],
)
def test_bad_input_is_one_sentence(
    ltui: Ltui, slurm: Slurm, private_home: Path, words: list[str], said: str
) -> None:
    done = ltui("submit", *words, code=2)
    assert said in done.err, done.err
    assert done.err.count("\n") == 1
    assert runs(private_home) == []


@pytest.mark.parametrize(
    ("output", "error", "code", "said"),
    [
        (
            "",
            "sbatch: error: Batch job submission failed: Invalid partition name specified\n",
            1,
            "did not accept the job (Batch job submission failed: Invalid partition name",
        ),
        ("", "", 1, "did not accept the job (sbatch failed)"),
        ("no number\n", "", 0, "printed no job number: no number"),
    ],
)
def test_what_sbatch_rejects_leaves_no_run(
    ltui: Ltui, slurm: Slurm, private_home: Path, output: str, error: str, code: int, said: str
) -> None:
    slurm.add("sbatch", output, error, code)
    done = ltui("submit", "--", "true", code=2)
    assert said in done.err
    assert done.err.count("\n") == 1
    assert runs(private_home) == []


@pytest.mark.parametrize(
    ("state", "reason", "restarts", "continues"),
    [
        ("RUNNING", "None", 0, True),
        ("COMPLETING", "TimeLimit", 0, True),
        ("COMPLETING", "None", 0, False),
        ("COMPLETING", "None", 1, True),
    ],
)
def test_a_job_that_someone_has_cancelled_is_not_requeued(
    slurm: Slurm, run_dir: RunDir, state: str, reason: str, restarts: int, continues: bool
) -> None:
    """``restarts``: of SLURM, which has requeued a preempted job by itself if it counts one."""
    write_life(run_dir, requeued=True)
    slurm.add("scontrol", f"JobId=7 JobState={state} Reason={reason} Restarts={restarts}\n")
    assert continue_run(run_dir, 0) == EXIT_STOPPED
    requeued = ["requeue", "7"] in slurm.calls("scontrol")
    assert requeued == (continues and not restarts)
    after = required(read_record(run_dir))
    assert after.lives[-1].requeued == continues
    assert after.note == (None if continues else "not requeued: job 7 was cancelled")


@pytest.mark.parametrize("begun", [False, True])
def test_a_job_leaves_a_run_that_somebody_has_resumed_meanwhile(
    slurm: Slurm, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    """A resume may come between the end of the run and the end of its job."""
    write_life(run_dir, requeued=False)
    write_resubmitted(run_dir, required(read_record(run_dir)), "8")
    if begun:
        resumed = required(read_record(run_dir))
        lives = (*resumed.lives, Life(job_id="8", started_at=3.0))
        write_lives(run_dir, resumed.with_lives(lives))
    before = read_record(run_dir)
    slurm.add("scontrol", "JobId=7 JobState=RUNNING Reason=None Restarts=0\n")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert continue_run(run_dir, 0) == EXIT_STOPPED
    assert not slurm.calls("scontrol")
    assert read_record(run_dir) == before


def test_a_run_that_its_next_job_has_begun_is_not_stopped(
    slurm: Slurm, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job records its start some seconds before the attempt of the run begins."""
    write_life(run_dir, requeued=False)
    record = required(read_record(run_dir))
    write_lives(run_dir, record.with_lives((*record.lives, Life(job_id="8", started_at=3.0))))
    ended = snapshot(state=RunState.STOPPED, ended_at=2.0)
    slurm.add("squeue", output="8|RUNNING|None|N/A|N/A|n1\n")
    assert with_job(run_dir, ended).state is RunState.STARTING
    assert with_job(run_dir, replace(ended, ended_at=4.0)).state is RunState.STOPPED
    with monkeypatch.context() as in_job:
        in_job.setenv("SLURM_JOB_ID", "8")
        assert with_job(run_dir, ended).state is RunState.STOPPED
    (run_dir.home / "slurm-queue.json").unlink()
    slurm.add("squeue", output="")
    assert with_job(run_dir, ended).state is RunState.STOPPED


def test_why_a_job_could_not_start_a_run_is_said_of_the_run(
    slurm: Slurm, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_run_dir: RunDir) -> None:
        raise ProblemError.of(where="127.0.0.1:29500", what="the port is taken.")

    monkeypatch.setenv("SLURM_JOB_ID", "8")
    monkeypatch.setattr(job_nodes.Warnings, "install", lambda _: None)
    monkeypatch.setattr(job_nodes, "hide_slurm_from_lightning", lambda: None)
    monkeypatch.setattr(job_nodes, "_write_nodes", refuse)
    write_life(run_dir, requeued=False)
    with pytest.raises(ProblemError):
        job_nodes.run_head(run_dir)
    shown = with_job(run_dir, snapshot(state=RunState.STOPPED, detail="stopped at step 5"))
    assert shown.detail == "stopped at step 5; job 8 ended: 127.0.0.1:29500: the port is taken."


def test_all_processes_together_ask_slurm_at_most_twice_a_minute(
    slurm: Slurm, private_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private_home.mkdir()
    now_s = 1e9
    monkeypatch.setattr("ltui.training.slurm.slurm_client.time.time", lambda: now_s)
    slurm.add("squeue", output="7|RUNNING|None|N/A|N/A|n1\n8|PENDING|Resources|N/A|N/A|\n")
    caches = [QueueCache(private_home) for _ in range(3)]
    for _ in range(5):
        for cache in caches:
            seven, eight = required(cache.job("7")), required(cache.job("8"))
            assert (seven.state, eight.reason) == ("RUNNING", "Resources")
    assert len(slurm.calls("squeue")) == 1
    now_s += ASK_S
    slurm.add("squeue", error="squeue: error: Unable to contact slurm controller\n", code=1)
    for cache in caches:
        assert required(cache.job("7")).state == "RUNNING"
    assert len(slurm.calls("squeue")) == 2
    now_s += ASK_S
    assert caches[0].job("7", since_s=now_s) is None, "an answer from before that time"
    assert len(slurm.calls("squeue")) == 2, "asked again too early after a failure"


def test_a_job_that_squeue_has_forgotten_is_looked_up_once(
    slurm: Slurm, private_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private_home.mkdir()
    now_s = 1e9
    monkeypatch.setattr("ltui.training.slurm.slurm_client.time.time", lambda: now_s)
    slurm.add("squeue", output="")
    slurm.add("sacct", output="7|CANCELLED by 1000|0:15|Unknown|2026-05-03T14:30:00|n1\n")
    cache = QueueCache(private_home)

    def states(job_id: str, count: int) -> list[str]:
        nonlocal now_s
        found = []
        for _ in range(count):
            found.append(required(cache.job(job_id)).state)
            now_s += ASK_S
        return found

    assert states("7", 4) == ["GONE", "CANCELLED", "CANCELLED", "CANCELLED"]
    assert (len(slurm.calls("squeue")), len(slurm.calls("sacct"))) == (1, 1)
    slurm.add("sacct", error="Slurm accounting storage is disabled\n", code=1)
    assert states("9", 3) == ["GONE", "FORGOTTEN", "FORGOTTEN"]


def test_each_job_decides_the_ports_of_its_nodes_anew(
    private_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head would else listen where the agents of the job before looked for it."""
    spec = RunSpec(id="owl-0001", name="owl", created_at=0.0, cwd="/", python="python", config={})
    run_dir = RunDir(private_home / "runs" / spec.id)
    run_dir.path.parent.mkdir(parents=True)
    create_run_directory(run_dir, spec)
    step = {
        "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NODELIST": "127.0.0.[1-2]",
    }
    for name, value in step.items():
        monkeypatch.setenv(name, value)
    for job in ("3001", "3002"):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        monkeypatch.setenv("LTUI_NODE_KEY", LinkKey.generate().text)
        _write_nodes(run_dir)
        nodes = required(run_dir.read_spec().nodes)
        assert head_place(run_dir, nodes) == f"127.0.0.1:{25000 + int(job)}"
        write_link_place(run_dir, LinkPlace(nodes.address, nodes.control_port))


def test_job_waits_for_the_jobs_of_other_runs(slurm: Slurm, ltui: Ltui, private_home: Path) -> None:
    slurm.add("sbatch", "8\n")
    slurm.add("squeue", "8|PENDING|Resources|N/A|N/A|\n")
    ltui("submit", "--name", "first", "--", "true", code=0)
    slurm.add("sbatch", "9\n")
    words = ("--after", "first", "--after", "first:ok")
    ltui("submit", "--name", "second", *words, "--", "true", code=0)
    assert slurm.calls("sbatch")[1][1] == "--dependency=afterany:8,afterok:8"
    ltui("exec", "--queue", "--name", "local", "--not-before", "+1h", "--", "true", code=0)
    refused = ltui("submit", "--after", "local", "--", "true", code=2).err
    assert "this run has no job" in refused
    assert len(runs(private_home)) == 3
    ltui("stop", "local", code=0)
