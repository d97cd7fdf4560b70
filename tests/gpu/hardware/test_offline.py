"""``make gpu`` without network: packages of an environment, and wheels for the rest."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests.run_module import ROOT


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
