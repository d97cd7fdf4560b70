"""The light install: only what pyproject.toml names without extras, and no torch in sight."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PURELIB = Path(sysconfig.get_paths()["purelib"])


def _light_distributions() -> set[str]:
    """ltui's dependencies without extras, and theirs, by name."""
    waiting, found = ["ltui-train"], set()
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        for requirement in metadata.requires(name) or ():
            wanted, _, marker = requirement.partition(";")
            # Markers of other Pythons and systems name what is not installed; extras are not asked.
            if "extra" in marker:
                continue
            dependency = re.split(r"[<>=!~\[ (]", wanted.strip(), maxsplit=1)[0]
            try:
                metadata.distribution(dependency)
            except metadata.PackageNotFoundError:
                continue
            waiting.append(dependency)
    return found - {"ltui-train"}


@pytest.fixture(scope="module")
def light_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter whose environment holds the light install alone."""
    folder = tmp_path_factory.mktemp("light")
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in _light_distributions():
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


def run(python: str, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{Path(python).parent}:/usr/bin:/bin"}
    environment.pop("VIRTUAL_ENV", None)
    environment.pop("PYTHONPATH", None)
    return subprocess.run(
        [python, "-m", "ltui.app.cli", *words],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_there_is_no_torch(light_python: str, tmp_path: Path) -> None:
    done = subprocess.run([light_python, "-c", "import torch"], capture_output=True, text=True)
    assert "No module named 'torch'" in done.stderr


def test_looking_works(light_python: str, tmp_path: Path) -> None:
    for words in (["--version"], ["runs"], ["presets"], ["completion", "bash"]):
        done = run(light_python, *words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    names = [
        p["name"] for p in json.loads(run(light_python, "presets", "--json", cwd=tmp_path).stdout)
    ]
    assert "quickstart" in names


def test_the_doctor_names_what_is_missing(light_python: str, tmp_path: Path) -> None:
    report = json.loads(run(light_python, "doctor", "--json", cwd=tmp_path).stdout)
    assert report["ok"] is False
    torch = next(f for f in report["findings"] if f["what"] == "torch")
    assert torch["needed"] is True
    assert torch["ok"] is False
    assert torch["remedy"].endswith("-m pip install torch")


def test_a_preset_says_what_it_lacks(light_python: str, tmp_path: Path) -> None:
    done = run(light_python, "run", "quickstart", "--detach", cwd=tmp_path)
    assert done.returncode == 2
    assert "torch, lightning" in done.stderr
    assert "are not installed in this interpreter" in done.stderr
    assert "-m pip install torch lightning" in done.stderr
    assert run(light_python, "runs", "--json", cwd=tmp_path).stdout.strip() == "[]"


def test_a_run_whose_ranks_live_in_another_environment(light_python: str, tmp_path: Path) -> None:
    words = ["exec", "--", sys.executable, "-c", "print('from the other environment')"]
    done = run(light_python, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = json.loads(run(light_python, "show", "last", "--json", cwd=tmp_path).stdout)
    assert shown["state"] == "finished"
    assert "from the other" in run(light_python, "logs", "last", cwd=tmp_path).stdout


def test_the_dashboard_loads(light_python: str, tmp_path: Path) -> None:
    program = "import sys, ltui.app.open_dashboard; print('torch' in sys.modules)"
    done = subprocess.run([light_python, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr
