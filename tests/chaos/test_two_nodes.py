"""A short storm on two machines: ``NODES=2 make chaos`` does the same fifty times."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest

from tests.chaos.node_storm import NodeStorm
from tests.chaos.node_strikes import CUT_PHASES, PHASES, VICTIMS, plan_strikes
from tests.nodes.two_machines import open_machines


def test_strikes_combine_every_victim_with_every_phase() -> None:
    kills = len(VICTIMS) * len(PHASES)
    strikes = plan_strikes(7, kills, len(CUT_PHASES))
    assert strikes == plan_strikes(7, kills, len(CUT_PHASES))
    assert {(s.phase, s.role, s.node) for s in strikes if not s.is_cut} == {
        (phase, *victim)
        for phase in PHASES
        for victim in VICTIMS
        if (phase, victim[0]) != ("training", "command")
    }
    assert {s.phase for s in strikes if s.is_cut} == {*CUT_PHASES}


@pytest.mark.timeout(1200)
@pytest.mark.slow
@pytest.mark.nodes
def test_a_few_strikes(tmp_path: Path) -> None:
    seed = int(os.environ.get("LTUI_CHAOS_SEED") or secrets.randbelow(1 << 32))
    print(f"LTUI_CHAOS_SEED={seed}")  # shown where the test fails
    with open_machines(tmp_path) as machines:
        storm = NodeStorm(machines)
        for strike in plan_strikes(seed, 3, 1):
            outcome = storm.carry_out(strike)
            assert outcome.fault is None, f"{strike}: {outcome.fault}"
        storm.end_trial()
