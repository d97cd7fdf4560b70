"""``make gpu`` itself: sections that fail, hang or leave processes, the report, and its set-up."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import psutil
import pytest

from tests.bench import document
from tests.gpu.hardware import __main__ as command
from tests.gpu.hardware import section
from tests.gpu.hardware.check import Check, above, below, holds, off
from tests.gpu.hardware.instruments import ask_torch
from tests.gpu.hardware.programs import MARK, judge_doctor, judge_quickstart, judge_tests
from tests.gpu.hardware.report import REHEARSAL, report, summary
from tests.gpu.hardware.section import read_checks, run_section
from tests.live_processes import processes_with, wait_until_gone
from tests.run_module import ROOT, run_module
from tests.waiting import wait_for

MADE_UP = """
import os, subprocess, sys, time
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


@pytest.fixture
def make_gpu(monkeypatch):
    """Run the command with options in this process."""
    monkeypatch.setattr(command, "machine", lambda: ["a machine"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def run(*options):
        monkeypatch.setattr(sys, "argv", ["make gpu", *map(str, options)])
        return command.main()

    return run


def test_a_section_runs_in_a_home_of_its_own_and_what_it_leaves_is_killed_and_reported(made_up):
    found = made_up("subprocess.Popen(['sleep', '611'], start_new_session=True)")
    assert found["home"].measured
    assert found["accelerator"].measured == "cpu"
    assert found["time"].measured
    assert found["the section ended"].ok
    assert found["processes left running"].measured == ["sleep 611"]
    assert found["processes left running"].ok is False


@pytest.mark.parametrize(
    ("then", "limit_s", "ended"),
    [("1 / 0", 30.0, "exit code 1"), ("time.sleep(600)", 2.0, "killed after 2 s")],
)
def test_a_section_that_fails_or_hangs_keeps_its_checks(made_up, tmp_path, then, limit_s, ended):
    found = made_up(then, limit_s)
    assert "accelerator" in found
    assert (found["the section ended"].measured, found["the section ended"].ok) == (ended, False)
    assert found["processes left running"].ok
    if "exit" in ended:
        assert "ZeroDivisionError" in (tmp_path / "results" / "log.txt").read_text()


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
    make = subprocess.Popen(
        [sys.executable, "-m", "tests.gpu.hardware", "--rehearsal", "--out", tmp_path, "loaders"],
        cwd=ROOT,
        # After SIGKILL, nothing removes the temporary home of the section.
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
    )
    try:
        wait_for((tmp_path / "rehearsal" / "loaders" / "checks.jsonl").exists, make)
        (process,) = psutil.Process(make.pid).children()
        home = Path(process.environ()["LTUI_HOME"])
        assert home.parent == tmp_path
        make.send_signal(number)
        code = make.wait(60)
        wait_until_gone(lambda: [p for p in processes_with("LTUI_HOME", home) if p == process], 20)
        if number == signal.SIGTERM:
            assert code == 128 + signal.SIGTERM
            assert not home.exists()
    finally:
        make.kill()
        make.wait()
        for left in processes_with("TMPDIR", tmp_path):
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()


def test_the_report_has_every_section_and_says_that_it_is_a_rehearsal():
    sections = {
        "readings": [above("a | b", 1.0, 2.0), below("c", None, 1.0), holds("d", True)],
        "faults": [],
    }
    text = report(["a machine", "torch 1"], sections, rehearsal=True)
    for part in (
        REHEARSAL,
        "a machine; torch 1",
        "| a \\| b | 1 | > 2 | OFF |",
        "| c | n/a | < 1 |  |",
        "| d | yes | yes | ok |",
        "Not run.",
    ):
        assert part in text
    assert summary(sections) == "1 ok, 1 off, 1 for information; not run: faults"
    assert REHEARSAL not in report([], {"faults": [Check("a", [])]}, rehearsal=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["nothing"], "no section 'nothing'; there are: programs, readings"),
        (["--rehearsal", "--write"], "not written into the documents"),
    ],
)
def test_wrong_options_are_refused(make_gpu, capsys, options, message):
    with pytest.raises(SystemExit) as ended:
        make_gpu(*options)
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_section_gets_no_more_than_the_limit(make_gpu, capsys, tmp_path):
    out = ["--out", tmp_path, "--limit", "0.5", "--minutes", "0.015"]
    assert make_gpu("--rehearsal", *out, "telemetry", "readings") == 1
    shown = capsys.readouterr().out
    assert "| the section ended | killed after 0.5 s | exit code 0 | OFF |" in shown
    assert "readings: not begun, 0.5 s might not be enough" in shown


def test_torch_answers_or_the_error_is_one_of_the_machine(tmp_path, monkeypatch):
    (tmp_path / "torch.py").touch()  # That of the current folder is imported, which takes no time.
    monkeypatch.chdir(tmp_path)
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


# -- the section programs --------------------------------------------------------------------------

