"""``make chaos``: LTUI_CHAOS_KILLS kills (100) from LTUI_CHAOS_SEED (drawn, and printed)."""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.chaos.storm import Outcome, Storm, Strike, script


def main() -> int:
    kills = int(os.environ.get("LTUI_CHAOS_KILLS", "100"))
    jobs = int(os.environ.get("LTUI_CHAOS_JOBS", "1"))
    seed = int(os.environ.get("LTUI_CHAOS_SEED") or secrets.randbelow(1 << 32))
    torch_kills = int(os.environ.get("LTUI_CHAOS_TORCH_KILLS", round(kills * 0.15)))
    print(f"{kills} kills, {torch_kills} of them on real two-rank torch runs, {jobs} at a time, "
          f"LTUI_CHAOS_SEED={seed}", flush=True)  # fmt: skip
    began = time.monotonic()
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="ltui-chaos-") as folder:
        home = Path(folder) / "home"
        (home / "runs").mkdir(parents=True)
        os.environ["LTUI_HOME"] = str(home)
        storms = [
            Storm(home, Path(folder), seed + n, say=_say, name=f"life-{chr(97 + n)}")
            for n in range(jobs)
        ]
        stopped = threading.Event()

        def work(storm: Storm, strikes: list[Strike]) -> None:
            try:
                for strike in strikes:
                    if stopped.is_set():
                        return
                    outcomes.append(storm.until_met(strike))
                storm.close()
            except BaseException:
                stopped.set()
                raise

        try:
            with ThreadPoolExecutor(jobs) as pool:
                shares = _shares(script(seed, kills, torch_kills), jobs)
                for done in [pool.submit(work, *pair) for pair in zip(storms, shares, strict=True)]:
                    done.result()
        except BaseException:
            print(f"after {len(outcomes)} kills, LTUI_CHAOS_SEED={seed}", flush=True)
            _keep(Path(folder))
            for storm in storms:
                storm.abandon()
            raise
        left = [p.name for p in (home / "runs").iterdir() if not p.name.startswith(".")]
        assert not left, left
    _summary(outcomes, storms, time.monotonic() - began, seed)
    return 0


def _shares(strikes: list[Strike], jobs: int) -> list[list[Strike]]:
    """Equal parts but that all torch runs, which would be too many at a time, are in the first."""
    fake = [s for s in strikes if not s.torch]
    torch = [s for s in strikes if s.torch]
    weight = 3 * len(torch)
    first = max(0, (len(fake) - weight * (jobs - 1)) // jobs) if jobs > 1 else len(fake)
    rest = fake[first:]
    return [fake[:first] + torch, *(rest[n :: jobs - 1] for n in range(jobs - 1))]


def _say(line: str) -> None:
    print(line, flush=True)


def _keep(folder: Path) -> None:
    """What the failure left, for a look at it."""
    kept = os.environ.get("LTUI_CHAOS_KEEP")
    if kept:
        os.system(f"cp -a {folder} {kept}")


def _summary(outcomes: list[Outcome], storms: list[Storm], seconds: float, seed: int) -> None:
    lives, notes = sum(s.lives for s in storms), sum(s.notes for s in storms)
    counts = Counter("torch" if o.strike.torch else "fake" for o in outcomes)
    print(
        f"\n{len(outcomes)} kills in {seconds:.0f} s, {lives} runs, seed {seed}: "
        "no false state, no orphan, nothing held, every checkpoint whole, no unsaid hole"
    )
    print(f"  on ranks without torch {counts['fake']}, on torch {counts['torch']}; "
          f"history notes shown {notes}")  # fmt: skip
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
