"""The command line as a person meets it: real processes, their output and exit codes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.ltui_command import run_ltui

Ltui = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def ltui(tmp_path: Path) -> Ltui:
    """``ltui("runs", "--json")`` runs the command line in this test's home and folder."""

    def call(
        *words: str, env: Mapping[str, str] | None = None, timeout: float = 240
    ) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **(env or {})}
        return run_ltui(*words, cwd=tmp_path, environment=environment, timeout=timeout)

    return call


@pytest.fixture
def ends_its_runs(ltui: Ltui) -> Iterator[None]:
    """Kills whatever run a test leaves, also a failing one."""
    yield
    for head in json.loads(ltui("runs", "--json").stdout):
        ltui("stop", head["id"], "--kill")


@pytest.fixture
def runs_left(private_home: Path) -> Callable[[], list[str]]:
    """Names of the run directories in this test's home."""

    def names() -> list[str]:
        folder = private_home / "runs"
        return sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []

    return names
