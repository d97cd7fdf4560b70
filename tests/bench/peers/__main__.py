"""``make peers``: the comparison with the field's tools; ``--write`` puts it into the document."""

from __future__ import annotations

import os
import platform
import statistics
import sys
from collections.abc import Sequence
from importlib.metadata import version

from tests.bench.document import write_between
from tests.bench.peers import displays, steps

RUNS = 5
CLOSE = 0.3
"""Fraction of a median by which its runs may differ from it for the figure to be certain."""


def spread(values: Sequence[float], digits: int) -> str:
    """Median, and the least and most of the runs; with a question mark if they are far apart."""
    low, middle, high = min(values), statistics.median(values), max(values)
    sign = " ?" if max(high - middle, middle - low) > CLOSE * abs(middle) else ""
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f}){sign}"


def step_table(costs: dict[str, steps.StepCosts], versions: dict[str, str]) -> list[str]:
    """Markdown rows: what a tool adds to a step over the run without one that came before it."""
    ours = statistics.median(costs[steps.LTUI].added_us)
    lines = [
        "| tool | version | added to a step (training thread), us | times ltui "
        "| added by all threads of the rank, us |",
        "|---|---|---|---|---|",
    ]
    for name in sorted(costs, key=lambda n: statistics.median(costs[n].added_us)):
        cost = costs[name]
        ratios = [added / ours for added in cost.added_us]
        lines.append(
            f"| {steps.LABELS[name]} | {versions.get(name, version('ltui-train'))} "
            f"| {spread(cost.added_us, 0)} | {spread(ratios, 1)} "
            f"| {spread(cost.added_process_us, 0)} |"
        )
    return lines


def display_table(costs: dict[str, displays.DisplayCosts]) -> list[str]:
    """Markdown rows of the dashboards."""
    lines = [
        "| program | first screen, s | processor, % of a core | memory, MB |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {label} | {spread(cost.first_screen_s, 2)} | {spread(cost.cpu_percent, 1)} "
        f"| {spread(cost.memory_mb, 0)} |"
        for label, cost in costs.items()
        if cost.first_screen_s
    ]
    return lines


def main(arguments: Sequence[str]) -> int:
    """Measure, print, and write the document if asked to."""
    step_costs, versions, errors = steps.measure(RUNS)
    display_costs, display_errors = displays.measure(RUNS)
    measured = {name: cost for name, cost in step_costs.items() if cost.added_us}
    bare = [value for cost in measured.values() for value in cost.bare_us]
    lines = [
        f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"torch {version('torch')}, Lightning {version('lightning')}; "
        f"median of {RUNS} runs (least to most). A question mark: runs differ from the median by "
        f"more than {CLOSE:.0%}, so that this machine cannot tell the figure more closely.",
        "",
        f"A step without any instrument takes {spread(bare, 0)} us.",
        "",
        *step_table(measured, versions),
        "",
        *display_table(display_costs),
    ]
    problems = {**errors, **display_errors}
    lines += [f"\nNot measured: {name}: {' '.join(why.split())}" for name, why in problems.items()]
    text = "\n".join(lines)
    print(text)
    if "--write" in arguments:
        write_between("peers", text)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
