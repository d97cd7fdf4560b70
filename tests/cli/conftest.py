"""The command line as a person meets it: its output, its exit codes, and its screens."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from ltui.app import cli
from tests.cli.terminal import Terminal
from tests.ltui_command import LTUI, answer, run_ltui

Ltui = Callable[..., "subprocess.CompletedProcess[str]"]
OpenTerminal = Callable[..., Terminal]
RunsLeft = Callable[[], list[str]]


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
def command(tmp_path: Path) -> Ltui:
    """The same within this process, for commands that start no run: much faster."""

    def call(*words: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        streams = {name: io.TextIOWrapper(io.BytesIO(), "utf-8") for name in ("stdout", "stderr")}
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path)
            for name, value in (env or {}).items():
                patch.setenv(name, value)
            for name, stream in streams.items():
                patch.setattr(sys, name, stream)
            try:
                code = cli.main(words)
            except SystemExit as end:  # of the parser
                code = int(end.code or 0)
        for stream in streams.values():
            stream.seek(0)
        printed = {name: stream.read() for name, stream in streams.items()}
        return subprocess.CompletedProcess(words, code, **printed)

    return call


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[OpenTerminal]:
    """``terminal("run", "quickstart")`` is the command line on a terminal of its own."""
    opened: list[Terminal] = []

    def open_terminal(
        *words: str,
        argv: Sequence[str] = LTUI,
        env: Mapping[str, str] | None = None,
        columns: int = 100,
    ) -> Terminal:
        environment = {**os.environ, **(env or {})}
        opened.append(Terminal([*argv, *words], tmp_path, environment, columns=columns))
        return opened[-1]

    yield open_terminal
    for each in opened:
        each.close()


@pytest.fixture
def ends_its_runs(command: Ltui) -> Iterator[None]:
    """Kills whatever run a test leaves, also a failing one."""
    yield
    for head in answer(command("runs", "--json").stdout):
        command("stop", head["id"], "--kill")


@pytest.fixture
def runs_left(private_home: Path) -> RunsLeft:
    """Names of the run directories in this test's home."""

    def names() -> list[str]:
        folder = private_home / "runs"
        return sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []

    return names
