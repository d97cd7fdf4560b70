"""``python -m tests.faults``: run the fault catalogue and print its table, as ``make zoo`` does.

python -m tests.faults                     every fault and the healthy runs
python -m tests.faults sigstop nan         these faults alone
python -m tests.faults --repeat 3          each three times
python -m tests.faults --without-ptrace    with neither ptrace nor py-spy
python -m tests.faults --plain             what Lightning alone says, into plain.json

The table of ``docs/stalls.md`` and the figures are printed last and written to
``build/zoo/table.md``. The exit code is 1 if a fault was missed or reported late, or if a healthy
run got a verdict.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from ltui.training.json_codec import to_json
from tests.faults import plain
from tests.faults.catalogue import BY_ID, FAULTS
from tests.faults.fault import Fault
from tests.faults.quiet import QUIET, watch_healthy_run
from tests.faults.setting import why_unavailable
from tests.faults.table import Row, fault_table, line, misses, quiet_line, summary
from tests.faults.verdicts import Outcome, run_fault

_KEEP = Path("build/zoo")
_WRITTEN = ("right", "culprit_s", "cause_s", "held", "wrong", "error", "skipped")
"""What is written of each outcome."""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("ids", nargs="*", help="faults or quiet runs; all by default")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--without-ptrace", action="store_true")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--no-quiet", action="store_true", help="faults alone")
    parser.add_argument("--quiet", action="store_true", help="the quiet zoo alone")
    parser.add_argument("--keep", action="store_true", help="keep the runs below build/zoo")
    return parser.parse_args()


def _run(fault: Fault, arguments: argparse.Namespace) -> Row:
    outcomes: list[Outcome] = []
    why = next((w for need in fault.needs if (w := why_unavailable(need)) is not None), None)
    if why is not None:
        return Row(fault, [Outcome(fault, skipped=why)])
    for _ in range(arguments.repeat):
        keep = _KEEP / fault.id if arguments.keep else None
        outcomes.append(run_fault(fault, deprived=arguments.without_ptrace, keep=keep))
    return Row(fault, outcomes)


def _write_down(rows: list[Row], name: str) -> None:
    _KEEP.mkdir(parents=True, exist_ok=True)
    document = [
        {
            "fault": row.fault.id,
            **{name: getattr(o, name) for name in _WRITTEN},
            "verdicts": to_json(o.last),
        }
        for row in rows
        for o in row.outcomes
    ]
    (_KEEP / name).write_text(json.dumps(document, indent=1))


def _measure_plain(faults: list[Fault]) -> int:
    results = plain.recorded()
    available = [f for f in faults if f.via != "preset" and not any(map(why_unavailable, f.needs))]
    with ThreadPoolExecutor(max_workers=3) as pool:  # they mostly wait
        running = {pool.submit(plain.measure, fault): fault for fault in available}
        for done in as_completed(running):
            fault = running[done]
            if (error := done.exception()) is not None:
                print(f"{fault.id}: {error}", flush=True)
                continue
            results[fault.id] = done.result()
            print(f"{fault.id:16} {plain.result_text(results[fault.id])}", flush=True)
            plain.RECORDED.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    return 0


def main() -> int:
    arguments = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended
    unknown = [i for i in arguments.ids if i not in BY_ID and i not in {q.id for q in QUIET}]
    if unknown:
        print(f"there is no {', '.join(unknown)}; known: {', '.join(BY_ID)}", file=sys.stderr)
        return 2
    chosen = set(arguments.ids)
    faults = [f for f in FAULTS if not chosen or f.id in chosen]
    if arguments.plain:
        return _measure_plain(faults)
    begun = time.monotonic()
    rows: list[Row] = []
    for fault in [] if arguments.quiet else faults:
        rows.append(_run(fault, arguments))
        print(line(rows[-1]), flush=True)
    _write_down(rows, "without-ptrace.json" if arguments.without_ptrace else "faults.json")
    results = []
    for quiet in () if arguments.no_quiet else QUIET:
        if not chosen or quiet.id in chosen:
            results.append(watch_healthy_run(quiet))
            print(quiet_line(results[-1]), flush=True)
    text = f"{summary(rows, results)}\n{(time.monotonic() - begun) / 60:.0f} minutes\n"
    if rows:
        text = f"{fault_table(rows, plain.recorded())}\n\n{text}"
    (_KEEP / "table.md").write_text(text)
    print(f"\n{text}", end="")
    return 1 if misses(rows) or any(s.verdicts or s.error for s in results) else 0


if __name__ == "__main__":
    sys.exit(main())
