"""A process under the stand-in driver, steered by its script and asked through a pipe."""

from __future__ import annotations

import base64
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.standin import nvml_stand_in
from tests.waiting import wait_for

PROGRAM = Path(__file__).parent / "asked.py"


class Asked:
    """A Python process that has the stand-in loaded; ``ask`` evaluates an expression there.

    In it are ``RunGpus`` and, if it is ``sampling``, ``sampler``.
    """

    def __init__(self, library: Path, script: Path, *, sampling: bool) -> None:
        self.script = script
        self.errors = script.with_suffix(".stderr")
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(PROGRAM), *(["sampling"] if sampling else [])],
                env=nvml_stand_in.environment(library.parent, script),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def ask(self, expression: str) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(expression.replace("\n", " ") + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the process ended: {self.errors.read_text()}"
        value = pickle.loads(base64.b64decode(line))
        if isinstance(value, Exception):
            raise value
        return value

    def steer(self, text: str) -> None:
        nvml_stand_in.write_script(self.script, text)

    def view_when(self, holds: Callable[[Any], bool], seconds: float = 90.0) -> Any:
        """The first view of the sampler for which it holds."""
        return wait_for(lambda: self.ask("sampler.latest()"), wanted=holds, seconds=seconds)

    def close(self) -> int:
        """Ends the process as a program ends, and gives its exit code."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            return self.process.wait(90)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()


def _processes(library: Path, folder: Path) -> Iterator[Callable[..., Asked]]:
    started: list[Asked] = []

    def start(text: str, *, sampling: bool = False) -> Asked:
        script = folder / f"gpus-{len(started)}.txt"
        script.write_text(text)
        started.append(Asked(library, script, sampling=sampling))
        return started[-1]

    yield start
    for asked in started:
        if asked.process.poll() is None:
            asked.close()


@pytest.fixture
def under(library: Path, tmp_path: Path) -> Iterator[Callable[..., Asked]]:
    """``under(script_text)``: a process with that driver; ``sampling=True``: and a sampler."""
    yield from _processes(library, tmp_path)


@pytest.fixture(scope="module")
def shared_under(
    library: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Asked]]:
    """The same, for processes that all tests of a module share."""
    yield from _processes(library, tmp_path_factory.mktemp("shared"))
