"""A warning if workers read sources again that have changed since the rank read them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rank.runs import RunFolder

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


TRAINER_AT_IMPORT = """
import multiprocessing, sys, pathlib
import lightning.pytorch

trainer = lightning.pytorch.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)

if __name__ == "__main__":
    (queue,) = pathlib.Path(sys.argv[1]).glob("*.queue")
    before = queue.stat().st_ino
    worker = multiprocessing.get_context("spawn").Process(target=print, args=("worker",))
    worker.start()
    worker.join()
    print("same queue:", queue.stat().st_ino == before)
"""


def test_a_trainer_that_a_worker_makes_when_it_imports_the_script_is_no_rank(
    tmp_path: Path, run: RunFolder, side: Path
) -> None:
    (tmp_path / "program.py").write_text(TRAINER_AT_IMPORT)
    rank = {"RANK": "0", "WORLD_SIZE": "1", "PYTHONPATH": str(side)}
    done = subprocess.run(
        [sys.executable, "program.py", run.queue_dir],
        cwd=tmp_path, env={**os.environ, **run.environment(**rank)},
        capture_output=True, text=True, timeout=200, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines()[-2:] == ["worker", "same queue: True"]


UNGUARDED = """
import multiprocessing, sys
from ltui.training.rank.source_changes import watch_sources

watch_sources(lambda what, remedy: print(what, remedy, flush=True))
worker = multiprocessing.get_context(sys.argv[1]).Process(target=print, args=("worker",))
worker.start()
worker.join()
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("guard", ["", 'if __name__ == "__main__": pass'])
def test_a_script_that_its_workers_run_again_is_named_before_they_do(
    tmp_path: Path, method: str, guard: str
) -> None:
    (tmp_path / "program.py").write_text(UNGUARDED + guard)
    done = subprocess.run(
        [sys.executable, "program.py", method],
        cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    warnings = [line for line in done.stdout.splitlines() if line.startswith("program.py has no")]
    assert len(warnings) == (method != "fork" and not guard)
    assert all(f"(start method {method})" in line for line in warnings)
    assert ("bootstrapping phase" in done.stderr) == (method != "fork")
