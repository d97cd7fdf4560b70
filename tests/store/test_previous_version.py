"""A run that the version before the packages were divided made: it opens, exports and resumes.

The fixture is a run of two ranks of the preset ``quickstart`` with a small network. It was stopped
at step 517, resumed, and finished at step 1350. Its logs, queue files and evidence were left out.
"""

from __future__ import annotations

import csv
import io
import shutil
import sys
import tarfile
from pathlib import Path

import pytest

from tests.ltui_command import answer, run_ltui

ARCHIVE = Path(__file__).parent / "previous_version" / "before-rename-9579.tar.xz"
RUN = "before-rename-9579"


@pytest.fixture
def old_run(private_home: Path) -> Path:
    """The run's directory in this test's home; the interpreter that trains is this one."""
    runs = private_home / "runs"
    runs.mkdir(parents=True, mode=0o700)
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(runs, filter="data")
    run = runs / RUN
    run.chmod(0o700)
    spec = run / "spec.yaml"
    spec.write_text(
        spec.read_text()
        .replace("python: /usr/bin/python3", f"python: {sys.executable}")
        .replace("cwd: /tmp", f"cwd: {private_home}")
    )
    return run


def ltui(*words: str) -> str:
    return run_ltui(*words, code=0).stdout


def test_it_opens(old_run: Path) -> None:
    shown = answer(ltui("show", RUN, "--json"))
    assert (shown["state"], shown["global_step"], shown["attempt"]) == ("finished", 1350, 2)
    steps = [checkpoint["global_step"] for checkpoint in shown["checkpoints"] if checkpoint["ok"]]
    assert sorted(steps) == [517, 1350]
    assert shown["metrics"]["val/accuracy"]["last"] > 0.9


def test_its_history_is_exported_without_a_gap(old_run: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(ltui("export", RUN))))
    losses = [int(r["step"]) for r in rows if r["metric"] == "train/loss" and r["rank"] == "0"]
    assert losses == list(range(1, 1351))


def test_its_time_has_parts(old_run: Path) -> None:
    shown = answer(ltui("show", RUN, "--time", "--json"))
    parts = shown["run"]["parts_us"]
    assert sum(parts.values()) == shown["run"]["wall_us"] > 0
    assert 0 < shown["goodput"] < 1
    assert {"training", "start_up", "validation", "stopped"} <= parts.keys()
    lines = ltui("show", RUN, "--time")
    assert "█ training" in lines
    assert "goodput" in lines.splitlines()[0]
    shutil.copytree(old_run, old_run.with_name("copy-0001"))
    compared = answer(ltui("compare", RUN, "copy-0001", "--json"))
    # From coarser steps.
    assert sum(compared["runs"][0]["time_us"].values()) == shown["run"]["wall_us"]
    assert compared["runs"][0]["goodput"] == pytest.approx(shown["goodput"], rel=0.05)
    listed = answer(ltui("runs", "--columns", "goodput", "--json"))
    assert 0 < listed[0]["goodput"] < 1


@pytest.mark.slow
def test_it_resumes(old_run: Path) -> None:
    ltui("resume", RUN, "--plain", "--set", "trainer.max_epochs=31")
    shown = answer(ltui("show", RUN, "--json"))
    assert (shown["state"], shown["global_step"], shown["attempt"]) == ("finished", 1395, 3)
    rows = list(csv.DictReader(io.StringIO(ltui("export", RUN))))
    losses = [int(r["step"]) for r in rows if r["metric"] == "train/loss" and r["rank"] == "0"]
    assert losses == list(range(1, 1396))
