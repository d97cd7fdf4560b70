"""``ltui data build``, ``info`` and ``verify``: work with ``.beton`` files, which FFCV reads.

``ltui bench data``: measure the loader of a preset and torch's DataLoader on the same data.
"""

from __future__ import annotations

import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

from ltui.app.command_output import EXIT_BAD_INPUT, EXIT_DONE, print_envelope
from ltui.app.launch.run_in_interpreter import run_program
from ltui.app.launch.training_interpreter import (
    choose_python,
    missing_packages,
    pip_names,
    probe_interpreter,
)
from ltui.app.presentation.run_report import columns
from ltui.training.data.ffcv.beton_file import BetonError, BetonFile, summary
from ltui.training.json_codec import to_json
from ltui.training.problem import ProblemError
from ltui.training.store.run_directory import ltui_home
from ltui.widgets.formats import count, duration, percent, size
from ltui.widgets.sanitise import clean_line

_BETON_PROGRAM = "ltui.training.data.ffcv.beton_script"
_BENCHMARK_PROGRAM = "ltui.training.data.loader_benchmark"
_SHOWN = 20
"""Maximum number of damaged samples that are printed."""
_MIB = 1 << 20
_VARIANT = {"loader": str, "workers": int | None, "settings": dict[str, Any],
            "samples_per_s": list[float], "first_batch_s": list[float],
            "memory_bytes": int}  # fmt: skip
_BUILT = {"output": str, "samples": int, "bytes": int, "seconds": float, "left_out": list[str],
          "classes": list[str] | None}  # fmt: skip
_FILE = {"file": str, "samples": int, "bytes": int, "page_bytes": int, "pages": int,
         "page_use": float | None, "fields": list[dict[str, Any]]}  # fmt: skip
DATA = {
    "build": _BUILT,
    "verify": {"file": str, "bad": [{"sample": int, "what": str}]},
    "info": _FILE,
    "bench": {"preset": str, "variants": [_VARIANT], "recommended": _VARIANT},
}
OnLine = Callable[[dict[str, Any]], None]


def build(options: Namespace) -> int:
    """Run ``ltui data build SOURCE -o FILE``."""
    output = _output_path(options)
    python = _require_python(options, ["ffcv", "torchvision"])
    request = {
        "do": "build",
        "source": options.source,
        "output": str(output),
        "options": {
            "images": options.images,
            "max_side": options.max_side,
            "quality": options.quality,
            "page_bytes": options.page_size * _MIB,
            "workers": options.workers or len(os.sched_getaffinity(0)),
            "skip_bad": options.skip_bad,
        },
    }
    with _progress_bar("building", quiet=options.json) as on_line:
        result = run_program(python, _BETON_PROGRAM, request, on_line)
    if options.json:
        print_envelope(result)
        return EXIT_DONE
    took = duration(result["seconds"])
    print(f"{output}: {count(result['samples'])} samples, {size(result['bytes'])}, in {took}.")
    _print_list("left out (damaged):", result["left_out"])
    return EXIT_DONE


def _output_path(options: Namespace) -> Path:
    output = Path(options.output).expanduser().absolute()
    if output.is_dir() or (output.exists() and not options.force):
        message = "this is a folder." if output.is_dir() else "the file exists already."
        remedy = None if output.is_dir() else "Replace it with --force."
        raise ProblemError.of(where=str(output), what=message, remedy=remedy)
    if not output.parent.is_dir():
        raise ProblemError.of(where=str(output.parent), what="the folder does not exist.")
    if options.page_size & (options.page_size - 1) or not 2 <= options.page_size <= 2048:
        message = "the page size must be 2, 4, 8, ... or 2048 MiB."
        raise ProblemError.of(where=f"--page-size {options.page_size}", what=message)
    return output


def _require_python(options: Namespace, packages: list[str]) -> str:
    """Return the interpreter that trains. Raises ``ProblemError`` if packages are missing."""
    python = choose_python(options.python, os.environ)
    needed = {"torch": "torch", **pip_names(packages)}
    if problems := missing_packages(probe_interpreter(python, list(needed)), needed):
        raise ProblemError(*problems)
    return python


