"""A MIG device of a GPU, for which the driver provides only a few readings."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import pynvml

from ltui.training.gpu import gpm_metrics
from ltui.training.gpu.device import Device, memory, running_processes
from ltui.training.gpu.nvml_client import NvmlClient, UnsupportedCalls
from ltui.training.gpu.process_info import ProcessInfoCache
from ltui.training.gpu.reading import GpuReading, mig_index

T = TypeVar("T")


class MigDevice:
    """A MIG device. It has its own memory, processes and GPM metrics.

    Power, temperature and clocks exist only for the complete GPU.
    """

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
        """Identity of the MIG device, to recognise it in a later listing."""
        return self.index, self.fixed.get("uuid")

    def open(self) -> None:
        """Read the values that do not change while the MIG device exists."""
        query = self._query
        instance = query("GpuInstanceId", pynvml.nvmlDeviceGetGpuInstanceId)
        self.fixed = {
            "uuid": query("DeviceGetUUID", pynvml.nvmlDeviceGetUUID),
            "name": query("DeviceGetName", pynvml.nvmlDeviceGetName),
            "gpu_instance": instance,
            "parent": self.parent.index,
        }
        parent_handle = self.parent.handle
        if instance is not None and gpm_metrics.gpm_supported(
            self._client, self._unsupported, self.label, parent_handle
        ):
            self._gpm = gpm_metrics.GpmSampler(
                self._client, self._unsupported, self.label, parent_handle, mig_instance=instance
            )

    def close(self) -> None:
        """Free the GPM samples."""
        if self._gpm is not None:
            self._gpm.close()
            self._gpm = None

    def read(self) -> GpuReading:
        """Return a new reading."""
        values = {**self.fixed, **memory(self._query)}
        if self._gpm is not None:
            values.update(self._gpm.read())
        return GpuReading(
            index=self.index,
            label=self.label,
            sampled_at=time.time(),
            processes=running_processes(self._query, self._process_cache),
            **values,
        )

    def error_reading(self, error: str) -> GpuReading:
        """Return the reading of a MIG device that does not answer."""
        return GpuReading(
            index=self.index, label=self.label, error=error, sampled_at=time.time(), **self.fixed
        )

    def _query(self, name: str, function: Callable[..., T], *arguments: Any) -> T | None:
        return self._client.query(
            self._unsupported, self.label, name, function, self.handle, *arguments
        )


def open_mig_devices(
    client: NvmlClient, process_cache: ProcessInfoCache, parent: Device
) -> list[MigDevice]:
    """Open and return the current MIG devices of a GPU."""
    unsupported = UnsupportedCalls()
    max_devices = client.query(
        unsupported,
        parent.label,
        "MaxMigDeviceCount",
        pynvml.nvmlDeviceGetMaxMigDeviceCount,
        parent.handle,
    )
    devices = []
    for number in range(max_devices or 0):
        handle = client.query(
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
            devices.append(mig_device)
    return devices
