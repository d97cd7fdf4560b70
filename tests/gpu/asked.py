"""Run by ``conftest.Asked``: answers expressions on standard input, one a line, as pickles.

With the argument ``sampling`` it has a sampler from the beginning.
"""

from __future__ import annotations

import base64
import pickle
import sys
from pathlib import Path

import pynvml as nvml

from ltui.training.gpu import nvml_device
from ltui.training.gpu import sampler as sampling
from ltui.training.gpu.run_gpus import RunGpus
from ltui.training.state.run_snapshot import RankSnapshot, RankState


def main() -> None:
    # The processes of the script have not opened the device files of a real driver.
    nvml_device.DRIVER = Path("/proc/nonexistent")
    sampling.REOPEN_DELAY_S = sampling.RESCAN_PERIOD_S = 0.2
    sampling.OPEN_TIMEOUT_S = 3.0
    known = {"nvml": nvml, "kept": {}}
    known |= {"RunGpus": RunGpus, "RankSnapshot": RankSnapshot, "RankState": RankState}
    if "sampling" in sys.argv:
        known["sampler"] = sampling.GpuSampler(period_s=0.1, slow_every=2)
    for line in sys.stdin:
        try:
            answer = eval(line, known)  # the tests' own expressions
        except Exception as error:
            answer = RuntimeError(f"{type(error).__name__}: {error}")
        print(base64.b64encode(pickle.dumps(answer)).decode(), flush=True)


main()
