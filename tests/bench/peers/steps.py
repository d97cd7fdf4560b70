"""What each tool adds to a training step, all of them on the same training, taking turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

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

    A run without any instrument precedes each run of a tool; ``added`` is the difference.
    """

    bare_us: list[float] = field(default_factory=list)
    added_us: list[float] = field(default_factory=list)
    added_process_us: list[float] = field(default_factory=list)


def command(tool: str, python: str, result: Path, folder: Path) -> list[str]:
    """The command line that trains once with ``tool``."""
    arguments = [str(result), str(STEPS)]
    if tool == LTUI:
        ltui = [sys.executable, "-m", "ltui.app.cli", "exec", "--"]
        return [*ltui, sys.executable, str(SCRIPT), BARE, *arguments]
    if tool == "traceml":
        program = str(Path(python).with_name("traceml"))
        run = [program, "run", "--logs-dir", str(folder / "traceml"), str(SCRIPT)]
        return [*run, "--args", BARE, *arguments]
    return [python, str(SCRIPT), tool, *arguments]


def train(tool: str, python: str) -> dict[str, float]:
    """One training with ``tool`` in a home of its own. Raises ``RuntimeError`` if it fails."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        result = folder / "result.json"
        environment = {
            **os.environ,
            "PATH": os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", "")]),
            "HOME": name,
            "LTUI_HOME": str(folder / "ltui"),
            "TRACKIO_DIR": str(folder / "trackio"),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "WANDB_SILENT": "true",
            "GRADIO_ANALYTICS_ENABLED": "False",
        }
        done = subprocess.run(
            command(tool, python, result, folder),
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
        if not result.exists():
            raise RuntimeError(f"{tool}: exit {done.returncode}: {done.stderr[-500:]}")
        costs: dict[str, float] = json.loads(result.read_text())
        return costs


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
                bare, watched = train(BARE, sys.executable), train(name, python)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                errors[name] = str(error)
                continue
            cost = costs[name]
            cost.bare_us.append(bare["thread_us"])
            cost.added_us.append(watched["thread_us"] - bare["thread_us"])
            cost.added_process_us.append(watched["process_us"] - bare["process_us"])
            print(
                f"  round {round_number + 1}/{runs}: {name} +{cost.added_us[-1]:.0f} us",
                file=sys.stderr,
            )
    return costs, versions, errors
