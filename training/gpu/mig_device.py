"""A MIG slice of a GPU: the few readings that the driver gives of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import pynvml

from ltui.training.gpu import gpm_metrics
from ltui.training.gpu.device import Device, memory, running
from ltui.training.gpu.gpu_processes import ProcessInfoCache
from ltui.training.gpu.nvml_client import NvmlClient, UnsupportedCalls
from ltui.training.gpu.reading import GpuReading, mig_index

T = TypeVar("T")


class MigDevice:
    """Power, heat and clocks are the whole GPU's; memory, processes and GPM are the slice's own."""

    def __init__(
        self,
        client: NvmlClient,
        process_cache: ProcessInfoCache,
        parent: Device,
        handle: Any,
        number: int,
    ) -> None:
        self.handle, self.parent, self.number = handle, parent, number
        self.index, self.label = mig_index(parent.index, number), f"{parent.index}/{number}"
        self._client, self._process_cache = client, process_cache
        self._unsupported = UnsupportedCalls()
        self.fixed: dict[str, Any] = {}
        self._gpm: gpm_metrics.GpmSampler | None = None

    @property
    def key(self) -> tuple[int, str | None]:
        """Tells whether a slice that is found again is the same one."""
        return self.index, self.fixed.get("uuid")

    def open(self) -> None:
        ask = self._ask
        instance = ask("GpuInstanceId", pynvml.nvmlDeviceGetGpuInstanceId)
        self.fixed = {
            "uuid": ask("DeviceGetUUID", pynvml.nvmlDeviceGetUUID),
            "name": ask("DeviceGetName", pynvml.nvmlDeviceGetName),
            "gpu_instance": instance,
            "parent": self.parent.index,
        }
        whole = self.parent.handle
        if instance is not None and gpm_metrics.gpm_supported(
            self._client, self._unsupported, self.label, whole
        ):
            self._gpm = gpm_metrics.GpmSampler(
                self._client, self._unsupported, self.label, whole, mig_instance=instance
            )

    def close(self) -> None:
        if self._gpm is not None:
            self._gpm.close()
            self._gpm = None

    def read(self) -> GpuReading:
        values = {**self.fixed, **memory(self._ask)}
        if self._gpm is not None:
            values.update(self._gpm.read())
        return GpuReading(
            index=self.index,
            label=self.label,
            sampled_at=time.time(),
            processes=running(self._ask, self._process_cache),
            **values,
        )

    def lost(self, error: str) -> GpuReading:
        return GpuReading(
            index=self.index, label=self.label, error=error, sampled_at=time.time(), **self.fixed
        )

    def _ask(self, name: str, function: Callable[..., T], *arguments: Any) -> T | None:
        return self._client.ask(
            self._unsupported, self.label, name, function, self.handle, *arguments
        )


def open_mig_devices(
    client: NvmlClient, process_cache: ProcessInfoCache, parent: Device
) -> list[MigDevice]:
    """The slices that the GPU has now, opened."""
    unsupported = UnsupportedCalls()
    most = client.ask(
        unsupported,
        parent.label,
        "MaxMigDeviceCount",
        pynvml.nvmlDeviceGetMaxMigDeviceCount,
        parent.handle,
    )
    found = []
    for number in range(most or 0):
        handle = client.ask(
            unsupported,
            parent.label,
            f"MigDevice{number}",
            pynvml.nvmlDeviceGetMigDeviceHandleByIndex,
            parent.handle,
            number,
        )
        if handle is not None:
            mig_device = MigDevice(client, process_cache, parent, handle, number)
            mig_device.open()
            found.append(mig_device)
    return found
