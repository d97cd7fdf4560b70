"""What each tool adds to a training step: the training with it takes turns with a bare one."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.bench.peers.environments import PEERS, python_of, version_of

SCRIPT = Path(__file__).with_name("training.py")
BARE = "bare"
LTUI = "ltui"
STEPS = 3000
LABELS = {
    "csv": "Lightning CSVLogger",
    "rich": "Lightning RichProgressBar",
    "tensorboard": "TensorBoard (Lightning's logger)",
    "wandb": "W&B offline (Lightning's logger)",
    "trackio": "trackio",
    "traceml": "TraceML (traceml run)",
    LTUI: "ltui (ltui exec)",
}


@dataclass
class StepCosts:
    """Processor time of a step in microseconds; one value for each run of the tool.

    A run without any instrument takes turns with each run of a tool, ``BLOCK`` steps each;
    ``added`` is the median of the differences between the fastest steps of neighbouring blocks.
    """

    bare_us: list[float] = field(default_factory=list)
    added_us: list[float] = field(default_factory=list)
    added_process_us: list[float] = field(default_factory=list)


def command(tool: str, python: str, folder: Path) -> list[str]:
    """The command line that trains with ``tool``, to which result and steps are added."""
    if tool == LTUI:
        ltui = [sys.executable, "-m", "ltui.app.cli", "exec", "--"]
        return [*ltui, sys.executable, str(SCRIPT), BARE]
    if tool == "traceml":
        program = str(Path(python).with_name("traceml"))
        run = [program, "run", "--logs-dir", str(folder / "traceml"), str(SCRIPT)]
        return [*run, "--args", BARE]
    return [python, str(SCRIPT), tool]


def train_pair(tool: str, python: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train without an instrument and with ``tool``, in turns. Raises ``RuntimeError``."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fifos = folder / "bare.fifo", folder / "tool.fifo"
        for fifo in fifos:
            os.mkfifo(fifo)
        first = os.open(fifos[0], os.O_RDWR)
        os.write(first, b".")
        commands = {
            folder / "bare": ([sys.executable, str(SCRIPT), BARE], fifos),
            folder / "tool": (command(tool, python, folder / "tool"), fifos[::-1]),
        }
        running = []
        try:
            for home, (words, turns) in commands.items():
                home.mkdir()
                running.append(_start(words, home, python, turns))
            for process in reversed(running):
                output, _ = process.communicate(timeout=300)
                # A tool that failed gave no turn; the other training ends all the same.
                os.write(first, b"." * STEPS)
        finally:
            os.close(first)
            for process in running:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        results = [home / "result.json" for home in commands]
        for result, process in zip(results, running, strict=True):
            if not result.exists():
                raise RuntimeError(f"{tool}: exit {process.returncode}: {output[-500:]}")
        bare, watched = (json.loads(result.read_text()) for result in results)
        return bare, watched


def _start(
    words: list[str], home: Path, python: str, turns: tuple[Path, ...]
) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", "")]),
        "HOME": str(home),
        "LTUI_HOME": str(home / "ltui"),
        "TRACKIO_DIR": str(home / "trackio"),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "WANDB_SILENT": "true",
        "GRADIO_ANALYTICS_ENABLED": "False",
        "LTUI_BENCH_TURNS": ":".join(map(str, turns)),
    }
    return subprocess.Popen(
        [*words, str(home / "result.json"), str(STEPS)],
        cwd=home,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def measure(runs: int) -> tuple[dict[str, StepCosts], dict[str, str], dict[str, str]]:
    """Costs and versions of every tool, and the error of each tool that could not run."""
    peers = {peer.name: peer for peer in PEERS if peer.name in LABELS}
    pythons = {LTUI: sys.executable, **{name: python_of(peer) for name, peer in peers.items()}}
    versions = {name: version_of(peer) for name, peer in peers.items()}
    costs = {name: StepCosts() for name in pythons}
    errors: dict[str, str] = {}
    for round_number in range(runs):
        for name, python in pythons.items():
            if name in errors:
                continue
            try:
                bare, watched = train_pair(name, python)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                errors[name] = str(error)
                continue
            cost = costs[name]
            cost.bare_us.append(bare["thread_us"])
            blocks = zip(watched["blocks_us"], bare["blocks_us"], strict=False)
            cost.added_us.append(statistics.median(own - without for own, without in blocks))
            cost.added_process_us.append(watched["process_us"] - bare["process_us"])
            print(
                f"  round {round_number + 1}/{runs}: {name} +{cost.added_us[-1]:.0f} us",
                file=sys.stderr,
            )
    return costs, versions, errors