@contextmanager
def _progress_bar(description: str, quiet: bool) -> Iterator[OnLine]:
    """Show a progress bar on standard error if it is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda _: None
        return
    # Local: loaded only if it is visible.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Remaining())
    with Progress(*columns, console=Console(file=sys.__stderr__), transient=True) as bar:
        task = bar.add_task(description, total=None)

        def on_line(line: dict[str, Any]) -> None:
            if "done" in line:
                bar.update(task, completed=line["done"], total=line["of"])

        yield on_line


def verify(options: Namespace) -> int:
    """Run ``ltui data verify FILE``."""
    path = Path(options.file).expanduser().absolute()
    # Report a damaged file before the interpreter is checked.
    _open_file(path)
    python = _require_python(options, ["torchvision"])
    workers = options.workers or len(os.sched_getaffinity(0))
    request = {"do": "verify", "file": str(path), "workers": workers}
    with _progress_bar("decoding", quiet=options.json) as on_line:
        bad = run_program(python, _BETON_PROGRAM, request, on_line)["bad"]
    if options.json:
        print_envelope({"file": str(path), "bad": bad})
    elif not bad:
        print(f"{path}: every sample can be decoded.")
    if bad and not options.json:
        for sample in bad[:_SHOWN]:
            sys.stderr.write(f"{path}: sample {sample['sample']}: {clean_line(sample['what'])}.\n")
        if len(bad) > _SHOWN:
            sys.stderr.write(f"{path}: and {len(bad) - _SHOWN} more (--json lists all).\n")
    return EXIT_BAD_INPUT if bad else EXIT_DONE


def info(options: Namespace) -> int:
    """Run ``ltui data info FILE``."""
    path = Path(options.file).expanduser()
    facts = summary(_open_file(path))
    if options.json:
        print_envelope(facts)
        return EXIT_DONE
    used = percent(facts["page_use"]) if facts["page_use"] is not None else "n/a"
    print(f"{path}")
    print(f"  samples  {count(facts['samples'])}")
    print(f"  size     {size(facts['bytes'])}")
    print(f"  pages    {count(facts['pages'])} of {size(facts['page_bytes'])}, {used} used")
    for field in facts["fields"]:
        print(f"  {clean_line(field['name']):<8} {_field_text(field)}")
    return EXIT_DONE


def _field_text(field: Mapping[str, Any]) -> str:
    parts = [field["kind"]]
    if "width" in field:
        for name in ("width", "height"):
            low, middle, high = field[name]
            parts.append(
                f"{name} {low}" if low == high else f"{name} {low} to {high} (median {middle})"
            )
        parts.append(f"{percent(field['jpeg'])} JPEG")
    if "shape" in field:
        parts.append(f"{field['dtype']} {' x '.join(str(n) for n in field['shape'])}")
    if field.get("low") is not None:
        parts.append(f"{field['low']:g} to {field['high']:g}")
    if field.get("different") is not None:
        parts.append(f"{count(field['different'])} distinct values")
    return ", ".join(parts)


def _open_file(path: Path) -> BetonFile:
    try:
        return BetonFile(path)
    except BetonError as error:
        where, _, message = str(error).partition(": ")
        raise ProblemError.of(where=where, what=message) from error


def _print_list(title: str, lines: list[str]) -> None:
    if lines:
        print(title)
        for line in lines[:_SHOWN]:
            print(f"  {clean_line(line)}")
        if len(lines) > _SHOWN:
            print(f"  and {len(lines) - _SHOWN} more")


_AS_GOOD = 0.95
"""A setting with fewer workers is recommended if it reaches this fraction of the best rate."""
_BAR = 40
"""Columns of the longest bar."""


def bench(options: Namespace) -> int:
    """Run ``ltui bench data PRESET``."""
    # Imported here: the commands for .beton files need no preset, and it takes 0.1 s.
    from ltui.app.launch.build_spec import prepare_launch

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
        variants = run_program(request.python, _BENCHMARK_PROGRAM, document, on_line)["variants"]
    finally:
        if on_terminal:
            terminal.write("\r\x1b[K")
    best = recommended(variants)
    # Of a preset with other settings it would say nothing about the preset.
    if not options.overrides:
        # Imported here: the commands for .beton files read no history.
        from ltui.app.live.run_time import record_recommendation

        with suppress(OSError, ProblemError):
            record_recommendation(ltui_home(), request.preset.name, best["workers"])
    if options.json:
        print_envelope({"preset": request.preset.name, "variants": variants, "recommended": best})
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
