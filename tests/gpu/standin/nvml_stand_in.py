"""Builds the stand-in for ``libnvidia-ml.so.1``, with which tests simulate NVIDIA GPUs.

``nvml_standin.c`` describes the simulated GPUs and the lines of a script.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

SOURCES = Path(__file__).parent
LIBRARY = "libnvidia-ml.so.1"
SCRIPT_VARIABLE = "LTUI_NVML_SCRIPT"
"""Environment variable with the path of the script."""


def compiler() -> str | None:
    """Return the C compiler: ``$CC``, ``cc``, ``gcc`` or ``clang``; None if there is none."""
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and (path := shutil.which(name)):
            return path
    return None


def build(folder: Path) -> Path:
    """Compile the library into ``folder`` and return its path. Raises ``RuntimeError``."""
    program = compiler()
    if program is None:
        raise RuntimeError("there is no C compiler to build the stand-in driver with")
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{LIBRARY}.{os.getpid()}"
    sources = [str(SOURCES / name) for name in ("nvml_standin.c", "script.c")]
    options = ["-shared", "-fPIC", "-O1", "-fvisibility=hidden", f"-Wl,-soname,{LIBRARY}"]
    done = subprocess.run(
        [program, *options, "-o", str(temporary), *sources, "-lm", "-lpthread"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the stand-in driver does not compile: {done.stderr[-800:]}")
    # Rename it, so that a process that has loaded the previous library is not affected.
    temporary.replace(folder / LIBRARY)
    return folder / LIBRARY


def environment(
    folder: Path, script: Path, base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return ``base``, by default this process's environment, with the variables of the stand-in.

    A program with this environment loads the stand-in instead of the driver.
    """
    env = dict(os.environ if base is None else base)
    paths = [str(folder), *filter(None, [env.get("LD_LIBRARY_PATH")])]
    return {**env, "LD_LIBRARY_PATH": os.pathsep.join(paths), SCRIPT_VARIABLE: str(script)}


def write_script(path: Path, text: str) -> None:
    """Replace the script atomically, so that no reader gets an incomplete one."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
