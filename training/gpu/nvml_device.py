"""Driver access that a GPU and a MIG device have in common: memory, processes and GPM metrics.

All NVML calls go through one client, which remembers unsupported calls. A call into a faulty driver
may hang forever, and nothing can interrupt it. The calling thread therefore publishes each call
before it makes it, and another thread can read the age of the call.

Properties of the processes on a GPU: user, name and run id. In a container, the driver may list
processes by the host's pids, which may be those of other processes here. A process that uses a GPU
has opened a device file of the driver.
"""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pynvml
from msgspec import Struct
from msgspec.structs import replace

from ltui.training.gpu.reading import GpuProcess, GpuReading
from ltui.training.process.proc_files import entry_of, environment, open_files

T = TypeVar("T")

RETRY_AFTER_S = {
    pynvml.NVML_ERROR_NOT_SUPPORTED: 300.0,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: 3600.0,
    pynvml.NVML_ERROR_INVALID_ARGUMENT: 300.0,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH: 3600.0,
    pynvml.NVML_ERROR_NO_PERMISSION: 60.0,
}
"""Seconds until a refused query is tried again, by NVML error code.

Some refusals are temporary, for example while MIG is enabled.
"""

_LOST_REASONS = {
    pynvml.NVML_ERROR_GPU_IS_LOST: "fell off the bus",
    pynvml.NVML_ERROR_RESET_REQUIRED: "needs a reset",
}
_DRIVER_GONE_CODES = {
    pynvml.NVML_ERROR_UNINITIALIZED,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
}


class GpuLostError(Exception):
    """The driver no longer answers for this GPU. The text gives the reason."""


class DriverGoneError(Exception):
    """The connection to the driver is lost; it must be opened again."""


class PendingCall(Struct, frozen=True):
    """A call that has not returned yet."""

    call: str
    gpu: str | None
    """Label of the GPU that the call is about; None for the driver."""
    began: float
    """``time.monotonic()`` at the start of the call."""


class NvmlClient:
    """Used by one thread. Any thread may read ``pending_call``."""

    def __init__(self) -> None:
        self.pending_call: PendingCall | None = None
        self.calls = 0

    def call(self, name: str, gpu: str | None, function: Callable[..., T], *args: Any) -> T:
        """Call the driver. Raises ``pynvml.NVMLError``."""
        self.calls += 1
        self.pending_call = PendingCall(name, gpu, time.monotonic())
        try:
            return function(*args)
        finally:
            self.pending_call = None


class DeviceClient:
    """Queries about one GPU or MIG device; those that the driver refuses are not repeated soon."""

    def __init__(self, client: NvmlClient, label: str) -> None:
        self._client, self._label = client, label
        self._retry_at: dict[str, float] = {}
        """Name of a refused query to the ``time.monotonic()`` of the next attempt."""

    def query(self, function: Callable[..., T], *args: Any, name: str = "") -> T | None:
        """Return the driver's answer, or None if the driver refuses the query.

        ``name`` identifies the query, by default by its function and the whole numbers in ``args``.
        Raises ``GpuLostError`` and ``DriverGoneError``.
        """
        if not name:
            numbers = (str(argument) for argument in args if isinstance(argument, int))
            name = " ".join((function.__name__.removeprefix("nvml"), *numbers))
        if self._retry_at and self._retry_at.get(name, 0.0) > time.monotonic():
            return None
        try:
            return self._client.call(name, self._label, function, *args)
        except pynvml.NVMLError as error:
            if error.value in _LOST_REASONS:
                raise GpuLostError(_LOST_REASONS[error.value]) from error
            if error.value in _DRIVER_GONE_CODES:
                raise DriverGoneError(str(error)) from error
            if error.value in RETRY_AFTER_S:
                self._retry_at[name] = time.monotonic() + RETRY_AFTER_S[error.value]
            return None


MIB = float(1 << 20)
MIN_INTERVAL_S = 0.1
"""Minimum seconds between two samples. The driver returns nothing useful for less."""

