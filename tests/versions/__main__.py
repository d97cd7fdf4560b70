"""``make versions``: the oldest and the newest supported Lightning and torch, each in a venv.

For each pair of versions: the private attributes that ltui uses still exist
(``tests/rank/test_library_internals.py``), and a run of two ranks that is stopped at a step and
resumed ends with the same weights as a run without a stop. The environments are kept in
``build/versions``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "versions"
SCRIPT = Path(__file__).with_name("train.py")
STOP_AT = 100
"""The global step at which the run is stopped: inside the third of its six epochs of 40 steps."""
TEST_TOOLS = ("pytest", "pytest-asyncio", "pytest-timeout", "psutil", "hypothesis")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Versions that are installed together."""

    name: str
    distributions: tuple[str, ...]


PAIRS = (
    Pair(name="oldest", distributions=("lightning==2.5.0", "torch==2.6.0", "torchmetrics==1.4.0")),
    Pair(name="newest", distributions=("lightning", "torch", "torchmetrics")),
)


def python_of(pair: Pair) -> Path:
    """Return the interpreter of the pair's environment; install the environment if necessary."""
    folder = FOLDER / pair.name
    python = folder / "bin" / "python"
    if not (folder / ".installed").exists():
        print(f"installing {', '.join(pair.distributions)}", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        packages = (*pair.distributions, "numpy", "torchdata", *TEST_TOOLS)
        subprocess.run([*install, *packages], check=True)
        (folder / ".installed").touch()
    return python


def versions_in(python: Path) -> str:
    """Return the installed versions of Lightning and torch in one line."""
    program = (
        "from importlib.metadata import version as v; import platform; "
        "print('Python', platform.python_version(), 'Lightning', v('lightning'), "
        "'torch', v('torch'))"
    )
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def has_internals(python: Path) -> bool:
    """Run the test of the libraries' private attributes with ``python``."""
    path = os.pathsep.join([str(ROOT / "build" / "path"), str(ROOT)])
    test = "tests/rank/test_library_internals.py"
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-W", "ignore", test],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
    )
    return done.returncode == 0


def resumes_exactly(python: Path) -> bool:
    """Compare the weights of a stopped and resumed run with those of an uninterrupted run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        env = {**os.environ, "LTUI_HOME": name, "OMP_NUM_THREADS": "1"}
        env["PATH"] = os.pathsep.join([str(python.parent), env.get("PATH", "")])

        def ltui(*words: str) -> str:
            command = [sys.executable, "-m", "ltui.app.cli", *words]
            done = subprocess.run(
                command, cwd=folder, env=env, check=True, timeout=300, stdout=subprocess.PIPE
            )
            return done.stdout.decode()

        agent = [str(python), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        ltui("exec", "--", *agent, str(SCRIPT), str(folder / "uninterrupted"))
        ltui("exec", "--detach", "--", *agent, str(SCRIPT), str(folder / "resumed"))
        ltui("stop", "last", "--at-step", str(STOP_AT))
        deadline = time.monotonic() + 120
        while (state := json.loads(ltui("show", "last", "--json"))["state"]) != "stopped":
            assert time.monotonic() < deadline, f"the run is {state}, not stopped"
            time.sleep(0.5)
        ltui("resume", "last")
        expected = (folder / "uninterrupted").read_text()
        actual = (folder / "resumed").read_text()
        print(f"  uninterrupted {expected}  resumed       {actual}", end="")
        return expected == actual


def main() -> int:
    """Check every pair; return 1 if one of them fails."""
    failed = False
    for pair in PAIRS:
        python = python_of(pair)
        print(f"{pair.name}: {versions_in(python)}", flush=True)
        internals, exact = has_internals(python), resumes_exactly(python)
        print(f"  private attributes {'found' if internals else 'MISSING'}")
        print(f"  resume {'exact' if exact else 'NOT EXACT'}", flush=True)
        failed |= not (internals and exact)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
