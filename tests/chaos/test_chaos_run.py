"""A short chaos run: ``make chaos`` does the same a hundred times, and also with torch."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest

from tests.chaos.chaos_run import ChaosRun, plan_kills

KILLS = 12 if os.environ.get("LTUI_CHAOS") else 5
"""Each costs some five seconds of processor time: three or four new processes and their imports."""


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_a_few_kills(private_home: Path, tmp_path: Path) -> None:
    seed = int(os.environ.get("LTUI_CHAOS_SEED") or secrets.randbelow(1 << 32))
    print(f"LTUI_CHAOS_SEED={seed}")  # shown where the test fails
    (private_home / "runs").mkdir(parents=True)
    chaos_run = ChaosRun(private_home, tmp_path, seed, steps=300)
    try:
        for plan in plan_kills(seed, KILLS, 0):
            chaos_run.carry_out_with_retries(plan)
        chaos_run.close()
    finally:
        chaos_run.abandon()
