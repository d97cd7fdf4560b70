"""Short storms: ``make chaos`` and ``NODES=2 make chaos`` do the same many times."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest

from tests.chaos.chaos_run import ChaosRun, plan_kills
from tests.chaos.node_storm import NodeStorm
from tests.chaos.node_strikes import plan_strikes
from tests.nodes.two_machines import open_machines

KILLS = 12 if os.environ.get("LTUI_CHAOS") else 5
"""Each costs some five seconds of processor time: three or four new processes and their imports."""


@pytest.fixture
def seed() -> int:
    """What all choices depend on. It is shown where the test fails."""
    chosen = int(os.environ.get("LTUI_CHAOS_SEED") or secrets.randbelow(1 << 32))
    print(f"LTUI_CHAOS_SEED={chosen}")
    return chosen


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_a_few_kills(seed: int, private_home: Path, tmp_path: Path) -> None:
    (private_home / "runs").mkdir(parents=True)
    chaos_run = ChaosRun(private_home, tmp_path, seed, steps=300)
    try:
        for plan in plan_kills(seed, KILLS, 0):
            chaos_run.carry_out_with_retries(plan)
        chaos_run.finish_trial()
    finally:
        chaos_run.abandon()


@pytest.mark.timeout(1200)
@pytest.mark.slow
@pytest.mark.nodes
def test_a_few_strikes_on_two_machines(seed: int, tmp_path: Path) -> None:
    with open_machines(tmp_path) as machines:
        storm = NodeStorm(machines)
        for strike in plan_strikes(seed, 3, 1):
            outcome = storm.carry_out(strike)
            assert outcome.fault is None, f"{strike}: {outcome.fault}"
        storm.end_trial()
