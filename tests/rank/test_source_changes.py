"""A warning if workers read sources again that have changed since the rank read them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import multiprocessing, sys, pathlib
from ltui.training.rank.source_changes import watch_sources
import own_module

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    watch_sources(lambda what, remedy: print(what, flush=True))
    for text in ("VALUE = 1", "VALUE = 22", "VALUE = 22"):
        file = pathlib.Path(own_module.__file__)
        if file.read_text() != text:
            file.write_text(text)
        worker = context.Process(target=print, args=("worker",))
        worker.start()
        worker.join()
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_changed_sources_are_reported_once_if_workers_read_them(
    tmp_path: Path, method: str
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "own_module.py").write_text("VALUE = 1")
    done = subprocess.run(
        [sys.executable, "program.py", method],
        cwd=tmp_path,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    lines = done.stdout.split("\n")
    warnings = [line for line in lines if line.startswith("own_module.py changed")]
    assert len(warnings) == (0 if method == "fork" else 1)
    assert lines.count("worker") == 3
    assert all(f"(start method {method})" in line for line in warnings)
