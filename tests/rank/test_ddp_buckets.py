"""A resumed DDP model has the buckets of the stopped run, or its own and reports that."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rank.runs import ROOT


@pytest.mark.timeout(200)
def test_the_bucket_layout_is_restored_or_left_unchanged(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.rank.exactness.bucketed", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert ended.returncode == 0, ended.stderr[-3000:]
    result = json.loads((tmp_path / "buckets.json").read_text())
    assert len(result["layout"]) > 2
    assert result["differs by itself"]  # else the rest shows nothing
    assert result["given"]
    assert result["same"]
    assert result["kept"] == result["kept later"] == result["layout"]
    for name in ("another model", "static graph", "none"):
        refused, untouched, trains = result[name]
        assert (refused, untouched, trains) == (True, True, True), name
