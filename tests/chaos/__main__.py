"""``make chaos``: LTUI_CHAOS_KILLS kills (100) from LTUI_CHAOS_SEED (drawn, and printed)."""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.chaos.storm import Outcome, Storm, script


def main() -> int:
    kills = int(os.environ.get("LTUI_CHAOS_KILLS", "100"))
    seed = int(os.environ.get("LTUI_CHAOS_SEED", secrets.randbelow(1 << 32)))
    torch_kills = int(os.environ.get("LTUI_CHAOS_TORCH_KILLS", round(kills * 0.15)))
    print(f"{kills} kills, {torch_kills} of them on real two-rank torch runs, "
          f"LTUI_CHAOS_SEED={seed}", flush=True)  # fmt: skip
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ltui-chaos-") as folder:
        os.environ["LTUI_HOME"] = f"{folder}/home"
        (Path(folder) / "home" / "runs").mkdir(parents=True)
        storm = Storm(Path(folder) / "home", Path(folder), seed, say=_say)
        outcomes: list[Outcome] = []
        try:
            for strike in script(seed, kills, torch_kills):
                outcomes.append(storm.until_met(strike))
            storm.close()
        except BaseException:
            print(f"after {len(outcomes)} kills, LTUI_CHAOS_SEED={seed}", flush=True)
            _keep(Path(folder))
            raise
    _summary(outcomes, storm, time.monotonic() - began, seed)
    return 0


def _say(line: str) -> None:
    print(line, flush=True)


def _keep(folder: Path) -> None:
    """What the failure left, for a look at it."""
    kept = os.environ.get("LTUI_CHAOS_KEEP")
    if kept:
        os.system(f"cp -a {folder} {kept}")


def _summary(outcomes: list[Outcome], storm: Storm, seconds: float, seed: int) -> None:
    print(
        f"\n{len(outcomes)} kills in {seconds:.0f} s, {storm.lives} runs, seed {seed}: "
        "no false state, no orphan, nothing held, every checkpoint whole, no unsaid hole"
    )
    print(f"  on ranks without torch {storm.counts['fake']}, on torch {storm.counts['torch']}; "
          f"history notes shown {storm.notes}")  # fmt: skip
    for title, key in (
        ("victim", lambda o: o.strike.victim),
        ("moment", lambda o: o.strike.moment),
        ("then shown as", lambda o: o.states[-1] if o.states else "no run"),
    ):
        for kind in (False, True):
            counted = Counter(key(o) for o in outcomes if o.strike.torch is kind)
            words = ", ".join(f"{name} {n}" for name, n in counted.most_common())
            print(f"  {title:14} {'torch' if kind else 'fake ':5}  {words or '-'}")


if __name__ == "__main__":
    sys.exit(main())
