"""``make gpu`` itself: sections that fail, hang or leave processes, and the report."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.bench import document
from tests.gpu.hardware import section
from tests.gpu.hardware.ask_torch import ask_torch
from tests.gpu.hardware.check import Check, above, below, holds
from tests.gpu.hardware.report import REHEARSAL, report, summary
from tests.gpu.hardware.section import read_checks, run_section
from tests.live_processes import processes_with, wait_until_gone
from tests.run_module import ROOT, run_module
from tests.waiting import wait_for

MADE_UP = """
import os, subprocess, sys, time
from tests.gpu.hardware.ask_torch import ask_torch
from tests.gpu.hardware.check import Check

def checks(conditions):
    yield Check("home", os.environ["LTUI_HOME"] == str(conditions.home))
    yield Check("accelerator", conditions.accelerator)
    yield Check("time", 0 < conditions.seconds_left() < 60)
    {then}
"""


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    """Run a section that goes on with the statement ``then``."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def run(then, limit_s=30.0):
        (tmp_path / "made_up_section.py").write_text(MADE_UP.format(then=then))
        folder = tmp_path / "results"
        checks = run_section("made_up_section", folder, rehearsal=True, limit_s=limit_s)
        assert checks == read_checks(folder)
        return {check.what: check for check in checks}

    return run


def test_a_section_runs_in_a_home_of_its_own(made_up):
    found = made_up("yield Check('last', None)")
    assert found["home"].measured
    assert found["accelerator"].measured == "cpu"
    assert found["time"].measured
    assert found["the section ended"].ok
    assert found["processes left running"].ok


@pytest.mark.parametrize(
    ("then", "limit_s", "ended"),
    [("1 / 0", 30.0, "exit code 1"), ("time.sleep(600)", 3.0, "killed after 3 s")],
)
def test_a_section_that_fails_or_hangs_keeps_its_checks(made_up, tmp_path, then, limit_s, ended):
    found = made_up(then, limit_s)
    assert "accelerator" in found
    assert (found["the section ended"].measured, found["the section ended"].ok) == (ended, False)
    if "exit" in ended:
        assert "ZeroDivisionError" in (tmp_path / "results" / "log.txt").read_text()


def test_a_process_that_a_section_leaves_is_killed_and_reported(made_up):
    found = made_up("subprocess.Popen(['sleep', '611'], start_new_session=True)")
    assert found["processes left running"].measured == ["sleep 611"]
    assert found["processes left running"].ok is False


def test_a_process_that_a_section_leaves_is_killed_if_the_command_is_interrupted(
    made_up, monkeypatch
):
    homes = []

    def interrupted(module, arguments, log, limit_s, environment):
        homes.append(environment["LTUI_HOME"])
        run_module(module, arguments, log, limit_s, environment)
        # A process has no environment for a moment while it starts its program.
        wait_for(lambda: processes_with("LTUI_HOME", homes[0]))
        raise KeyboardInterrupt

    monkeypatch.setattr(section, "run_module", interrupted)
    monkeypatch.setattr(section, "_LEAVE_S", 0.0)
    with pytest.raises(KeyboardInterrupt):
        made_up("subprocess.Popen(['sleep', '60'], start_new_session=True)")
    (home,) = homes
    wait_until_gone(lambda: processes_with("LTUI_HOME", home), 20)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name)
def test_a_section_ends_with_the_command(number, tmp_path):
    # The section `loaders` reports its first check at once and then works for half a minute.
    command = subprocess.Popen(
        [sys.executable, "-m", "tests.gpu.hardware", "--rehearsal", "--out", tmp_path, "loaders"],
        cwd=ROOT,
        # After SIGKILL, nothing removes the temporary home of the section.
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
    )
    try:
        wait_for((tmp_path / "rehearsal" / "loaders" / "checks.jsonl").exists, command)
        (process,) = psutil.Process(command.pid).children()
        home = Path(process.environ()["LTUI_HOME"])
        assert home.parent == tmp_path
        command.send_signal(number)
        code = command.wait(60)
        wait_until_gone(lambda: [p for p in processes_with("LTUI_HOME", home) if p == process], 20)
        if number == signal.SIGTERM:
            assert code == 128 + signal.SIGTERM
            assert not home.exists()
    finally:
        command.kill()
        command.wait()
        for left in processes_with("TMPDIR", tmp_path):
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()


def test_the_report_has_every_section_and_says_that_it_is_a_rehearsal():
    sections = {
        "readings": [above("a | b", 1.0, 2.0), below("c", None, 1.0), holds("d", True)],
        "faults": [],
    }
    text = report(["a machine", "torch 1"], sections, rehearsal=True)
    assert REHEARSAL in text
    assert "a machine; torch 1" in text
    assert "| a \\| b | 1 | > 2 | OFF |" in text
    assert "| c | n/a | < 1 |  |" in text
    assert "| d | yes | yes | ok |" in text
    assert "Not run." in text
    assert summary(sections) == "1 ok, 1 off, 1 for information; not run: faults"
    assert REHEARSAL not in report([], {"faults": [Check("a", [])]}, rehearsal=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["nothing"], "no section 'nothing'; there are: programs, readings"),
        (["--rehearsal", "--write"], "not written into the documents"),
    ],
)
def test_wrong_options_are_refused(options, message):
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.hardware", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())


def test_a_section_gets_no_more_than_the_limit(tmp_path):
    out = ["--out", tmp_path, "--limit", "0.5", "--minutes", "0.015"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.hardware", "--rehearsal", *out, "telemetry", "readings"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1
    assert "| the section ended | killed after 0.5 s | exit code 0 | OFF |" in done.stdout
    assert "readings: not begun, 0.5 s might not be enough" in done.stdout


def test_torch_answers_or_the_error_is_one_of_the_machine():
    assert ask_torch("6 * 7") == "42"
    with pytest.raises(OSError, match="exit status 1"):
        ask_torch("torch.missing")


def test_a_document_without_the_marks_is_left_alone(tmp_path, monkeypatch):
    file = tmp_path / "benchmarks.md"
    file.write_text("text\n<!-- gpu: begin -->\nold\n<!-- gpu: end -->\nmore\n")
    monkeypatch.setattr(document, "DOCUMENT", file)
    document.write_between("gpu", "new")
    after = file.read_text()
    assert after == "text\n<!-- gpu: begin -->\nnew\n<!-- gpu: end -->\nmore\n"
    with pytest.raises(ValueError, match="lacks"):
        document.write_between("peers", "new")
    assert file.read_text() == after
