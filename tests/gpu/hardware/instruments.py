"""What torch and nvidia-smi say about the GPUs, without a CUDA context in this process.

A context would take memory of the GPU, so torch is asked in another process.
"""

from __future__ import annotations

import re
import subprocess
import sys
from xml.etree import ElementTree

GIB = 1 << 30
_TORCH_TIMEOUT_S, _SMI_TIMEOUT_S = 120.0, 60.0


def ask_torch(expression: str) -> str:
    """Return the value of an expression with ``torch``, as text without spaces.

    Raises ``OSError`` if torch cannot say; what it printed is in the output of this process.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import torch; print({expression})"],
            stdout=subprocess.PIPE,
            text=True,
            timeout=_TORCH_TIMEOUT_S,
            check=True,
        )
        return done.stdout.split()[-1]
    except subprocess.SubprocessError as error:
        raise OSError(str(error)) from error


def free_device_bytes() -> int:
    """Return the memory that is free on the first GPU. Raises ``OSError`` as ``ask_torch``."""
    return int(ask_torch("torch.cuda.mem_get_info(0)[0]"))


def nvidia_smi(*arguments: str) -> str | None:
    """Return what ``nvidia-smi ARGUMENTS`` prints; None if it fails or does not exist."""
    try:
        return subprocess.run(
            ["nvidia-smi", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SMI_TIMEOUT_S,
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
