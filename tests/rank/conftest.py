"""Runs for the tests of the rank side."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ltui.training.lifecycle.rank_package import install_rank_package
from tests.rank.runs import RunFolder
from tests.required import required


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


@pytest.fixture(scope="session")
def side(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH with the code that ranks import and its entry points."""
    return install_rank_package(tmp_path_factory.mktemp("rank-side"))


class Programs:
    """Programs in processes of their own, with the rank package on their path."""

    def __init__(self, side: Path) -> None:
        self.side = str(side)
        self.server = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "scripts" / "fork_server.py")],
            env={**os.environ, "PYTHONPATH": self.side, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def execute(
        self,
        run: RunFolder,
        program: Path | str,
        *arguments: str,
        folders: tuple[Path, ...] = (),
        check: bool = True,
        **variables: str,
    ) -> str:
        """Run a file, or a text, as a process of ``run``. Return what it printed."""
        if isinstance(program, str):
            (run.path / "program.py").write_text(program)
            program = run.path / "program.py"
        output = run.path / "output.txt"
        paths = os.pathsep.join(map(str, (self.side, *folders)))
        request = {
            "words": [str(program), *arguments],
            "folder": str(run.path),
            "environment": {**os.environ, **run.environment(**variables), "PYTHONPATH": paths},
            "output": str(output),
        }
        print(json.dumps(request), file=required(self.server.stdin), flush=True)
        code = required(self.server.stdout).readline().strip()
        assert code == "0" or (code and not check), f"exit code {code}"
        return output.read_text()


@pytest.fixture(scope="session")
def programs(side: Path) -> Iterator[Programs]:
    programs = Programs(side)
    yield programs
    os.killpg(programs.server.pid, signal.SIGKILL)
    programs.server.communicate()


@pytest.fixture
def execute(run: RunFolder, programs: Programs) -> Callable[..., str]:
    """Run a program as a process of ``run``."""
    return functools.partial(programs.execute, run)


@pytest.fixture
def fit(run: RunFolder) -> Iterator[Any]:
    """``fit(model, train, val, **trainer options)`` with the callback, in this process."""
    from tests.rank.models import close_channel, train  # imports torch

    yield functools.partial(train, run)
    close_channel()
