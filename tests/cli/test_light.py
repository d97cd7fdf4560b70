"""The light install: only what pyproject.toml names without extras, and no torch in sight."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.cli.conftest import Ltui, RunsLeft
from tests.ltui_command import answer

ROOT = Path(__file__).resolve().parents[2]
PURELIB = Path(sysconfig.get_paths()["purelib"])


def _dependencies(name: str, found: set[str]) -> set[str]:
    """Add the dependencies of a package without extras, and theirs."""
    for requirement in map(Requirement, metadata.requires(name) or ()):
        is_wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if is_wanted and requirement.name not in found:
            found.add(requirement.name)
            _dependencies(requirement.name, found)
    return found


@pytest.fixture(scope="module")
def light_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter whose environment holds the light install alone."""
    folder = tmp_path_factory.mktemp("light")
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in _dependencies("ltui-train", set()):
        for file in metadata.files(name) or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (site / top).exists():
                (site / top).symlink_to(PURELIB / top)
    (site / "ltui").mkdir()
    for room in ("app", "training", "widgets", "presets"):
        (site / "ltui" / room).symlink_to(ROOT / room)
    for info in PURELIB.glob("ltui_train-*.dist-info"):
        (site / info.name).symlink_to(info)
    return str(folder / "bin" / "python")


@pytest.fixture
def ltui(light_python: str, tmp_path: Path) -> Ltui:
    """The command line, or another program, in the light install."""
    environment = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH")}
    environment["PATH"] = f"{Path(light_python).parent}:/usr/bin:/bin"

    def call(
        *words: str, program: Sequence[str] = ("-m", "ltui.app.cli")
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [light_python, *program, *words],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=100,
        )

    return call


def test_there_is_no_torch_and_the_dashboard_loads(ltui: Ltui) -> None:
    assert "No module named 'torch'" in ltui(program=("-c", "import torch")).stderr
    loaded = ltui(program=("-c", "import ltui.app.open_dashboard"))
    assert loaded.returncode == 0, loaded.stderr


def test_looking_works(ltui: Ltui) -> None:
    for words in (["--version"], ["runs"], ["presets"], ["completion", "bash"]):
        done = ltui(*words)
        assert done.returncode == 0, done.stderr
    assert "quickstart" in [p["name"] for p in answer(ltui("presets", "--json").stdout)]


def test_the_doctor_names_what_is_missing(ltui: Ltui) -> None:
    report = answer(ltui("doctor", "--json").stdout)
    assert report["ok"] is False
    torch = next(f for f in report["findings"] if f["what"] == "torch")
    assert torch["needed"] is True
    assert torch["ok"] is False
    assert torch["remedy"].endswith("-m pip install torch")


def test_a_preset_says_what_it_lacks(ltui: Ltui, runs_left: RunsLeft) -> None:
    done = ltui("run", "quickstart", "--detach")
    assert done.returncode == 2
    assert "torch, lightning" in done.stderr
    assert "are not installed in this interpreter" in done.stderr
    assert "-m pip install torch lightning" in done.stderr
    assert runs_left() == []


def test_a_run_whose_ranks_live_in_another_environment(ltui: Ltui) -> None:
    program = "print('from the other environment')"
    done = ltui("exec", "--", sys.executable, "-c", program)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "from the other" in ltui("logs", "last").stdout
