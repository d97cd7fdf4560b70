"""A run that was stopped and resumed is the run that was never stopped: order of samples, losses
and weights, bit for bit.

A few cases by default; ``LTUI_EXACTNESS=all`` tries every loader, with and without workers, on one
rank and two, stopped at every place, and prints the table.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.rank.runs import ROOT

PROGRAM = Path(__file__).parent / "scripts" / "exactness.py"
ALL = os.environ.get("LTUI_EXACTNESS") == "all"
# torchdata's StatefulDataLoader is not tried at an epoch's end: its sampler then skips the next.
EXACT = ["plain", "persistent", "generator", "weighted", "two", "own"]
if find_spec("ffcv") is not None:
    EXACT.append("ffcv")
FEW = {
    1: [
        *("plain:0:mid-epoch", "plain:0:epoch end", "plain:0:all epochs", "plain:2:first epoch"),
        *("generator:0:validation within", "own:2:counted steps", "two:0:mid-epoch"),
    ],
    2: ["plain:0:validation", "plain:2:counted steps", "own:0:accumulation"],
}
NOT_EXACT = {
    "moody:0:mid-epoch": "a sampler draws another order than before",
    "stream:0:mid-epoch": "the DataLoader of Stream has no position",
}
IN_WORKERS = "what the dataset draws at random within its workers"


def tried(folder: Path, ranks: int, cases: list[str], limit_s: int) -> list[dict[str, Any]]:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    process = subprocess.Popen(
        [sys.executable, *(launch if ranks > 1 else []), str(PROGRAM), str(folder), *cases],
        cwd=ROOT,
        env={
            **{k: v for k, v in os.environ.items() if not k.startswith("LTUI_")},
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, output[-4000:]
    table: list[dict[str, Any]] = json.loads((folder / "table.json").read_text())
    return table


def name_of(row: dict[str, Any]) -> str:
    return f"{row['loader']}:{row['workers']}:{row['stop']}"


def workers_draw_anew(row: dict[str, Any]) -> bool:
    """Whether batches of torch's own DataLoader were dropped that its workers had worked on."""
    return row["workers"] > 0 and row["loader"] not in ("own", "ffcv", "stateful")


@pytest.mark.timeout(900 if ALL else 120)
@pytest.mark.parametrize("ranks", [1, 2])
def test_as_never_stopped(tmp_path: Path, ranks: int) -> None:
    cases = [f"{loader}:*" for loader in EXACT] + ["stateful:*:mid*"] if ALL else FEW[ranks]
    others = list(NOT_EXACT) if ranks == 1 else []
    table = tried(tmp_path, ranks, cases + others, 890 if ALL else 110)
    for row in table:
        print(f"{row['ranks']} {name_of(row):34} {row['differs'] or 'exact'}")
    for row in [row for row in table if name_of(row) in others]:
        # What can't be exact is said.
        table.remove(row)
        assert "order" in row["differs"]
        (note,) = row["notes"]
        assert NOT_EXACT[name_of(row)] in note
        others.remove(name_of(row))
    assert others == []
    if ALL:
        assert {row["loader"] for row in table} == {*EXACT, "stateful"}
    else:
        assert {name_of(row) for row in table} == set(cases)
    assert [row for row in table if row["differs"]] == []
    for row in table:
        assert all(IN_WORKERS in note and workers_draw_anew(row) for note in row["notes"]), row
