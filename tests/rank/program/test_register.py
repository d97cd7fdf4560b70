"""``on_checkpoint`` where ltui cannot be used: it says so, and the program goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import multiprocessing

import ltui_rank


def train():
    print("resumed", ltui_rank.on_checkpoint(print, print), flush=True)


if __name__ == "__main__":
    if {child}:
        process = multiprocessing.get_context("spawn").Process(target=train)
        process.start()
        process.join()
    else:
        train()
"""


def run(tmp_path: Path, run_dir: Path, *, child: bool) -> subprocess.CompletedProcess[str]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(child=child), encoding="utf-8")
    environment = {**os.environ, "LTUI_RUN_DIR": str(run_dir), "LTUI_RUN_ID": "a"}
    environment["LTUI_ATTEMPT"] = "1"
    return subprocess.run(
        [sys.executable, str(program)], env=environment, capture_output=True, text=True, check=True
    )


def test_a_started_rank_that_has_no_number_yet_claims_none(tmp_path: Path) -> None:
    done = run(tmp_path, tmp_path / "run", child=True)
    assert done.stdout == "resumed False\n"
    assert "after init_process_group" in done.stderr
    assert not (tmp_path / "run").exists(), "it took a rank that may be another's"


def test_a_process_alone_is_rank_0(tmp_path: Path) -> None:
    done = run(tmp_path, tmp_path / "run", child=False)
    assert (done.stdout, done.stderr) == ("resumed False\n", "")
    assert (tmp_path / "run" / "queue" / "1" / "rank-00000.claim").exists()


def test_a_run_directory_that_cannot_be_written_ends_no_program(tmp_path: Path) -> None:
    file = tmp_path / "run"
    file.write_text("no folder")
    done = run(tmp_path, file, child=False)
    assert done.stdout == "resumed False\n"
    assert "no checkpoints and no telemetry" in done.stderr
