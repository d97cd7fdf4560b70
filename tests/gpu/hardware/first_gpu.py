"""NVML's readings of the first GPU that torch may use, without a CUDA context in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pynvml

from tests.gpu.hardware.instruments import ask_torch

MIB = 1 << 20


class FirstGpu:
    """``cuda:0`` of a process with this environment. A reading that NVML refuses is None."""

    def __init__(self) -> None:
        """Raises ``pynvml.NVMLError``, or ``OSError`` if torch does not name the GPU."""
        uuid = ask_torch("torch.cuda.get_device_properties(0).uuid")
        pynvml.nvmlInit()
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")

    def used_mib(self) -> float | None:
        """Return the memory in use on the GPU, of all processes."""
        found = _read(pynvml.nvmlDeviceGetMemoryInfo, self._handle)
        return None if found is None else found.used / MIB

    def utilisation_percent(self) -> float | None:
        """Return the share of time in which any kernel ran."""
        found = _read(pynvml.nvmlDeviceGetUtilizationRates, self._handle)
        return None if found is None else float(found.gpu)

    def power_w(self) -> float | None:
        """Return the power draw, on newer GPUs as a mean of the last second."""
        found = _read(pynvml.nvmlDeviceGetPowerUsage, self._handle)
        return None if found is None else found / 1000


def find_first_gpu(rehearsal: bool) -> FirstGpu | None:
    """Return the GPU; None in a rehearsal, or if its readings are not available."""
    try:
        return None if rehearsal else FirstGpu()
    except (OSError, pynvml.NVMLError) as error:
        print(f"no readings of the first GPU: {error}", flush=True)
        return None


def _read(call: Callable[..., Any], handle: Any) -> Any:
    try:
        return call(handle)
    except pynvml.NVMLError:
        return None
