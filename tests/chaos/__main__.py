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

from tests.chaos.chaos_run import ChaosRun, KillOutcome, KillPlan, plan_kills


def main() -> int:
    kills = int(os.environ.get("LTUI_CHAOS_KILLS", "100"))
    jobs = int(os.environ.get("LTUI_CHAOS_JOBS", "1"))
    seed = int(os.environ.get("LTUI_CHAOS_SEED") or secrets.randbelow(1 << 32))
    torch_kills = int(os.environ.get("LTUI_CHAOS_TORCH_KILLS", round(kills * 0.15)))
    print(f"{kills} kills, {torch_kills} of them on real two-rank torch runs, {jobs} at a time, "
          f"LTUI_CHAOS_SEED={seed}", flush=True)  # fmt: skip
    began = time.monotonic()
    outcomes: list[KillOutcome] = []
    with tempfile.TemporaryDirectory(prefix="ltui-chaos-") as folder:
        home = Path(folder) / "home"
        (home / "runs").mkdir(parents=True)
        os.environ["LTUI_HOME"] = str(home)
        chaos_runs = [
            ChaosRun(home, Path(folder), seed + n, say=_say, name=f"life-{chr(97 + n)}")
            for n in range(jobs)
        ]
        stopped = threading.Event()

        def work(chaos_run: ChaosRun, kill_plans: list[KillPlan]) -> None:
            try:
                for plan in kill_plans:
                    if stopped.is_set():
                        return
                    outcomes.append(chaos_run.carry_out_with_retries(plan))
                chaos_run.close()
            except BaseException:
                stopped.set()
                raise

        try:
            with ThreadPoolExecutor(jobs) as pool:
                shares = _shares(plan_kills(seed, kills, torch_kills), jobs)
                for done in [
                    pool.submit(work, *pair) for pair in zip(chaos_runs, shares, strict=True)
                ]:
                    done.result()
        except BaseException:
            print(f"after {len(outcomes)} kills, LTUI_CHAOS_SEED={seed}", flush=True)
            _keep(Path(folder))
            for chaos_run in chaos_runs:
                chaos_run.abandon()
            raise
        left = [p.name for p in (home / "runs").iterdir() if not p.name.startswith(".")]
        assert not left, left
    _summary(outcomes, chaos_runs, time.monotonic() - began, seed)
    return 0


def _shares(kill_plans: list[KillPlan], jobs: int) -> list[list[KillPlan]]:
    """Equal parts but that all torch runs, which would be too many at a time, are in the first."""
    fake = [s for s in kill_plans if not s.torch]
    torch = [s for s in kill_plans if s.torch]
    weight = 3 * len(torch)
    first = max(0, (len(fake) - weight * (jobs - 1)) // jobs) if jobs > 1 else len(fake)
    rest = fake[first:]
    return [fake[:first] + torch, *(rest[n :: jobs - 1] for n in range(jobs - 1))]


def _say(line: str) -> None:
    print(line, flush=True)


def _keep(folder: Path) -> None:
    """Keep the files of the failed run for inspection."""
    destination = os.environ.get("LTUI_CHAOS_KEEP")
    if destination:
        os.system(f"cp -a {folder} {destination}")


def _summary(
    outcomes: list[KillOutcome], chaos_runs: list[ChaosRun], seconds: float, seed: int
) -> None:
    trials, notes = sum(s.trials for s in chaos_runs), sum(s.notes for s in chaos_runs)
    counts = Counter("torch" if o.plan.torch else "fake" for o in outcomes)
    print(
        f"\n{len(outcomes)} kills in {seconds:.0f} s, {trials} runs, seed {seed}: "
        "no false state, no orphan, nothing held, every checkpoint whole, no unsaid hole"
    )
    print(f"  on ranks without torch {counts['fake']}, on torch {counts['torch']}; "
          f"history notes shown {notes}")  # fmt: skip
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
