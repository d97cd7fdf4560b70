"""Frames of simulated GPUs: read from the stand-in driver through the whole path, then held still.

Values and findings are what the supervisor would have published; only times are set, so that a
picture is the same every time.
"""

from __future__ import annotations

import base64
import pickle
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

from msgspec.structs import replace

from ltui.app.live.frame import Frame
from ltui.app.live.gpu_history import GpuHistory
from ltui.training.gpu.findings import Finding, verdicts
from ltui.training.state.run_snapshot import GpuSnapshot
from tests.app.frames import NOW, frame, rank, snapshot
from tests.gpu.standin import nvml_stand_in

_PROGRAM = """
import base64, pickle, sys, time
from ltui.training.gpu.run_gpus import RunGpus
from ltui.training.state.run_snapshot import RankSnapshot, RankState
count = int(sys.argv[1])
gpus = RunGpus("brave-owl-3f2a", period_s=0.2)
ranks, began, deadline = (), time.time() - 45.0, time.monotonic() + 30
while time.monotonic() < deadline:
    view = gpus.sample(ranks, began)
    if len(view.gpus) == count and all(g.error or g.sm_activity is not None for g in view.gpus):
        break
    time.sleep(0.05)
ranks = tuple(
    RankSnapshot(rank=i, device=f"cuda:{i}", gpu_uuid=g.uuid, state=RankState.STALLED)
    for i, g in enumerate(view.gpus)
)
for second in range(40):
    view = gpus.sample(ranks, began + second)
print(base64.b64encode(pickle.dumps((view.gpus, view.findings))).decode())
"""

SCRIPTS = {
    1: "gpus 1 h100\nset 0 util 100 power 71 sm_activity 12 tensor_activity 0 dram_activity 3\n",
    8: (
        "gpus 8 h100\n"
        "set * util 98 sm_activity 71 tensor_activity 44 dram_activity 38\n"
        "set 2-3 throttle 0x20 temp 88 sm_clock 1410\n"
        "set 5 util 100 power 71 sm_activity 9\n"
        "set 6 power !NO_PERMISSION temp none\n"
        "lost 7\n"
    ),
    64: (
        "gpus 64 h100\nset * util 97 sm_activity 64\n"
        "set 8-15 util 12 power 140\nset 40 util 55\nset 33 mem_used 84e9\n"
    ),
}


@lru_cache
def read(count: int, library: Path) -> tuple[tuple[GpuSnapshot, ...], tuple[Finding, ...]]:
    """The GPUs and findings that ``SCRIPTS[count]`` gives; ``library``: the stand-in driver."""
    script = library.with_name(f"{count}.txt")
    script.write_text(SCRIPTS[count])
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(count)],
        env=nvml_stand_in.environment(library.parent, script),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    gpus, findings = pickle.loads(base64.b64decode(done.stdout))
    return gpus, findings


def gpu_frame(count: int, library: Path) -> Frame:
    gpus, findings = read(count, library)
    still = tuple(replace(g, sampled_at=NOW - 0.5, xid_at=None) for g in gpus)
    book = GpuHistory()
    for second in range(180, -1, -1):
        book.add([_then(gpu, NOW - second) for gpu in still])
    shown = tuple(replace(f, since=NOW - 39) for f in findings)
    ranks = tuple(rank(i, host=None) for i in range(count))
    run = snapshot(gpus=still, ranks=ranks, world_size=count, verdicts=verdicts(shown))
    return frame(snapshot=run, gpu_series=book.series())


def _then(gpu: GpuSnapshot, at: float) -> GpuSnapshot:
    """Return earlier samples of a GPU, with dips that differ between GPUs."""
    if gpu.error is not None or gpu.utilisation_percent is None:
        return replace(gpu, sampled_at=None)
    dip = 0.35 if int(at / 9 + gpu.index) % 8 == 0 else 1.0
    return replace(gpu, sampled_at=at, utilisation_percent=gpu.utilisation_percent * dip)
