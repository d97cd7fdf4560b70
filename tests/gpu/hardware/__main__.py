"""``make gpu``: run every section on this machine's GPUs and write one report.

python -m tests.gpu.hardware                       all sections, in order
python -m tests.gpu.hardware readings faults       these alone; the report keeps the others' results
python -m tests.gpu.hardware --out FOLDER          results, logs and pictures; build/gpu by default
python -m tests.gpu.hardware --minutes 9           begin no section that may not end in time
python -m tests.gpu.hardware --limit 240           give no section more than 240 s
python -m tests.gpu.hardware --write               put the report into docs/benchmarks.md as well,
                                                   and the pictures of presets into docs/screens
python -m tests.gpu.hardware --rehearsal           try the scripts on the CPU, on small work;
                                                   results go into FOLDER/rehearsal

The exit code is 1 if a check is off or a section failed, and 2 if torch sees no GPU
or ltui is not installed.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

from tests.bench.document import write_between
from tests.gpu.hardware.instruments import ask_torch
from tests.gpu.hardware.report import machine, report, summary
from tests.gpu.hardware.section import read_checks, run_section

SECTIONS = {
    "programs": 300,
    "readings": 240,
    "telemetry": 120,
    "throughput": 480,
    "model_flops": 180,
    "loaders": 480,
    "stop_and_resume": 300,
    "faults": 300,
    "preset_runs": 420,
}
"""Modules of this package with ``checks(conditions)``, and the seconds after which each is killed.

Each limit is below ten minutes: some machines with GPUs end a command after that.
"""
ROOT = Path(__file__).resolve().parents[3]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.hardware",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--limit", type=float, default=float("inf"), metavar="SECONDS")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--rehearsal", action="store_true")
    options = parser.parse_args()
    if unknown := [name for name in options.sections if name not in SECTIONS]:
        parser.error(f"no section {unknown[0]!r}; there are: {', '.join(SECTIONS)}")
    if options.write and options.rehearsal:
        parser.error("the results of a rehearsal are not written into the documents")
    if options.rehearsal:
        options.out /= "rehearsal"
    return options


def _sees_gpu() -> bool:
    try:
        return ask_torch("torch.cuda.is_available()") == "True"
    except OSError:
        return False


def _exit_by_sigterm(_number: int, _frame: FrameType | None) -> None:
    """Exit by an exception, so that the processes of the section are killed on the way."""
    sys.exit(128 + signal.SIGTERM)


def main() -> int:
    """Run the sections that were asked for and write the report."""
    signal.signal(signal.SIGTERM, _exit_by_sigterm)
    options = _arguments()
    if find_spec("ltui") is None:
        remedy = f"{sys.executable} -m pip install -e '.[train]'"
        print(f"ltui is not installed in {sys.prefix}: {remedy}", file=sys.stderr)
        return 2
    if not options.rehearsal and not _sees_gpu():
        print("torch sees no CUDA device on this machine; make gpu needs one", file=sys.stderr)
        return 2
    ends = time.monotonic() + 60 * options.minutes
    for name in options.sections or SECTIONS:
        limit_s = min(SECTIONS[name], options.limit)
        if time.monotonic() + limit_s > ends:
            print(f"{name}: not begun, {limit_s:g} s might not be enough", flush=True)
            continue
        checks = run_section(
            f"tests.gpu.hardware.{name}",
            options.out / name,
            rehearsal=options.rehearsal,
            limit_s=limit_s,
        )
        print(f"{name}: {summary({name: checks})}", flush=True)
    found = {name: read_checks(options.out / name) for name in SECTIONS}
    text = report(machine(), found, rehearsal=options.rehearsal)
    (options.out / "report.md").write_text(text, encoding="utf-8")
    print(f"\n{text}\n{summary(found)}")
    if options.write:
        write_between("gpu", text)
        for picture in (options.out / "preset_runs").glob("*.svg"):
            shutil.copy(picture, ROOT / "docs" / "screens")
    return int(any(check.ok is False for checks in found.values() for check in checks))


if __name__ == "__main__":
    sys.exit(main())
