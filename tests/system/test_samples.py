"""Samples of the stacks of two real ranks and of their workers, with gloo."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.waiting import wait_for

from .conftest import SCRIPTS, Ltui

PROGRAM = SCRIPTS / "limited.py"


@pytest.mark.slow
def test_a_straggler_whose_workers_are_slow_is_explained(ltui: Ltui) -> None:
    engine = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    ltui("exec", "--detach", "--", *engine, str(PROGRAM), "slow_workers", "900")
    explained = ltui.wait(lambda s: any("its workers" in v["cause"] for v in s["verdicts"]))
    (cause,) = [v["cause"] for v in explained["verdicts"] if v["kind"] == "straggler"]
    spends = r"Each of its workers spends [\d.]+ s of 10 s in limited\.py:\d+ in decode, "
    assert re.search(rf"\. Rank 1 waits .* for its DataLoader workers, .*\. {spends}", cause)

    samples = ltui.json("diagnose", "last")["samples"]
    assert (samples["slow"], samples["normal"], samples["differs"]) == (1, 0, True)
    assert samples["missing"] == []
    assert "in decode" in samples["workers"][0]["where"]

    asked = subprocess.Popen(
        ltui.argv("diagnose", "last", "--sample"), env=ltui.environment, stdout=subprocess.DEVNULL
    )
    wait_for(
        lambda: ltui("profile", "last", "--ranks", "9", check=2).stderr,
        wanted=lambda said: "its ranks are being sampled. Wait 10 s" in said,
    )
    assert asked.wait() == 0
    ltui("stop", "last", "--kill")
    ltui.ended()
    refused = ltui("diagnose", "last", "--sample", check=2)
    assert "it is not running" in refused.stderr
