"""A short storm: what ``make chaos`` does a hundred times and with torch too."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest

from tests.chaos.storm import Storm, script

KILLS = 12 if os.environ.get("LTUI_CHAOS") else 5
"""Each costs some five seconds of processor time: three or four new processes and their imports."""


@pytest.mark.timeout(600)
def test_a_few_kills(private_home: Path, tmp_path: Path) -> None:
    seed = int(os.environ.get("LTUI_CHAOS_SEED") or secrets.randbelow(1 << 32))
    print(f"LTUI_CHAOS_SEED={seed}")  # shown where the test fails
    (private_home / "runs").mkdir(parents=True)
    storm = Storm(private_home, tmp_path, seed, steps=300)
    try:
        for strike in script(seed, KILLS, 0):
            storm.until_met(strike)
        storm.close()
    finally:
        storm.abandon()
