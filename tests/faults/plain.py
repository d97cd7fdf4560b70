"""Measure what Lightning alone reports of a fault: the same script without ltui, for 40 seconds.

``python -m tests.faults --plain`` measures again and writes ``plain.json``. The table
of ``make zoo`` compares it with ltui's verdicts.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from tests.faults.fault import Fault
from tests.faults.run import START_S, command, fault_environment
from tests.faults.setting import prepared_machine, thaw

CAP_S = 40.0
RECORDED = Path(__file__).with_name("plain.json")
_ERROR_LINE = re.compile(
    r"^\s*(\[rank\d+\]:\s*)?([\w.]*(Error|Exception|Exit)\b.*|.*signal: .*|.*exitcode.*|Killed.*)$"
)


def recorded() -> dict[str, dict[str, Any]]:
    """Return fault -> ``ended_s`` (None if it still ran), ``first_s``, ``first``, ``last``."""
    try:
        document: dict[str, dict[str, Any]] = json.loads(RECORDED.read_text())
    except FileNotFoundError:
        return {}
    return document


def result_text(result: dict[str, Any] | None) -> str:
    """Return the text of one cell of the table."""
    if result is None:
        return "not measured"
    if result["first"] is None and result["ended_s"] is None:
        return f"nothing within {CAP_S:.0f} s"
    text = f"{result['first_s']:.0f} s: {_short(result['first'])}" if result["first"] else "silence"
    if result["ended_s"] is None:
        return f"{text}; hangs on"
    return f"{text}; ends after {result['ended_s']:.0f} s"


def _short(text: str) -> str:
    """Remove source paths and addresses, which do not describe the fault."""
    return re.sub(r"\s*\[(/[^\]]*|[\d.:]+|::\w*|localhost)\](:\d+)?\s*", " ", text)[:80].strip()


def measure(fault: Fault) -> dict[str, Any]:
    """Run a fault without ltui, at most ``CAP_S`` after the injection."""
    with tempfile.TemporaryDirectory(prefix=f"zoo-plain-{fault.id}-") as name:
        folder = Path(name)
        with prepared_machine(fault, folder) as needed:
            environment = {**os.environ, **fault_environment(fault, folder, needed)}
            for key in [k for k in environment if k.startswith("LTUI_")]:
                del environment[key]
            process = subprocess.Popen(
                command(fault), cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                start_new_session=True,
            )  # fmt: skip
            lines: list[tuple[float, str]] = []
            reader = threading.Thread(target=_read, args=(process, lines))
            reader.start()
            try:
                ended_s, struck = _wait(process, folder)
            finally:
                for point in folder.glob("disk"):
                    thaw(point)
                _kill_all(process, folder)
                reader.join(20)
    errors = [(t - struck, text) for t, text in lines if t >= struck and _ERROR_LINE.match(text)]
    first = errors[0] if errors else None
    return {
        "ended_s": None if ended_s is None else round(ended_s, 1),
        "first_s": None if first is None else round(first[0], 1),
        "first": None if first is None else first[1].strip(),
        "said": list(dict.fromkeys(text.strip() for _, text in errors))[:8],
    }


def _read(process: subprocess.Popen[str], lines: list[tuple[float, str]]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.append((time.monotonic(), line.rstrip("\n")))


def _wait(process: subprocess.Popen[str], folder: Path) -> tuple[float | None, float]:
    """Return the seconds from injection to end (None if it still runs), and the injection."""
    deadline = time.monotonic() + START_S
    while not (folder / "injected").exists() or not (folder / "injected").read_text():
        if process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError("the fault never struck")
        time.sleep(0.02)
    struck = float((folder / "injected").read_text())
    while time.monotonic() < struck + CAP_S:
        if process.poll() is not None:
            return time.monotonic() - struck, struck
        time.sleep(0.05)
    return None, struck


def _kill_all(process: subprocess.Popen[str], folder: Path) -> None:
    """Kill the engine and its ranks, which torchrun puts into sessions of their own.

    They are found by their environment, repeatedly, because a living agent may start others.
    """
    needle = f"ZOO_FOLDER={folder}".encode()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        left = [p for p in _pids() if p != os.getpid() and needle in _environment(p)]
        if not left:
            break
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    process.wait(20)


def _pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _environment(pid: int) -> list[bytes]:
    """Return the environment of a process; empty for a zombie and for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
