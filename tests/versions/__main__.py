"""``make versions``: the oldest and the newest supported Lightning and torch, each in a venv.

For each pair of versions: the private attributes that ltui uses still exist and restore what a stop
leaves (``TESTS``), and a run of two ranks that is stopped at a step and resumed ends with the same
weights as a run without a stop, with Lightning and without. The environments are kept in
``build/versions``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import venv
from dataclasses import dataclass
from pathlib import Path

from tests.ltui_command import answer

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "versions"
SCRIPT = Path(__file__).with_name("train.py")
PROGRAM = ROOT / "tests" / "system" / "scripts" / "resumable_program.py"
STOP_AT = 100
"""The global step at which the run is stopped: inside the third of its six epochs of 40 steps."""
PROGRAM_STOP_AT = 60
"""The same for the program without Lightning: inside the third of its five epochs of 24 steps."""
TEST_TOOLS = ("pytest", "pytest-asyncio", "pytest-timeout", "psutil", "hypothesis")
TESTS = ("tests/rank/test_library_internals.py", "tests/rank/test_planned_stop.py")


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
        packages = (*pair.distributions, "numpy", "torchdata", "msgspec", *TEST_TOOLS)
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
    """Run the tests of the libraries' private attributes with ``python``."""
    path = os.pathsep.join([str(ROOT / "build" / "path"), str(ROOT)])
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-W", "ignore", *TESTS],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
    )
    return done.returncode == 0


def resumes_exactly(python: Path, stop_at: int, *script: str) -> bool:
    """Compare a stopped and resumed run with an uninterrupted one, by the text files they write."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        env = {**os.environ, "LTUI_HOME": name, "OMP_NUM_THREADS": "1"}
        env["PATH"] = os.pathsep.join([str(python.parent), env.get("PATH", "")])

        def ltui(where: Path, *words: str) -> str:
            command = [sys.executable, "-m", "ltui.app.cli", *words]
            done = subprocess.run(
                command, cwd=where, env=env, check=True, timeout=300, stdout=subprocess.PIPE
            )
            return done.stdout.decode()

        whole, resumed = folder / "uninterrupted", folder / "resumed"
        whole.mkdir()
        resumed.mkdir()
        agent = [str(python), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        ltui(whole, "exec", "--", *agent, *script)
        ltui(resumed, "exec", "--detach", "--", *agent, *script)
        ltui(resumed, "stop", "last", "--at-step", str(stop_at))
        deadline = time.monotonic() + 120
        while (state := answer(ltui(resumed, "show", "last", "--json"))["state"]) != "stopped":
            assert time.monotonic() < deadline, f"the run is {state}, not stopped"
            time.sleep(0.5)
        ltui(resumed, "resume", "last")
        expected, actual = _written(whole), _written(resumed)
        print(f"  uninterrupted: {_last_lines(expected)}\n  resumed:       {_last_lines(actual)}")
        return bool(expected) and expected == actual


def _written(folder: Path) -> dict[str, str]:
    """Return the contents of the text files that a script wrote, by name."""
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.txt"))}


def _last_lines(files: dict[str, str]) -> str:
    return ", ".join(text.strip().rpartition("\n")[2] for text in files.values())


def main() -> int:
    """Check every pair; return 1 if one of them fails."""
    failed = False
    for pair in PAIRS:
        python = python_of(pair)
        print(f"{pair.name}: {versions_in(python)}", flush=True)
        internals = has_internals(python)
        print(f"  private attributes {'found' if internals else 'MISSING'}", flush=True)
        exact = [
            resumes_exactly(python, STOP_AT, str(SCRIPT), "weights.txt"),
            resumes_exactly(python, PROGRAM_STOP_AT, str(PROGRAM), "epochs", "0.05"),
        ]
        print(f"  resume of Lightning {'exact' if exact[0] else 'NOT EXACT'}", flush=True)
        print(f"  resume of a program {'exact' if exact[1] else 'NOT EXACT'}", flush=True)
        failed |= not (internals and all(exact))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
