"""A resumed DDP model has the buckets of the one that was stopped, or its own and says so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rank.runs import ROOT


@pytest.mark.timeout(200)
def test_given_back_before_the_first_step_or_left_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.rank.exactness.bucketed", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads((tmp_path / "buckets.json").read_text())
    assert len(found["layout"]) > 2
    assert found["differs by itself"]  # else the rest shows nothing
    assert found["given"]
    assert found["same"]
    assert found["kept"] == found["kept later"] == found["layout"]
    for name in ("another model", "static graph", "none"):
        refused, untouched, trains = found[name]
        assert (refused, untouched, trains) == (True, True, True), name
