"""``NODES=2 make chaos``: the storm on two machines in network namespaces.

LTUI_CHAOS_KILLS kills (50) and LTUI_CHAOS_CUTS link cuts (20) from LTUI_CHAOS_SEED (drawn and
printed). LTUI_CHAOS_ONLY chooses strikes instead: ``stop everything 0, training link 30``.
LTUI_CHAOS_KEEP names a folder for the files of runs in which something did not hold.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.chaos.node_storm import NodesOutcome, NodeStorm
from tests.chaos.node_strikes import parse_strikes, plan_strikes
from tests.nodes.two_machines import missing_rights, open_machines


def main() -> int:
    if (reason := missing_rights()) is not None:
        print(f"skipped: {reason}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended
    kills = int(os.environ.get("LTUI_CHAOS_KILLS", "50"))
    cuts = int(os.environ.get("LTUI_CHAOS_CUTS", "20"))
    seed = int(os.environ.get("LTUI_CHAOS_SEED") or secrets.randbelow(1 << 32))
    only = os.environ.get("LTUI_CHAOS_ONLY")
    keep = os.environ.get("LTUI_CHAOS_KEEP")
    words = only or f"{kills} kills and {cuts} link cuts"
    print(f"{words} on two machines, LTUI_CHAOS_SEED={seed}", flush=True)
    began_s = time.monotonic()
    outcomes: list[NodesOutcome] = []
    with (
        tempfile.TemporaryDirectory(prefix="ltui-nodes-chaos-") as folder,
        open_machines(Path(folder)) as machines,
    ):
        storm = NodeStorm(machines, keep=None if keep is None else Path(keep))
        for strike in parse_strikes(only) if only else plan_strikes(seed, kills, cuts):
            outcomes.append(storm.carry_out(strike))
            print(_line(outcomes[-1]), flush=True)
        storm.end_trial()
    _summary(outcomes, storm.trials, time.monotonic() - began_s, seed)
    return 1 if any(o.fault for o in outcomes) else 0


def _line(outcome: NodesOutcome) -> str:
    strike = outcome.strike
    named = "" if outcome.named_after_s is None else f"named after {outcome.named_after_s:.1f} s; "
    text = (
        f"{strike.number:3} {strike.phase:10} {strike.victim:14} {len(outcome.killed)} "
        f"{' -> '.join(outcome.states):28} {outcome.seconds:5.0f} s  {named}{outcome.detail or ''}"
    )
    return text if outcome.fault is None else f"{text}\n    DOES NOT HOLD: {outcome.fault}"


def _summary(outcomes: list[NodesOutcome], trials: int, seconds: float, seed: int) -> None:
    cuts = sum(o.strike.is_cut for o in outcomes)
    faults = [o for o in outcomes if o.fault]
    print(
        f"\n{len(outcomes) - cuts} kills and {cuts} link cuts in {seconds:.0f} s, {trials} runs, "
        f"seed {seed}: "
        + (f"{len(faults)} DO NOT HOLD" if faults else "no false state, no orphan, no held port, "
           "no lost checkpoint, every step in the history or its loss recorded")
    )  # fmt: skip
    for title, words in (
        ("victim", [o.strike.victim if not o.strike.is_cut else "link" for o in outcomes]),
        ("moment", [o.strike.phase for o in outcomes]),
        ("then shown as", [o.states[-1] if o.states else "no run" for o in outcomes]),
    ):
        counted = ", ".join(f"{word} {n}" for word, n in Counter(words).most_common())
        print(f"  {title:14} {counted}")
    named = [o.named_after_s for o in outcomes if o.named_after_s is not None]
    if named:
        print(f"  cuts named after {min(named):.1f} to {max(named):.1f} s")


if __name__ == "__main__":
    sys.exit(main())
