"""A MIG device of a GPU, for which the driver provides only a few readings."""

from __future__ import annotations

from typing import Any

import pynvml

from ltui.training.gpu.nvml_client import DeviceClient, NvmlClient
from ltui.training.gpu.nvml_device import NvmlDevice
from ltui.training.gpu.process_owners import ProcessInfoCache
from ltui.training.gpu.reading import GpuReading, mig_index
from ltui.training.gpu.whole_gpu import Device


class MigDevice(NvmlDevice):
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
        index, label = mig_index(parent.index, number), f"{parent.index}/{number}"
        super().__init__(client, process_cache, handle, index, label)
        instance = self._query("GpuInstanceId", pynvml.nvmlDeviceGetGpuInstanceId)
        self.fixed = {
            "uuid": self._query("DeviceGetUUID", pynvml.nvmlDeviceGetUUID),
            "name": self._query("DeviceGetName", pynvml.nvmlDeviceGetName),
            "gpu_instance": instance,
            "parent": parent.index,
        }
        if instance is not None:
            self._open_gpm(parent.handle, instance)

    @property
    def key(self) -> tuple[int, str | None]:
        """Identity of the MIG device, to recognise it in a later listing."""
        return self.index, self.fixed.get("uuid")

    def read(self) -> GpuReading:
        """Return a new reading."""
        return self._reading(**self.fixed, **self._memory(), **self._read_gpm())


def open_mig_devices(
    client: NvmlClient, process_cache: ProcessInfoCache, parent: Device
) -> list[MigDevice]:
    """Open and return the current MIG devices of a GPU."""
    parent_client = DeviceClient(client, parent.label)
    max_devices = parent_client.query(
        "MaxMigDeviceCount", pynvml.nvmlDeviceGetMaxMigDeviceCount, parent.handle
    )
    handles = [
        parent_client.query(
            f"MigDevice{number}",
            pynvml.nvmlDeviceGetMigDeviceHandleByIndex,
            parent.handle,
            number,
        )
        for number in range(max_devices or 0)
    ]
    return [
        MigDevice(client, process_cache, parent, handle, number)
        for number, handle in enumerate(handles)
        if handle is not None
    ]
