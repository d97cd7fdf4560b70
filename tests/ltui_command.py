"""The command ``ltui`` as a process, run to its end."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LTUI = (sys.executable, "-m", "ltui.app.cli")


def run_ltui(
    *words: str,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    code: int | None = None,
    timeout: float = 240,
) -> subprocess.CompletedProcess[str]:
    """Run ``ltui WORDS`` without a terminal. With ``code``: fail unless it ends with that code."""
    done = subprocess.run(
        [*LTUI, *words],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert code in (None, done.returncode), (
        f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    )
    return done


def answer(printed: str) -> Any:
    """Return the data of what a command printed with ``--json``."""
    document = json.loads(printed)
    assert document["ok"], document["error"]
    return document["data"]
