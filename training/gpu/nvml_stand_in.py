"""Compiles the stand-in for ``libnvidia-ml.so.1``, for tests and for people without a GPU.

What it shows, and the script's lines, are described at the top of ``standin/nvml_standin.c``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from ltui.training.problem import Problem, ProblemError

SOURCES = Path(__file__).parent / "standin"
LIBRARY = "libnvidia-ml.so.1"
SCRIPT_VARIABLE = "LTUI_NVML_SCRIPT"


def compiler() -> str | None:
    """The C compiler at hand: ``$CC``, ``cc``, ``gcc`` or ``clang``."""
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and (path := shutil.which(name)):
            return path
    return None


def build(folder: Path) -> Path:
    """The library, compiled into ``folder``. Raises ``ProblemError`` without a compiler."""
    program = compiler()
    if program is None:
        raise ProblemError(
            Problem(
                where="simulated GPUs",
                what="there is no C compiler to build the stand-in driver with.",
                remedy="Install gcc or clang, or name one in CC.",
            )
        )
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f".{LIBRARY}.{os.getpid()}"
    sources = [str(SOURCES / name) for name in ("nvml_standin.c", "script.c")]
    options = ["-shared", "-fPIC", "-O1", "-fvisibility=hidden", f"-Wl,-soname,{LIBRARY}"]
    done = subprocess.run(
        [program, *options, "-o", str(made), *sources, "-lm", "-lpthread"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode != 0:
        raise ProblemError(
            Problem(
                where=program, what=f"the stand-in driver does not compile: {done.stderr[-800:]}"
            )
        )
    # By rename, so that a process that has the old one loaded is not torn from under it.
    made.replace(folder / LIBRARY)
    return folder / LIBRARY


def environment(
    folder: Path, script: Path, base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """``base`` (by default this process's) with which a program finds the stand-in."""
    env = dict(os.environ if base is None else base)
    paths = [str(folder), *filter(None, [env.get("LD_LIBRARY_PATH")])]
    return {**env, "LD_LIBRARY_PATH": os.pathsep.join(paths), SCRIPT_VARIABLE: str(script)}


def write_script(path: Path, text: str) -> None:
    """Replaces the script at once, so that no reader sees half of it."""
    made = path.with_name(f".{path.name}.new")
    made.write_text(text, encoding="utf-8")
    made.replace(path)
