"""First screen, processor time and memory of dashboards: ltui, W&B LEET and nvitop.

Runs are live while they are watched: two ranks that log ten steps a second for ltui, a W&B run
that logs four metrics ten times a second for LEET. GPUs are simulated by the stand-in driver, which
nvitop and ltui's GPU screen load in the same way.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench.bench_run import _ltui, torchrun
from tests.bench.peers.environments import PEERS, python_of, version_of
from tests.bench.peers.terminal import terminal
from tests.gpu.standin import nvml_stand_in
from tests.ltui_command import LTUI

GPU_SCREEN = (
    "from ltui.app.open_dashboard import open_app\n"
    "def make():\n"
    "    from ltui.app.gpu_demo import DemoApp, SimulatedGpus\n"
    "    from ltui.training.gpu.sampler import GpuSampler\n"
    "    return DemoApp(lambda: SimulatedGpus(GpuSampler()))\n"
    "open_app(make)\n"
)
"""The screen of ``ltui demo gpus`` with readings of the driver."""
GPU_SCRIPT = """
gpus 8 h100
set * util ~92,7,11 sm_activity ~66,14,9 tensor_activity ~41,12,9 dram_activity ~48,9,13
set * power ~560,80,9 temp ~63,4,60 mem_used 61e9 mem_util ~48,8,11
process 6 {pid} 4e9
"""
"""Eight GPUs that train, for the stand-in driver, in the format of ``tests/gpu/standin``."""
WATCH_S = 15
SETTLE_S = 5
WANDB_WRITER = """
import math
import sys
import time
import wandb
run = wandb.init(mode="offline", project="bench", dir=sys.argv[1])
for step in range(100_000):
    loss = math.exp(-step / 500)
    run.log({"loss": loss, "val/loss": loss + 0.1, "lr": 0.01, "rate": 500.0})
    time.sleep(0.1)
"""


@dataclass
class DisplayCosts:
    """One value for each start of the program."""

    first_screen_s: list[float] = field(default_factory=list)
    cpu_percent: list[float] = field(default_factory=list)
    memory_mb: list[float] = field(default_factory=list)


def measure(runs: int) -> tuple[dict[str, DisplayCosts], dict[str, str]]:
    """Costs of every display, and of each that did not start what it said or did."""
    costs: dict[str, DisplayCosts] = {}
    errors: dict[str, str] = {}
    peers = {peer.name: peer for peer in PEERS}
    nvitop, wandb = (python_of(peers[name]) for name in ("nvitop", "wandb"))
    leet_name = f"W&B LEET {version_of(peers['wandb'])}, a live run"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        home = folder / "ltui"
        simulated = _simulated_gpus(folder)
        own = {"LTUI_HOME": str(home), "HOME": name}
        with _ltui_run(home), _wandb_run(folder, wandb):
            displays: dict[str, tuple[Sequence[str], Mapping[str, str], str]] = {
                "ltui, home": (LTUI, own, "quickstart"),
                "ltui, a live run": ((*LTUI, "attach", "last"), own, "r1"),
                leet_name: (
                    (str(Path(wandb).with_name("wandb")), "leet", str(folder / "wandb")),
                    {"HOME": name},
                    "Run Overview",
                ),
                "ltui demo gpus, 8 simulated": (
                    (sys.executable, "-c", GPU_SCREEN),
                    {**simulated, **own},
                    "GPU",
                ),
                f"nvitop {version_of(peers['nvitop'])}, 8 simulated": (
                    (str(Path(nvitop).with_name("nvitop")),),
                    simulated,
                    "Processes:",
                ),
            }
            for _ in range(runs):
                for label, (command, environment, text) in displays.items():
                    if label not in errors:
                        problem = _once(
                            costs.setdefault(label, DisplayCosts()), command, environment, text
                        )
                        if problem:
                            errors[label] = problem
    return costs, errors


def _once(
    costs: DisplayCosts, command: Sequence[str], environment: Mapping[str, str], text: str
) -> str | None:
    with terminal(command, environment) as program:
        first = program.wait_for(text, 20)
        if first is None:
            return f"did not draw {text!r} within 20 s (exit {program.process.poll()})"
        program.drain(SETTLE_S)
        cpu, memory = program.usage(WATCH_S)
    costs.first_screen_s.append(first)
    costs.cpu_percent.append(cpu)
    costs.memory_mb.append(memory)
    return None


def _simulated_gpus(folder: Path) -> dict[str, str]:
    script = folder / "gpus.txt"
    # Process 1 stands for the user of a simulated GPU: it is never ours.
    nvml_stand_in.write_script(script, GPU_SCRIPT.format(pid=1))
    library = nvml_stand_in.build(folder / "driver")
    return nvml_stand_in.environment(library.parent, script)


@contextmanager
def _ltui_run(home: Path) -> Iterator[None]:
    home.mkdir()
    _ltui(home, "exec", "--detach", "--", *torchrun(2), "100000", "0.1")
    time.sleep(20)
    try:
        yield
    finally:
        _ltui(home, "stop", "last", "--kill")


@contextmanager
def _wandb_run(folder: Path, python: str) -> Iterator[None]:
    process = subprocess.Popen(
        [python, "-c", WANDB_WRITER, str(folder)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={"HOME": str(folder), "PATH": "/usr/bin:/bin", "WANDB_SILENT": "true"},
        start_new_session=True,
    )
    time.sleep(8)
    try:
        yield
    finally:
        process.terminate()
        process.wait(20)
