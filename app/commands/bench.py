"""``ltui bench data``: measure the loader of a preset and torch's DataLoader on the same data."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from ltui.app.exit_codes import EXIT_DONE
from ltui.app.launch.build_spec import prepare_launch
from ltui.app.launch.run_in_interpreter import run_program
from ltui.app.presentation.run_report import columns
from ltui.training.json_codec import to_json
from ltui.widgets.formats import count, duration, size

_PROGRAM = "ltui.training.data.loader_benchmark"
_AS_GOOD = 0.95
"""A setting with fewer workers is recommended if it reaches this fraction of the best rate."""
_BAR = 40
"""Columns of the longest bar."""


def data(options: Namespace) -> int:
    """Run ``ltui bench data PRESET``."""
    request = prepare_launch(options.preset, options.overrides, options.python)
    spec = request.spec("bench", "bench", time.time())
    document = {
        "config": to_json(spec.config),
        "python_path": list(spec.python_path),
        "workers": options.workers,
        "seconds": options.seconds,
        "rounds": options.rounds,
    }
    on_terminal = sys.stderr.isatty() and not options.json

    terminal = sys.__stderr__ or sys.stderr

    def on_line(line: dict[str, Any]) -> None:
        if on_terminal and "phase" in line:
            terminal.write(f"\r\x1b[K{line['phase']}")
            terminal.flush()

    try:
        variants = run_program(request.python, _PROGRAM, document, on_line)["variants"]
    finally:
        if on_terminal:
            terminal.write("\r\x1b[K")
    best = recommended(variants)
    if options.json:
        print(
            json.dumps({"preset": request.preset.name, "variants": variants, "recommended": best})
        )
        return EXIT_DONE
    print("\n".join(table(variants)))
    print()
    print("\n".join(bars(variants)))
    print()
    print(advice(best))
    return EXIT_DONE


def rate(variant: Mapping[str, Any]) -> float:
    """Return the median of samples per second over the rounds."""
    return float(median(variant["samples_per_s"]))


def recommended(variants: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the setting with the fewest workers among those that are as good as the best."""
    fastest = max(rate(v) for v in variants)
    fast_enough = [v for v in variants if rate(v) >= _AS_GOOD * fastest]
    return min(fast_enough, key=lambda v: (v["workers"] or 0, -rate(v)))


def variant_name(variant: Mapping[str, Any]) -> str:
    """Return ``ffcv x4``: the loader and its number of workers."""
    workers = variant["workers"]
    return variant["loader"] if workers is None else f"{variant['loader']} x{workers}"


def table(variants: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return lines with the median and the spread of each setting."""
    head = ("loader", "workers", "samples/s", "lowest to highest", "first batch", "added memory")
    rows = [head]
    for variant in variants:
        rates, workers = variant["samples_per_s"], variant["workers"]
        rows.append(
            (
                str(variant["loader"]),
                "n/a" if workers is None else str(workers),
                count(rate(variant)),
                f"{count(min(rates))} to {count(max(rates))}",
                duration(median(variant["first_batch_s"])),
                size(max(0, variant["memory_bytes"])),
            )
        )
    return columns(rows, right=frozenset((1, 2, 3, 4, 5)))


def bars(variants: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return samples per second as bars, which mark the slowest and the fastest round."""
    highest = max(max(v["samples_per_s"]) for v in variants)
    width = max(len(variant_name(v)) for v in variants)
    lines = []
    for variant in variants:
        rates = variant["samples_per_s"]
        low, middle, high = (
            round(_BAR * value / highest) for value in (min(rates), rate(variant), max(rates))
        )
        bar = "█" * middle + "─" * max(0, high - middle)
        if low < middle:
            bar = bar[:low] + "▓" * (middle - low) + bar[middle:]
        lines.append(f"{variant_name(variant):<{width}} {bar:<{_BAR}} {count(rate(variant))}/s")
    return lines


def advice(best: Mapping[str, Any]) -> str:
    """Return a line that explains how to choose the recommended setting."""
    arguments = " ".join(f"--set {key}={value}" for key, value in best["settings"].items())
    chosen = f"Recommended on this machine: {variant_name(best)}"
    return f"{chosen} ({arguments})" if arguments else f"{chosen}."
