"""Nine programs that are limited in one way each, or in none: the right one is named.

What limits a program depends on the machine and on what else it does, so ``make zoo`` runs them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.ltui_command import answer, run_ltui

PROGRAM = Path(__file__).parent / "scripts" / "limited.py"
CASES = {
    "dataset": "data",
    "workers": "data",
    "operators": "host",
    "all_reduce": "communication",
    "slow_rank": "rank",
    "validation": "validation",
    "checkpoints": "checkpoints",
    "healthy": "device",
    "sleeps": "unknown",
}


@pytest.mark.slow
@pytest.mark.skipif("LTUI_LIMITS" not in os.environ, reason="make zoo")
@pytest.mark.parametrize("case", CASES)
def test_what_limits_a_program_is_named(private_home: Path, case: str) -> None:
    engine = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    ended = run_ltui("exec", "--", *engine, str(PROGRAM), case, "25", code=0, timeout=400)
    limit = answer(run_ltui("show", "last", "--json", code=0).stdout)["limit"]
    assert limit["kind"] == CASES[case], limit
    if case == "slow_rank":
        assert limit["rank"] == 1
    assert limit["evidence"][0] in " ".join(ended.stdout.split())
    if case == "sleeps":
        assert "the training thread slept in" in limit["evidence"][0]
    start = "what limits the speed is" if case == "sleeps" else "speed limited by"
    assert start in run_ltui("diagnose", "last", code=0).stdout
    assert private_home.is_dir()
