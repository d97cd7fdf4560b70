"""Run by ``conftest.Asked``: answers expressions on standard input, one a line, as pickles.

The argument is the sampler's period in seconds; 0: no sampler, the driver is opened as it is.
"""

from __future__ import annotations

import base64
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml as nvml

from ltui.training.gpu import nvml_device
from ltui.training.gpu import sampler as sampling
from ltui.training.gpu.run_gpus import RunGpus
from ltui.training.state.run_snapshot import RankSnapshot, RankState


def gpu(index: int) -> Any:
    return nvml.nvmlDeviceGetHandleByIndex(index)


def refused(function: Callable[..., Any], *arguments: Any) -> str | None:
    """The name of the driver's error; None if it answers."""
    try:
        function(*arguments)
    except nvml.NVMLError as error:
        return type(error).__name__.removeprefix("NVMLError_")
    return None


def main() -> None:
    period_s = float(sys.argv[1])
    # The processes of the script have not opened the device files of a real driver.
    nvml_device.DRIVER = Path("/nonexistent")
    sampling.REOPEN_DELAY_S = sampling.RESCAN_PERIOD_S = 0.2
    sampling.OPEN_TIMEOUT_S = 3.0
    known = {"nvml": nvml, "gpu": gpu, "refused": refused, "os": os, "kept": {}}
    known |= {"RunGpus": RunGpus, "RankSnapshot": RankSnapshot, "RankState": RankState}
    if period_s:
        known["sampler"] = sampling.GpuSampler(period_s=period_s, slow_every=2)
    for line in sys.stdin:
        try:
            answer = eval(line, known)  # the tests' own expressions
        except Exception as error:
            answer = RuntimeError(f"{type(error).__name__}: {error}")
        print(base64.b64encode(pickle.dumps(answer)).decode(), flush=True)


main()