METRICS = {
    pynvml.NVML_GPM_METRIC_SM_UTIL: ("sm_activity", 0.01),
    pynvml.NVML_GPM_METRIC_SM_OCCUPANCY: ("sm_occupancy", 0.01),
    pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL: ("tensor_activity", 0.01),
    pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL: ("dram_activity", 0.01),
    pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC: ("pcie_tx_bytes_per_s", MIB),
    pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC: ("pcie_rx_bytes_per_s", MIB),
    pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC: ("nvlink_tx_bytes_per_s", MIB),
    pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC: ("nvlink_rx_bytes_per_s", MIB),
}
"""Metric to the field of a reading, and the factor from the metric's unit to the field's."""
MIG_FIELDS = ("sm_activity", "sm_occupancy", "tensor_activity", "dram_activity")


class GpmSampler:
    """GPM metrics of one GPU or MIG device between two successive reads."""

    def __init__(
        self, client: DeviceClient, handle: Any, *, mig_instance: int | None = None
    ) -> None:
        """``handle`` belongs to the GPU, also for its MIG device with GPU instance
        ``mig_instance``."""
        self._client, self._handle, self._mig_instance = client, handle, mig_instance
        self._samples = (pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc())
        self._sampled_s: float | None = None
        """``time.monotonic()`` of the previous sample."""
        self._metrics = {
            metric: entry
            for metric, entry in METRICS.items()
            if mig_instance is None or entry[0] in MIG_FIELDS
        }

    def read(self) -> dict[str, float]:
        """Return the fields that the driver provides; empty on the first read."""
        before, after = self._samples
        now_s = time.monotonic()
        if self._sampled_s is not None and now_s - self._sampled_s < MIN_INTERVAL_S:
            return {}
        first = self._sampled_s is None
        if not self._take_sample(after):
            self._sampled_s = None
            return {}
        self._samples, self._sampled_s = (after, before), now_s
        return {} if first else self._metrics_between(before, after)

    def close(self) -> None:
        """Free the driver's samples."""
        for sample in self._samples:
            pynvml.nvmlGpmSampleFree(sample)

    def _take_sample(self, sample: Any) -> bool:
        if self._mig_instance is None:
            answer = self._client.query(pynvml.nvmlGpmSampleGet, self._handle, sample)
        else:
            answer = self._client.query(
                pynvml.nvmlGpmMigSampleGet, self._handle, self._mig_instance, sample
            )
        return answer is not None

    def _metrics_between(self, before: Any, after: Any) -> dict[str, float]:
        request = pynvml.c_nvmlGpmMetricsGet_t()
        request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(self._metrics)
        request.sample1, request.sample2 = before, after
        for entry, metric in zip(request.metrics, self._metrics, strict=False):
            entry.metricId = metric
        answer = self._client.query(pynvml.nvmlGpmMetricsGet, request)
        if answer is None:
            return {}
        return {
            field: entry.value * unit
            for entry, (field, unit) in zip(request.metrics, self._metrics.values(), strict=False)
            if entry.nvmlReturn == pynvml.NVML_SUCCESS and entry.value >= 0
        }


DRIVER = Path("/proc/driver/nvidia")
"""Exists where the driver has device files: on Linux, but not in WSL."""
DEVICE_FILES = "/dev/nvidia"


class ProcessInfoCache:
    """Reads the properties of processes and caches them while the process is the same."""

    def __init__(self) -> None:
        self._cache: dict[int, GpuProcess] = {}

    def describe(self, pid: int, memory_bytes: int | None, *, graphics: bool) -> GpuProcess:
        """Return the process ``pid`` of a GPU with its properties."""
        return replace(self._read(pid), memory_bytes=memory_bytes, graphics=graphics)

    def retain_only(self, pids: set[int]) -> None:
        """Remove all processes from the cache except ``pids``."""
        for pid in self._cache.keys() - pids:
            del self._cache[pid]

    def _read(self, pid: int) -> GpuProcess:
        entry = entry_of(pid)
        if entry is None:
            return GpuProcess(pid=pid, visible=False)
        process = self._cache.get(pid)
        if process is None or process.start_ticks != entry.start_ticks:
            process = self._cache[pid] = (
                GpuProcess(
                    pid=pid,
                    start_ticks=entry.start_ticks,
                    user=_user(pid),
                    name=entry.name or None,
                    run_id=environment(pid).get("LTUI_RUN_ID"),
                )
                if _may_use_gpu(pid)
                else GpuProcess(pid=pid, start_ticks=entry.start_ticks, visible=False)
            )
        return process


