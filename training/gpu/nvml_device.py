"""Driver access that a GPU and a MIG device have in common: memory, processes and GPM metrics."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import pynvml

from ltui.training.gpu.gpm_metrics import GpmSampler
from ltui.training.gpu.nvml_client import DeviceClient, NvmlClient
from ltui.training.gpu.process_owners import ProcessInfoCache
from ltui.training.gpu.reading import GpuProcess, GpuReading

T = TypeVar("T")

NO_INSTANCE = 0xFFFFFFFF


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
        self._client = DeviceClient(client, label)
        self._process_cache = process_cache
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
        answer = self._client.query(
            "GpmQueryDeviceSupport", pynvml.nvmlGpmQueryDeviceSupport, gpu_handle
        )
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

    def _query(self, name: str, function: Callable[..., T], *arguments: Any) -> T | None:
        return self._client.query(name, function, self.handle, *arguments)

    def _memory(self) -> dict[str, int]:
        """Return used and total bytes. The newer call excludes memory that the driver reserves."""
        answer = self._query("MemoryInfo2", pynvml.nvmlDeviceGetMemoryInfo, pynvml.nvmlMemory_v2)
        if answer is None:
            answer = self._query("MemoryInfo", pynvml.nvmlDeviceGetMemoryInfo)
        if answer is None:
            return {}
        return {"memory_used_bytes": int(answer.used), "memory_total_bytes": int(answer.total)}

    def _running_processes(self) -> tuple[GpuProcess, ...] | None:
        """Return the processes on the device; None if the driver does not report them."""
        compute = self._query("ComputeProcesses", pynvml.nvmlDeviceGetComputeRunningProcesses)
        graphics = self._query("GraphicsProcesses", pynvml.nvmlDeviceGetGraphicsRunningProcesses)
        if compute is None and graphics is None:
            return None
        processes: dict[int, GpuProcess] = {}
        for is_graphics, listed in ((True, graphics), (False, compute)):
            for process in listed or ():
                instance = process.gpuInstanceId
                processes[process.pid] = self._process_cache.describe(
                    process.pid,
                    # Inside a container, some drivers list a process with no memory.
                    process.usedGpuMemory or None,
                    graphics=is_graphics,
                    gpu_instance=None if instance == NO_INSTANCE else instance,
                )
        return tuple(processes[pid] for pid in sorted(processes))
