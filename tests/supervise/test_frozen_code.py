"""Frozen code is what runs: however a module is found, and whatever becomes of the original."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ltui.app.cli import main
from ltui.app.command_output import EXIT_BAD_INPUT, EXIT_DONE
from ltui.training.lifecycle.launch_run import create_run_directory, launch, start_first_attempt
from ltui.training.lifecycle.record_code import record_code
from ltui.training.lifecycle.resume_run import resume
from ltui.training.problem import ProblemError
from ltui.training.rank.frozen_imports import script_place
from ltui.training.state.run_snapshot import RunState
from ltui.training.store.frozen_code import frozen_folder
from ltui.training.store.run_directory import RunDir
from tests.lifecycle.test_freeze_code import write
from tests.lifecycle.test_record_code import git
from tests.required import required
from tests.supervise.conftest import Runs, stored_events
from tests.waiting import wait_for

_WAITS = """
import os, sys, time
open("started", "a").write("x")
while not os.path.exists("gate"):
    time.sleep(0.02)
"""
_PRINTS = """
import {module}
print("says", {module}.WORD, "in", os.getcwd(), *sys.argv[1:])
print("from", os.path.relpath({module}.__file__, {module}.__file__.partition("/code/")[0]))
"""
_WORKERS = """
import multiprocessing, os, sys
from concurrent.futures import ProcessPoolExecutor
def word():
    import pkg.late
    return pkg.late.WORD
if __name__ == "__main__":
    exec(open(os.path.join(os.path.dirname(__file__), "waits.py")).read())
    for method in ("spawn", "forkserver", "fork"):
        with ProcessPoolExecutor(1, multiprocessing.get_context(method)) as pool:
            print(method, "says", pool.submit(word).result())
"""


@pytest.fixture
def project(runs: Runs) -> Path:
    """A repository whose programs wait for a file, and then print where a module is from."""
    folder = runs.cwd / "project"
    prints = _WAITS + _PRINTS
    write(folder, "train.py", "pkg/main.py", text=prints.format(module="pkg.late"))
    write(folder, "inner.py", text=prints.format(module="inside.late"))
    write(folder, "waits.py", text=_WAITS)
    write(folder, "workers.py", text=_WORKERS)
    write(folder, "pkg/__init__.py", "src/inside/__init__.py")
    write(folder, "pkg/late.py", "src/inside/late.py", text="WORD = 'then'\n")
    write(folder, "run.sh", text="#!/bin/sh\ncd .\nexec python train.py by shell\n")
    (folder / "run.sh").chmod(0o755)
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "first")
    runs.cwd = folder
    return folder


def ask_for(runs: Runs, *command: str, **env: str) -> RunDir:
    """Create a frozen run, which is not started yet."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    spec = runs.spec(*command).with_changes(freeze=True, env={"PATH": path, **env})
    run = RunDir(runs.home / "runs" / spec.id)
    create_run_directory(run, spec)
    return run


def printed(runs: Runs, run: RunDir) -> str:
    ended = runs.ended(run)
    text = run.engine_log_path(1).read_text()
    assert ended.state is RunState.FINISHED, text
    return text


def edit(project: Path) -> None:
    for path in project.rglob("*.py"):
        text = "WORD = 'now'" if path.name == "late.py" else "raise SystemExit('edited')"
        path.write_text(text)


@pytest.mark.parametrize("change", ["edited", "removed"])
@pytest.mark.parametrize(
    ("command", "env"),
    [
        ("python train.py a", {}),
        ("python -u -W ignore -X utf8 pkg/main.py a", {"PYTHONPATH": "."}),
        ("python -m pkg.main a", {}),
        ("./run.sh", {}),
        ("sh run.sh", {}),
        ("python inner.py a", {"PYTHONPATH": "src"}),
    ],
)
def test_code_edited_between_the_ask_and_the_start_and_after_it(
    command: str, env: dict[str, str], change: str, runs: Runs, project: Path
) -> None:
    run = ask_for(runs, *command.split(), **env)
    write(project, "train.py", "pkg/main.py", "inner.py", text="raise SystemExit('between')\n")
    start_first_attempt(run)
    wait_for(lambda: (project / "started").exists(), seconds=60)
    edit(project)
    if change == "removed":
        for name in ("pkg", "src", "train.py", "inner.py"):
            path = project / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    (project / "gate").touch()
    text = printed(runs, run)
    assert f"says then in {project} " + ("by shell" if "run.sh" in command else "a") in text
    assert "from code/frozen-1/" in text