TESTS = {
    "passes": ("pass", []),
    "fails": ("assert False", ["passed", "failed"]),
    "skips": ("pytest.skip('no reason')", ["passed", "skipped"]),
}
"""Body of a test, and the numbers that are off after it."""


def test_a_skipped_test_is_no_passed_one(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu")
    for name, (body, _) in TESTS.items():
        text = f"import pytest\n@pytest.mark.gpu\ndef test_one():\n    {body}\n"
        (tmp_path / f"test_{name}.py").write_text(text)
    program = (
        "import pytest\n"
        f"for name in {[*TESTS]}:\n"
        "    pytest.main(['-m', 'gpu', f'--junitxml={name}.xml', f'test_{name}.py'])\n"
    )
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    words = [sys.executable, "-c", program]
    subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, timeout=120)
    for name, (_, wrong) in TESTS.items():
        found = off(judge_tests(tmp_path / f"{name}.xml", skipped=False))
        assert [what.rpartition(" ")[2] for what in found] == wrong, name
    assert len(off(judge_tests(tmp_path / "missing.xml", skipped=False))) == 1


def test_a_file_of_each_test_that_needs_a_gpu_is_found():
    """The section imports only the files that contain the marker's full name."""
    texts = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    assert [MARK in text for text in texts if "mark.gpu" in text].count(False) == 0
    assert sum(MARK in text for text in texts) >= 3


@pytest.mark.parametrize(
    ("changed", "count"),
    [
        ({}, 0),
        ({"GPU driver": "575.1"}, 1),
        ({"GPU 0": "NVIDIA H100, 1 GiB of 80 GiB free"}, 1),
        ({"torch on GPUs": "none usable, CUDA 13.0: the driver is too old, NCCL 2.28"}, 1),
        ({"torch on GPUs": "CUDA 13.0, 1 usable"}, 1),
    ],
)
def test_a_doctor_that_is_wrong_is_off(changed, count):
    values = {
        "GPU driver": "580.65.06",
        "GPU 0": "NVIDIA H200, 139 GiB of 140 GiB free",
        "torch on GPUs": "CUDA 13.0, NCCL 2.28.9, 1 usable",
        **changed,
    }
    findings = [{"what": what, "value": value, "ok": True} for what, value in values.items()]
    document = {"ok": True, "findings": findings}
    gpus = [("NVIDIA H200", "580.65.06")]
    assert len(off(judge_doctor(document, gpus, rehearsal=False))) == count


@pytest.mark.parametrize(
    ("changed", "count"),
    [
        ({}, 0),
        ({"state": "failed"}, 1),
        ({"ranks": [{"device": "cpu"}]}, 1),
        ({"ranks": [], "global_step": None, "metrics": {}}, 3),
    ],
)
def test_a_quickstart_that_did_not_train_on_the_gpu_is_off(changed, count):
    run = {
        "state": "finished",
        "ranks": [{"device": "cuda:0"}],
        "global_step": 2520,
        "metrics": {"val/accuracy": {"last": 0.98}},
        **changed,
    }
    assert len(off(judge_quickstart(run, "cuda"))) == count


# -- without network: packages of an environment, and wheels for the rest --------------------------


def _set_up(python, wheels, venv):
    return subprocess.run(
        ["bash", ".ci/setup-offline", python, wheels, venv],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.mark.parametrize(
    ("python", "wheels", "message"),
    [(sys.executable, "missing", "no folder"), ("false", "", "must have pip and torch")],
)
def test_what_is_missing_is_named(tmp_path, python, wheels, message):
    done = _set_up(python, tmp_path / wheels, tmp_path / "venv")
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "venv").exists()


@pytest.mark.slow
def test_only_what_is_missing_is_installed(tmp_path):
    """This environment lacks nothing, so only ltui itself is installed, by setuptools' wheel.

    A wheel of FFCV that can't be installed stops nothing.
    """
    setuptools = distribution("setuptools")
    name = f"setuptools-{setuptools.version}-py3-none-any.whl"
    with zipfile.ZipFile(tmp_path / name, "w") as wheel:
        for file in setuptools.files or []:
            path = Path(str(file.locate()))
            if path.is_file() and path.suffix != ".pyc":
                wheel.write(path, str(file))
    zipfile.ZipFile(tmp_path / "ffcv-9.0-py3-none-any.whl", "w").close()
    done = _set_up(sys.executable, tmp_path, tmp_path / "venv")
    assert done.returncode == 0, done.stderr
    assert f"without FFCV: {tmp_path}/ffcv-9.0-py3-none-any.whl does not fit" in done.stderr
    python = tmp_path / "venv" / "bin" / "python"
    installed = {path.name.partition("-")[0] for path in tmp_path.glob("venv/lib/*/*/*.dist-info")}
    assert installed == {"ltui_train"}
    asked = "import torch, ltui.app.cli, sys; print(ltui.app.cli.__file__, sys.prefix)"
    answer = subprocess.run([python, "-c", asked], capture_output=True, text=True, timeout=100)
    assert answer.stdout.split() == [str(ROOT / "app" / "cli.py"), str(tmp_path / "venv")]
