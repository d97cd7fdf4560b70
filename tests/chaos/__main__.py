"""``make chaos``: LTUI_CHAOS_KILLS kills (100) from LTUI_CHAOS_SEED (drawn, and printed).

LTUI_CHAOS_TORCH_KILLS of them (15 of 100) are in real two-rank torch runs. LTUI_CHAOS_KEEP names a
folder for the files of a storm that fails.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.chaos.chaos_run import ChaosRun, KillOutcome, plan_kills


def main() -> int:
    kills = int(os.environ.get("LTUI_CHAOS_KILLS", "100"))
    seed = int(os.environ.get("LTUI_CHAOS_SEED") or secrets.randbelow(1 << 32))
    torch_kills = int(os.environ.get("LTUI_CHAOS_TORCH_KILLS", round(kills * 0.15)))
    print(f"{kills} kills, {torch_kills} of them on real two-rank torch runs, "
          f"LTUI_CHAOS_SEED={seed}", flush=True)  # fmt: skip
    began = time.monotonic()
    outcomes: list[KillOutcome] = []
    with tempfile.TemporaryDirectory(prefix="ltui-chaos-") as folder:
        home = Path(folder) / "home"
        (home / "runs").mkdir(parents=True)
        os.environ["LTUI_HOME"] = str(home)
        chaos_run = ChaosRun(home, Path(folder), seed)
        try:
            for plan in plan_kills(seed, kills, torch_kills):
                outcomes.append(chaos_run.carry_out_with_retries(plan))
            chaos_run.finish_trial()
        except BaseException:
            print(f"after {len(outcomes)} kills, LTUI_CHAOS_SEED={seed}", flush=True)
            if destination := os.environ.get("LTUI_CHAOS_KEEP"):
                subprocess.run(["cp", "-a", folder, destination], check=False)
            chaos_run.abandon()
            raise
        left = [p.name for p in (home / "runs").iterdir() if not p.name.startswith(".")]
        assert not left, left
    _summary(outcomes, chaos_run, time.monotonic() - began, seed)
    return 0


def _summary(outcomes: list[KillOutcome], chaos_run: ChaosRun, seconds: float, seed: int) -> None:
    counts = Counter("torch" if o.plan.torch else "fake" for o in outcomes)
    print(
        f"\n{len(outcomes)} kills in {seconds:.0f} s, {chaos_run.trials} runs, seed {seed}: "
        "no false state, no orphan, nothing held, every checkpoint whole, no unsaid hole"
    )
    print(f"  on ranks without torch {counts['fake']}, on torch {counts['torch']}; "
          f"history notes shown {chaos_run.notes}")  # fmt: skip
    for title, key in (
        ("victim", lambda o: o.plan.victim),
        ("moment", lambda o: o.plan.phase),
        ("then shown as", lambda o: o.states[-1] if o.states else "no run"),
    ):
        for kind in (False, True):
            counted = Counter(key(o) for o in outcomes if o.plan.torch is kind)
            words = ", ".join(f"{name} {n}" for name, n in counted.most_common())
            print(f"  {title:14} {'torch' if kind else 'fake ':5}  {words or '-'}")


if __name__ == "__main__":
    sys.exit(main())
