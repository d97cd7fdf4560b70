"""The report of ``make gpu``: machine, versions and every check, as Markdown."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tests.gpu.hardware.check import Check
from tests.gpu.hardware.instruments import nvidia_smi

REHEARSAL = "Rehearsal on the CPU: it shows that the scripts run, and nothing about GPUs."
_MARKS = {True: "ok", False: "OFF", None: ""}


def machine() -> list[str]:
    """Describe the machine: GPUs, driver and the versions of the libraries."""
    import torch  # Takes seconds, and a report of a run without a GPU does not need it.

    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None
    versions = {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "NCCL": nccl,
        "Lightning": _version("lightning"),
        "torchvision": _version("torchvision"),
        "FFCV": _version("ffcv"),
        "ltui": _version("ltui-train"),
    }
    return [
        f"{platform.platform()}, {os.cpu_count()} cores",
        ", ".join(f"{name} {number or 'n/a'}" for name, number in versions.items()),
        *_gpus(),
    ]


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _gpus() -> list[str]:
    """Return a line of nvidia-smi for each GPU: name, driver, memory, power limit."""
    query = "--query-gpu=name,driver_version,memory.total,power.limit"
    answer = nvidia_smi(query, "--format=csv,noheader")
    return ["no NVIDIA driver"] if answer is None else answer.splitlines()


def report(
    about: Sequence[str], sections: Mapping[str, Sequence[Check]], *, rehearsal: bool
) -> str:
    """Return the report. A section without checks has not run."""
    lines = [f"**{REHEARSAL}**", ""] if rehearsal else []
    lines += ["; ".join(about), ""]
    for name, checks in sections.items():
        lines += [f"### {name.replace('_', ' ').capitalize()}", ""]
        if not checks:
            lines += ["Not run.", ""]
            continue
        lines += ["| check | measured | expected | |", "|---|---|---|---|"]
        lines += [
            f"| {_cell(check.what)} | {_cell(_value(check.measured))} "
            f"| {_cell(check.expected)} | {_MARKS[check.ok]} |"
            for check in checks
        ]
        lines.append("")
    return "\n".join(lines)


def summary(sections: Mapping[str, Sequence[Check]]) -> str:
    """Return one line: how many checks were right, wrong and only for information."""
    checks = [check for found in sections.values() for check in found]
    counts = {ok: sum(check.ok is ok for check in checks) for ok in _MARKS}
    missing = [name for name, found in sections.items() if not found]
    text = f"{counts[True]} ok, {counts[False]} off, {counts[None]} for information"
    return f"{text}; not run: {', '.join(missing)}" if missing else text


def _value(value: Any) -> str:
    if value is None:
        return "n/a"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_value, value)) or "none"
    return str(value)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