def test_workers_that_start_late(runs: Runs, project: Path) -> None:
    run = ask_for(runs, "python", "workers.py")
    start_first_attempt(run)
    wait_for(lambda: (project / "started").exists(), seconds=60)
    edit(project)
    (project / "gate").touch()
    text = printed(runs, run)
    assert all(f"{method} says then" in text for method in ("spawn", "forkserver", "fork")), text


_SETUP = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "thing"
version = "1"
[tool.setuptools]
"""


@pytest.mark.parametrize(
    ("layout", "script", "marker"),
    [
        ('package-dir = {"" = "src"}\npackages = ["inside"]\n', "inner.py", "*.pth"),
        ('packages = ["pkg"]\n', "scripts/train.py", "*_finder.py"),
    ],
)
def test_editable_installations(
    layout: str, script: str, marker: str, runs: Runs, project: Path, tmp_path: Path
) -> None:
    """The first by a path of the original, the second by a finder of setuptools."""
    write(project, "pyproject.toml", text=_SETUP + layout)
    write(project, "scripts/train.py", text=(project / "train.py").read_text())
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    (site,) = (tmp_path / "venv" / "lib").glob("*/site-packages")
    build = "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, tmp_path], cwd=project, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    shutil.unpack_archive(wheel, site, "zip")
    assert list(site.glob(f"__editable__{marker}")), "another kind of installation"
    runs.cwd = tmp_path
    run = ask_for(runs, str(python), str(project / script), "a")
    edit(project)
    start_first_attempt(run)
    wait_for(lambda: (tmp_path / "started").exists(), seconds=60)
    shutil.rmtree(project / "pkg")
    shutil.rmtree(project / "src")
    (tmp_path / "gate").touch()
    assert f"says then in {tmp_path} a" in printed(runs, run)


def test_a_module_that_is_not_kept_is_that_of_the_original(runs: Runs, project: Path) -> None:
    """What git ignores is there by a link; what may be a secret is found in the original."""
    secret = "ghp_" + "a1B2" * 9
    write(project, "keys.py", "pkg/more.py", text=f"WORD = '{secret}'\n")
    write(project, "pkg/_version.py", text="WORD = 'built'\n")
    write(project, ".gitignore", text="_version.py\n")
    script = "import keys, pkg.more, pkg._version; print(len(keys.WORD), pkg._version.WORD)\n"
    write(project, "train.py", text=script)
    run = ask_for(runs, "python", "train.py")
    start_first_attempt(run)
    assert "40 built" in printed(runs, run)
    (event,) = [e for e in stored_events(run, "note") if "frozen" in e.text]
    assert "not frozen: pkg/_version.py" in event.text
    assert "left out: keys.py (may hold a secret), pkg/more.py (may hold a secret)" in event.text


def test_configuration_files_of_a_command_are_the_copies(runs: Runs, project: Path) -> None:
    write(project, "a.yaml", "b.toml", "out.json", text="then")
    program = "import sys; print([open(w.rpartition('=')[2]).read() for w in sys.argv[1:]])"
    write(project, "train.py", text=program)
    run = ask_for(runs, "python", "train.py", "a.yaml", "--config=b.toml", "out.json")
    write(project, "a.yaml", "b.toml", "out.json", text="now")
    start_first_attempt(run)
    assert "['then', 'then', 'now']" in printed(runs, run)


@pytest.mark.parametrize(
    ("command", "path", "said"),
    [
        ("python train.py", ".", "its frozen code is missing"),
        ("./run.sh", "run.sh", "is incomplete: .* lacks run.sh"),
        ("python -m pkg.main", "pkg/main.py", "lacks pkg/main.py"),
        ("python train.py", "pkg/late.py", "lacks pkg/late.py"),
        ("python train.py a.yaml", "a.yaml", "lacks a.yaml"),
        ("python train.py", "pkg/late.py has changed", "has changed: .*pkg/late.py"),
        ("python train.py", "data.csv", None),
    ],
)
def test_a_copy_that_is_not_complete_is_a_sentence(
    command: str, path: str, said: str | None, runs: Runs, project: Path
) -> None:
    """But a program may delete data beside its script."""
    write(project, "a.yaml", "data.csv")
    git(project, "add", "-A")
    (project / "gate").touch()
    run = ask_for(runs, *command.split())
    name, changed, _ = path.partition(" has changed")
    gone = frozen_folder(run, 1) / name
    if changed:
        gone.write_text("WORD = 'else'\n")
    else:
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    if said is None:
        start_first_attempt(run)
        assert "says then" in printed(runs, run)
    else:
        with pytest.raises(ProblemError, match=said):
            start_first_attempt(run)
        assert not run.supervisor_log_path.exists()


def test_a_resume_that_cannot_start_leaves_no_copy(runs: Runs, project: Path) -> None:
    run = runs.training()
    runs.end(run, "stop")
    record_code(run, run.read_spec(), 1)
    before = run.read_spec(), sorted(path.name for path in run.code_dir.iterdir())
    with pytest.raises(ProblemError, match="its supervisor could not be started"):
        resume(run, code_of_now=True, environment={"PYTHONHOME": "/nonexistent"})
    assert (run.read_spec(), sorted(path.name for path in run.code_dir.iterdir())) == before
    told = resume(run, code_of_now=True)
    assert "The code is frozen" in (told or "")
    assert frozen_folder(run, 2).is_dir()
    runs.end(run, "kill")


def test_a_restart_without_its_code_is_refused(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LTUI_RESTART_DELAY_S", "0.3")
    spec = runs.spec(*runs.fake_command("--save-every", "10")).with_changes(freeze=True, restarts=1)
    run = launch(spec, runs.home)
    live = runs.until(run, lambda s: s.checkpoints and len(s.ranks) == 2)
    (script,) = frozen_folder(run, 1).glob("**/fake_engine.py")
    script.unlink()
    os.kill(required(live.ranks[1].pid), signal.SIGKILL)
    ended = runs.until(run, lambda s: s.state is RunState.FAILED)
    runs.until_alone(run)
    refused = "its frozen code is incomplete: "
    assert f"that failed: {run.id}: {refused}" in required(ended.detail)
    assert [
        e
        for e in stored_events(run, "note")
        if f"The restart failed: {run.id}: {refused}" in e.text
    ]


@pytest.mark.parametrize("command", ["python train.py", "sh waits.sh"])
@pytest.mark.parametrize("name", [".", "pkg/late.py", "train.py"])
def test_a_file_of_the_copy_that_is_missing_in_the_middle_of_a_run(
    command: str, name: str, runs: Runs, project: Path
) -> None:
    """The run fails: the code of now would be another one. Its own script is read by then."""
    waits = "touch started; until [ -e gate ]; do sleep 0.05; done\n"
    write(project, "waits.sh", text=f"{waits}exec python {project}/train.py\n")
    run = ask_for(runs, *command.split())
    start_first_attempt(run)
    wait_for(lambda: (project / "started").exists(), seconds=60)
    gone = frozen_folder(run, 1) / name
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    (project / "gate").touch()
    ended, text = runs.ended(run), run.engine_log_path(1).read_text()
    if (command, name) == ("python train.py", "train.py"):
        assert "says then" in text
    else:
        assert ended.state is RunState.FAILED
        assert "the frozen code lacks " in text
        assert "says" not in text


def test_what_show_says(
    runs: Runs,
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("LTUI_HOME", str(runs.home))
    run = ask_for(runs, "python", "train.py")
    (project / "gate").touch()
    start_first_attempt(run)
    printed(runs, run)
    assert main(["show", run.id]) == EXIT_DONE
    assert "  code equals that of attempt 1\n" in capsys.readouterr().out
    write(project, "pkg/late.py", text="WORD = '\x1b[31mred'\n")
    (project / "waits.py").unlink()
    assert main(["show", run.id]) == EXIT_DONE
    assert "code differs from attempt 1: 2 files\n    pkg/late.py" in capsys.readouterr().out
    assert main(["show", run.id, "--code-diff"]) == EXIT_DONE
    diff = capsys.readouterr().out
    assert "-WORD = 'then'\n+WORD = '" in diff
    assert "\x1b" not in diff
    assert "--- attempt 1: waits.py\n" in diff
    write(runs.home, "outside.py", text="private")
    (project / "waits.py").symlink_to(runs.home / "outside.py")
    assert main(["show", run.id, "--code-diff"]) == EXIT_DONE
    diff = capsys.readouterr().out
    assert "+(a link that leads out of the folder)" in diff
    assert "private" not in diff
    plain = runs.start(sys.executable, "-c", "")
    runs.ended(plain)
    assert main(["show", plain.id, "--code-diff"]) == EXIT_BAD_INPUT
    assert "it has no frozen code" in capsys.readouterr().err
    assert main(["resume", plain.id, "--code", "then"]) == EXIT_BAD_INPUT
    assert "the code of this run is not frozen" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "place"),
    [
        ("python t.py -c", 1),
        ("python -u -Wignore -X utf8 t.py", 5),
        ("python -uW ignore t.py", 3),
        ("python -m t.py", None),
        ("python -uc pass t.py", None),
        ("python - t.py", None),
        ("python --help-all t.py", None),
        ("python", None),
    ],
)
def test_the_script_of_a_command_line_of_python(words: str, place: int | None) -> None:
    assert script_place(words.split()) == place
