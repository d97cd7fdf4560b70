"""nvidia-smi, the other instrument: its answers as Python values."""

from __future__ import annotations

import re
import subprocess
from xml.etree import ElementTree

TIMEOUT_S = 60.0


def nvidia_smi(*arguments: str) -> str | None:
    """Return what ``nvidia-smi ARGUMENTS`` prints; None if it fails or does not exist."""
    try:
        return subprocess.run(
            ["nvidia-smi", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def installed_gpus() -> list[tuple[str, str]]:
    """Return the name and the driver of each GPU; none without a driver."""
    answer = nvidia_smi("--query-gpu=name,driver_version", "--format=csv,noheader") or ""
    rows = (line.rpartition(",") for line in answer.splitlines())
    return [(name.strip(), driver.strip()) for name, _, driver in rows]


def described_gpus() -> dict[str, ElementTree.Element]:
    """Return what ``nvidia-smi -q -x`` says about each GPU, by its UUID."""
    answer = nvidia_smi("-q", "-x")
    document = None if answer is None else ElementTree.fromstring(answer)
    gpus = [] if document is None else document.findall("gpu")
    return {gpu.findtext("uuid") or "": gpu for gpu in gpus}


def nvlinks(uuid: str) -> tuple[int, int] | None:
    """Return the NVLinks of a GPU, and how many of them are up; None if it has none."""
    answer = nvidia_smi("nvlink", "--status", f"--id={uuid}") or ""
    links = re.findall(r"^\s*Link \d+: (.*)$", answer, re.MULTILINE)
    return (len(links), sum("inactive" not in state for state in links)) if links else None
