"""Real processes for the queue's tests: run to their end, or killed by SIGKILL at a chosen line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PRELUDE = """
import os, signal, sys
from pathlib import Path

def die_at(file):
    "SIGKILL this process at the n-th line that it runs in a file of the queue."
    left = int(sys.argv[2])
    def trace(frame, event, argument):
        nonlocal left
        if not frame.f_code.co_filename.endswith("queue/" + file):
            return None
        if event == "line":
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace
    sys.settrace(trace)
"""


def start_child(program: str, *arguments: object) -> subprocess.Popen[str]:
    """``program`` in a fresh interpreter; the caller ends it."""
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)], stdout=subprocess.PIPE, text=True
    )


def run_child(program: str, *arguments: object) -> str:
    """``program`` to its end; its output."""
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    ).stdout


def killed_at_every_line(tmp_path: Path, imports: str, program: str) -> Iterator[Path]:
    """Run ``program`` again and again, killed one line later each time, until it lives to its end.

    It finds the path to write to in ``sys.argv[1]`` and calls ``die_at``; each path is handed out.
    """
    for line in range(500):
        path = tmp_path / f"killed-{line}"
        child = subprocess.run(
            [sys.executable, "-c", PRELUDE + imports + program, str(path), str(line)],
            timeout=60,
            check=False,
        )
        yield path
        if child.returncode == 0:
            assert line > 5, "nothing was killed"
            return
        assert child.returncode == -9
    raise AssertionError("the program never came to its end")
