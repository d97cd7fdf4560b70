"""The command that opens the dashboard of a run on another machine."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path

import pytest

from ltui.app.slurm.remote_dashboard import attach_words, run_on_terminal, ssh_words
from ltui.training.config.run_spec import RunSpec
from ltui.training.lifecycle.launch_run import create_run_directory
from ltui.training.lifecycle.run_status import is_abandoned, resolve_snapshot
from ltui.training.problem import ProblemError
from ltui.training.slurm.batch_script import JobOptions
from ltui.training.slurm.job_record import (
    JobRecord,
    Life,
    read_record,
    write_head,
    write_lives,
    write_submission,
)
from ltui.training.slurm.run_place import job_of_environment, pause_cost
from ltui.training.state.run_snapshot import RunState
from ltui.training.store.run_directory import RunDir, read_json, write_json
from tests.required import required


def programs(folder: Path, *names: str, code: int = 0) -> str:
    """Create programs that end with ``code``, and return their folder."""
    folder.mkdir()
    for name in names:
        path = folder / name
        path.write_text(f"#!/bin/sh\nexit {code}\n")
        path.chmod(0o700)
    return str(folder)


@pytest.fixture
def elsewhere(private_home: Path) -> RunDir:
    """A run whose job runs on another machine."""
    (private_home / "runs").mkdir(parents=True)
    run_dir = RunDir(private_home / "runs" / "far-owl-12ab")
    spec = RunSpec(id=run_dir.id, name="far-owl", created_at=1.0, cwd="/", python="python")
    create_run_directory(run_dir, spec)
    record = JobRecord(token="t0", submitted_at=1.0, options=JobOptions(), first_job_id="12")
    write_submission(run_dir, record)
    write_lives(run_dir, record.with_lives([Life(job_id="12", started_at=time.time())]))
    write_head(run_dir, "12", None, "n[1-2]")
    head = required(read_json(run_dir.slurm_dir / "head.json"))
    document = {**head, "boot_id": "another boot", "host": "n1", "node": "n1"}
    write_json(run_dir.slurm_dir / "head.json", document)
    return run_dir


def test_a_step_of_the_job_or_ssh(
    elsewhere: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", programs(tmp_path / "slurm", "srun", "ssh"))
    words = required(attach_words(elsewhere, readonly=True))
    assert words[:5] == ["srun", "--pty", "--overlap", "--jobid=12", "--nodelist=n1"]
    assert words[-6:] == ["attach", "--run", elsewhere.id, "--token", "t0", "--readonly"]
    monkeypatch.setenv("PATH", programs(tmp_path / "only-ssh", "ssh"))
    words = required(attach_words(elsewhere))
    assert words[:4] == ["ssh", "-t", "--", "n1"]
    assert shlex.split(words[4])[-5:] == ["attach", "--run", elsewhere.id, "--token", "t0"]
    monkeypatch.setenv("PATH", programs(tmp_path / "nothing"))
    with pytest.raises(ProblemError, match="there is no srun or ssh here"):
        attach_words(elsewhere)


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("head", "host", "-oProxyCommand=touch trap"),
        ("head", "job_id", "--user=root"),
        ("lives", "next_job_id", "--user=root"),
        ("submission", "job_id", "--user=root"),
        ("submission", "job_id", ["12"]),
    ],
)
def test_a_given_run_names_no_options_for_slurm_or_ssh(
    elsewhere: RunDir, file: str, key: str, value: object
) -> None:
    assert read_record(elsewhere) is not None
    path = elsewhere.slurm_dir / f"{file}.json"
    write_json(path, {**json.loads(path.read_text()), key: value})
    assert read_record(elsewhere) is None


def test_a_run_elsewhere_is_not_recovered_here(
    elsewhere: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its supervisor's lock names a process of another machine, which looks dead here."""
    monkeypatch.setenv("PATH", programs(tmp_path / "nothing"))
    elsewhere.lock_path.write_text("1\n2\nanother boot\n")
    assert not is_abandoned(elsewhere)
    snapshot = resolve_snapshot(elsewhere)
    assert (snapshot.state, snapshot.detail) == (RunState.RUNNING, "job 12 runs on n1")


def test_a_run_of_another_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", programs(tmp_path / "only-ssh", "ssh"))
    words = ssh_words("me@gpu-02:brave owl", readonly=True)
    assert words[:4] == ["ssh", "-t", "--", "me@gpu-02"]
    assert shlex.split(words[4])[-3:] == ["attach", "brave owl", "--readonly"]
    for name in ("-oProxyCommand=x:run", "host:", ":run", "a b:run"):
        with pytest.raises(ProblemError, match="does not name a host and a run"):
            ssh_words(name, readonly=False)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (255, "gpu-02: ssh could not connect, or its connection broke; its own message is above"),
        (127, "ltui cannot be run there. Install ltui there at the same path"),
    ],
)
def test_ssh_that_fails_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, said: str
) -> None:
    monkeypatch.setenv("PATH", programs(tmp_path / "only-ssh", "ssh", code=code))
    with pytest.raises(ProblemError, match=said):
        run_on_terminal(ssh_words("gpu-02:last", readonly=False))


@pytest.mark.parametrize("code", [0, 2])
def test_the_exit_code_of_a_dashboard_elsewhere_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setenv("PATH", programs(tmp_path / "only-ssh", "ssh", code=code))
    assert run_on_terminal(ssh_words("gpu-02:last", readonly=False)) == code


def test_what_a_pause_costs() -> None:
    job = job_of_environment(
        {
            "SLURM_JOB_ID": "12",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_GPUS_ON_NODE": "8",
            "SLURM_JOB_END_TIME": "11400",
        }
    )
    assert pause_cost(required(job), "owl-1", 0.0) == (
        "job 12 keeps 2 nodes and 16 GPUs for another 3 h 10 min; `ltui stop owl-1 --requeue` "
        "gives them back and continues later"
    )
    assert job_of_environment({}) is None
