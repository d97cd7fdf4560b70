"""What Lightning alone says of a fault, and when: the same script without ltui, for forty seconds.

``python -m tests.faults --plain`` measures anew and writes ``plain.json``, which the table of
``make zoo`` shows beside ltui's verdicts.
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
from tests.faults.run import START_S, command, zoo_environment
from tests.faults.setting import setting, thaw

CAP_S = 40.0
RECORDED = Path(__file__).with_name("plain.json")
_TELLING = re.compile(
    r"^\s*(\[rank\d+\]:\s*)?([\w.]*(Error|Exception|Exit)\b.*|.*signal: .*|.*exitcode.*|Killed.*)$"
)
_NOISE = re.compile(r"GPU available|TPU available|Tip:|distributed|pytree|Trainer.fit|^-+$")


def recorded() -> dict[str, dict[str, Any]]:
    """By fault: ``ended_s`` (None: it still ran), ``first_s``, ``first``, ``last``."""
    try:
        document: dict[str, dict[str, Any]] = json.loads(RECORDED.read_text())
    except FileNotFoundError:
        return {}
    return document


def in_words(found: dict[str, Any] | None) -> str:
    """One cell of the table."""
    if found is None:
        return "not measured"
    if found["first"] is None and found["ended_s"] is None:
        return f"nothing within {CAP_S:.0f} s"
    said = f"{found['first_s']:.0f} s: {_short(found['first'])}" if found["first"] else "silence"
    if found["ended_s"] is None:
        return f"{said}; hangs on"
    return f"{said}; ends after {found['ended_s']:.0f} s"


def _short(text: str) -> str:
    """Without source paths and addresses, which say nothing of the fault."""
    return re.sub(r"\s*\[(/[^\]]*|[\d.:]+|::\w*|localhost)\](:\d+)?\s*", " ", text)[:80].strip()


def measure(fault: Fault) -> dict[str, Any]:
    """Run it without ltui, at most ``CAP_S`` after the injection."""
    with tempfile.TemporaryDirectory(prefix=f"zoo-plain-{fault.id}-") as name:
        folder = Path(name)
        with setting(fault, folder) as needed:
            environment = {**os.environ, **zoo_environment(fault, folder, needed)}
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
    told = [(t - struck, text) for t, text in lines if t >= struck and _TELLING.match(text)]
    first = told[0] if told else None
    return {
        "ended_s": None if ended_s is None else round(ended_s, 1),
        "first_s": None if first is None else round(first[0], 1),
        "first": None if first is None else first[1].strip(),
        "said": list(dict.fromkeys(text.strip() for _, text in told))[:8],
    }


def _read(process: subprocess.Popen[str], lines: list[tuple[float, str]]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.append((time.monotonic(), line.rstrip("\n")))


def _wait(process: subprocess.Popen[str], folder: Path) -> tuple[float | None, float]:
    """Seconds from the injection to the end, None where it still runs; and the injection."""
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
    """The engine and its ranks, which torchrun puts into sessions of their own: found by their
    environment, again and again, as an agent that lives may start others."""
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
    """Empty of a zombie, and of a process that is gone."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