def _may_use_gpu(pid: int) -> bool:
    """Return False if the process certainly is not the one that the driver means."""
    files = open_files(pid)  # empty for a process of another user
    return not files or not DRIVER.exists() or any(f.startswith(DEVICE_FILES) for f in files)


def _user(pid: int) -> str | None:
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


class NvmlDevice:
    """A GPU or MIG device. Queries may raise ``GpuLostError`` and ``DriverGoneError``."""

    def __init__(
        self,
        client: NvmlClient,
        process_cache: ProcessInfoCache,
        handle: Any,
        index: int,
        label: str,
    ) -> None:
        self.handle, self.index, self.label = handle, index, label
        self.fixed: dict[str, Any] = {}
        """Values that do not change while the driver is loaded."""
        self.nvml, self.process_cache = client, process_cache
        self._client = DeviceClient(client, label)
        self._gpm: GpmSampler | None = None

    def close(self) -> None:
        """Free the GPM samples."""
        if self._gpm is not None:
            self._gpm.close()
            self._gpm = None

    def error_reading(self, error: str) -> GpuReading:
        """Return the reading of a device that does not answer: its fixed values and the reason."""
        return GpuReading(
            index=self.index, label=self.label, error=error, sampled_at=time.time(), **self.fixed
        )

    def _open_gpm(self, gpu_handle: Any, mig_instance: int | None = None) -> None:
        """Begin to sample GPM metrics if the driver supports them for this GPU."""
        answer = self._client.query(pynvml.nvmlGpmQueryDeviceSupport, gpu_handle)
        if answer is not None and answer.isSupportedDevice:
            self._gpm = GpmSampler(self._client, gpu_handle, mig_instance=mig_instance)

    def _read_gpm(self) -> dict[str, float]:
        return {} if self._gpm is None else self._gpm.read()

    def _reading(self, **values: Any) -> GpuReading:
        return GpuReading(
            index=self.index,
            label=self.label,
            sampled_at=time.time(),
            processes=self._running_processes(),
            **values,
        )

    def _query(self, function: Callable[..., T], *arguments: Any, name: str = "") -> T | None:
        return self._client.query(function, self.handle, *arguments, name=name)

    def _memory(self) -> dict[str, int]:
        """Return used and total bytes. The newer call excludes memory that the driver reserves."""
        answer = self._query(pynvml.nvmlDeviceGetMemoryInfo, pynvml.nvmlMemory_v2)
        if answer is None:
            answer = self._query(pynvml.nvmlDeviceGetMemoryInfo)
        if answer is None:
            return {}
        return {"memory_used_bytes": int(answer.used), "memory_total_bytes": int(answer.total)}

    def _running_processes(self) -> tuple[GpuProcess, ...] | None:
        """Return the processes on the device; None if the driver does not report them."""
        compute = self._query(pynvml.nvmlDeviceGetComputeRunningProcesses)
        graphics = self._query(pynvml.nvmlDeviceGetGraphicsRunningProcesses)
        if compute is None and graphics is None:
            return None
        processes: dict[int, GpuProcess] = {}
        for is_graphics, listed in ((True, graphics), (False, compute)):
            for process in listed or ():
                processes[process.pid] = self.process_cache.describe(
                    process.pid,
                    # Inside a container, some drivers list a process with no memory.
                    process.usedGpuMemory or None,
                    graphics=is_graphics,
                )
        return tuple(processes[pid] for pid in sorted(processes))
