"""What the GPU sampler costs, over the stand-in driver; its process does nothing else.

The figures hold the stand-in's own work too, which is small beside the bindings'. A real driver
takes longer for a call, most of it waiting.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.bench.row import Row, row
from tests.gpu.standin import nvml_stand_in

SECONDS = 12.0

_SAMPLING = """
import sys, time
from ltui.training.gpu.sampler import GpuSampler
sampler = GpuSampler()
while not sampler.latest().readings:
    time.sleep(0.05)
time.sleep(2.5)  # opening is over, the first rates are in
before = time.process_time(), time.monotonic(), sampler._client.calls
time.sleep(float(sys.argv[1]))
after = time.process_time(), time.monotonic(), sampler._client.calls
spent, span, calls = (b - a for a, b in zip(before, after))
print(spent / span, calls / span)
"""

_HANGING = """
import time
from ltui.training.gpu.sampler import GpuSampler
sampler = GpuSampler()
while sampler.latest().not_answering_s is None:
    time.sleep(0.05)
worst = 0.0
for _ in range(2000):
    began = time.perf_counter()
    view = sampler.latest()
    worst = max(worst, time.perf_counter() - began)
assert view.not_answering_s
print(worst)
"""

_SCRIPTS = {
    "8 GPUs with GPM": "gpus 8 h100\nprocess * self 43e9\n",
    "8 GPUs without GPM": "gpus 8 a100\nprocess * self 43e9\n",
    "64 GPUs with GPM": "gpus 64 h100\nprocess * self 43e9\n",
}
_HUNG = "gpus 8 h100\nhang 5 DeviceGetPowerUsage forever from 1\n"


_SUPERVISED = """
import os, sys, tempfile, time
from pathlib import Path
import psutil
from tests.gpu.standin import nvml_stand_in
from ltui.training.config.run_spec import RunSpec
from ltui.training.store.run_directory import ltui_home, new_run_id
from ltui.training.lifecycle.supervisor_client import ControlClient
from ltui.training.lifecycle.launch_run import launch
seconds, hung = float(sys.argv[1]), sys.argv[2]
home = ltui_home()
run_id, name = new_run_id(home, None)
spec = RunSpec(id=run_id, name=name, created_at=time.time(), cwd=os.getcwd(),
               python=sys.executable, command=("sleep", "600"), nproc=0)
client = ControlClient(launch(spec, home))
try:
    while not (shown := client.status()) or len(shown.gpus) < 8:
        time.sleep(0.1)
    time.sleep(5.0)
    supervisor = psutil.Process(shown.supervisor_pid)
    before, began = supervisor.cpu_times(), time.monotonic()
    time.sleep(seconds)
    after, span = supervisor.cpu_times(), time.monotonic() - began
    spent = after.user + after.system - before.user - before.system
    rss = supervisor.memory_info().rss
    nvml_stand_in.write_script(Path(os.environ["LTUI_NVML_SCRIPT"]), hung)
    while not (client.status().gpu_note or "").startswith("driver has not answered"):
        time.sleep(0.1)
    worst = 0.0
    for number in range(400):
        began = time.perf_counter()
        client.request({"cmd": ("ping", "status")[number % 2]})
        worst = max(worst, time.perf_counter() - began)
        time.sleep(0.02)
    began = time.perf_counter()
    client.request({"cmd": "stop", "timeout_s": 5})
    worst = max(worst, time.perf_counter() - began)
    print(spent / span, rss / 2**20, worst)
finally:
    while (shown := client.status()) is not None:
        client.request({"cmd": "kill"})
        time.sleep(0.2)
"""


def _supervised(library: Path) -> list[Row]:
    """A whole supervisor, of a run whose one process sleeps."""
    hung = "gpus 8 h100\nhang 5 DeviceGetPowerUsage forever\n"
    with tempfile.TemporaryDirectory() as home:
        script = "gpus 8 h100\n"
        share, rss, worst = _run(
            library, script, _SUPERVISED, str(SECONDS), hung, env={"LTUI_HOME": home}
        )
    return [
        row("supervisor with 8 simulated GPUs at 1 Hz, CPU", 100 * share, "%", 2.0),
        row("supervisor with 8 simulated GPUs, resident memory", rss, "MiB", 100.0),
        row("control answers while a driver call hangs, worst of 401", 1e3 * worst, "ms", 100.0),
    ]


def measure() -> list[Row]:
    if nvml_stand_in.compiler() is None:
        return [row("GPU sampler: no C compiler", None, "%")]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        library = nvml_stand_in.build(Path(folder))
        for what, script in _SCRIPTS.items():
            share, calls = _run(library, script, _SAMPLING, str(SECONDS))
            # Of one core; the whole supervisor has 2 % with 8 GPUs.
            bound = 2.0 if what.startswith("8 ") else None
            what = f"GPU sampler, {what} at 1 Hz, CPU ({calls:.0f} calls/s)"
            rows.append(row(what, 100 * share, "%", bound))
        (worst,) = _run(library, _HUNG, _HANGING)
        rows += _supervised(library)
    what = "newest readings asked for while the driver hangs, worst of 2000"
    return [*rows, row(what, 1e3 * worst, "ms", 100.0)]


def _run(
    library: Path,
    script: str,
    program: str,
    *arguments: str,
    env: Mapping[str, str] | None = None,
) -> list[float]:
    path = library.parent / "gpus.txt"
    path.write_text(script)
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**nvml_stand_in.environment(library.parent, path), **(env or {})},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return [float(word) for word in done.stdout.split()]
