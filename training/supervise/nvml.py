"""GPU readings once a second, taken in a thread of their own: a driver that hangs blocks nobody.

Every value that the driver refuses is ``None``; a machine without a driver is said in a sentence.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ltui.training.run.snapshot import GpuSnapshot

_EVERY_S = 1.0
_HANGING_S = 10.0


@dataclass(frozen=True, slots=True)
class GpuReadings:
    gpus: tuple[GpuSnapshot, ...] = ()
    pids: tuple[frozenset[int], ...] = ()
    """Of each GPU, the processes that compute on it."""
    note: str | None = "not read yet"


class GpuSampler:
    """Samples until ``stop``; ``latest`` never waits."""

    def __init__(self) -> None:
        self._readings = GpuReadings()
        self._began_s = time.monotonic()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nvml", daemon=True)
        self._thread.start()

    def latest(self) -> GpuReadings:
        """The newest readings; a note where the driver has not answered for long."""
        waited_s = time.monotonic() - self._began_s
        if self._thread.is_alive() and waited_s > _HANGING_S:
            note = f"the NVIDIA driver has not answered for {waited_s:.0f} s"
            return GpuReadings(self._readings.gpus, self._readings.pids, note)
        return self._readings

    def stop(self) -> None:
        self._stopping.set()

    def _run(self) -> None:
        try:
            # Local: the driver is met in this thread only.
            import pynvml

            pynvml.nvmlInit()
            handles = [
                pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())
            ]
        except Exception as error:  # noqa: BLE001 - top of a thread; said in a sentence
            self._readings = GpuReadings(note=_absent(error))
            return
        if not handles:
            self._readings = GpuReadings(note="the NVIDIA driver shows no GPU")
            return
        fixed = [_Fixed.read(pynvml, handle) for handle in handles]
        while not self._stopping.is_set():
            self._began_s = time.monotonic()
            gpus = [
                _sample(pynvml, i, h, f)
                for i, (h, f) in enumerate(zip(handles, fixed, strict=True))
            ]
            pids = tuple(_pids(pynvml, handle) for handle in handles)
            self._readings = GpuReadings(tuple(gpus), pids, None)
            self._began_s = time.monotonic()
            self._stopping.wait(_EVERY_S)


def _absent(error: Exception) -> str:
    name = type(error).__name__
    if name in ("NVMLError_LibraryNotFound", "NVMLError_DriverNotLoaded"):
        return "no NVIDIA driver on this machine"
    if isinstance(error, ImportError):
        return "the package nvidia-ml-py is missing"
    return f"GPU readings are not available: {error}"


@dataclass(frozen=True, slots=True)
class _Fixed:
    """What does not change while a GPU works."""

    uuid: str | None
    name: str | None

    @classmethod
    def read(cls, nvml: Any, handle: Any) -> _Fixed:
        return cls(
            _text(_ask(nvml, nvml.nvmlDeviceGetUUID, handle)),
            _text(_ask(nvml, nvml.nvmlDeviceGetName, handle)),
        )


def _sample(nvml: Any, index: int, handle: Any, fixed: _Fixed) -> GpuSnapshot:
    use = _ask(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
    memory = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    power = _ask(nvml, nvml.nvmlDeviceGetPowerUsage, handle)
    limit = _ask(nvml, nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    lost = use is None and memory is None
    return GpuSnapshot(
        index=index,
        uuid=fixed.uuid,
        name=fixed.name,
        utilisation_percent=None if use is None else float(use.gpu),
        memory_utilisation_percent=None if use is None else float(use.memory),
        memory_used_bytes=None if memory is None else int(memory.used),
        memory_total_bytes=None if memory is None else int(memory.total),
        power_w=None if power is None else power / 1000.0,
        power_limit_w=None if limit is None else limit / 1000.0,
        temperature_c=_ask(nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        sm_clock_mhz=_ask(nvml, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
        memory_clock_mhz=_ask(nvml, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
        fan_percent=_ask(nvml, nvml.nvmlDeviceGetFanSpeed, handle),
        error="the driver refuses readings of this GPU" if lost else None,
        sampled_at=time.time(),
    )


def _ask(nvml: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """The driver's answer; None where it refuses this one."""
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None


def _pids(nvml: Any, handle: Any) -> frozenset[int]:
    processes = _ask(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle)
    return frozenset(int(p.pid) for p in processes or ())


def _text(value: Any) -> str | None:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
