"""A MIG slice of a GPU: the few readings that the driver gives of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import pynvml

from ltui.training.gpu import gpm_metrics
from ltui.training.gpu.device import Device, memory, running
from ltui.training.gpu.gpu_processes import Directory
from ltui.training.gpu.nvml_client import Door, Refusals
from ltui.training.gpu.reading import GpuReading, slice_index

T = TypeVar("T")


class Slice:
    """Power, heat and clocks are the whole GPU's; memory, processes and GPM are the slice's own."""

    def __init__(
        self, door: Door, directory: Directory, parent: Device, handle: Any, number: int
    ) -> None:
        self.handle, self.parent, self.number = handle, parent, number
        self.index, self.label = slice_index(parent.index, number), f"{parent.index}/{number}"
        self._door, self._directory = door, directory
        self._refusals = Refusals()
        self.fixed: dict[str, Any] = {}
        self._gpm: gpm_metrics.Gpm | None = None

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
        if instance is not None and gpm_metrics.offered(
            self._door, self._refusals, self.label, whole
        ):
            self._gpm = gpm_metrics.Gpm(
                self._door, self._refusals, self.label, whole, slice_id=instance
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
            processes=running(self._ask, self._directory),
            **values,
        )

    def lost(self, error: str) -> GpuReading:
        return GpuReading(
            index=self.index, label=self.label, error=error, sampled_at=time.time(), **self.fixed
        )

    def _ask(self, name: str, function: Callable[..., T], *arguments: Any) -> T | None:
        return self._door.ask(self._refusals, self.label, name, function, self.handle, *arguments)


def slices_of(door: Door, directory: Directory, parent: Device) -> list[Slice]:
    """The slices that the GPU has now, opened."""
    refusals = Refusals()
    most = door.ask(
        refusals,
        parent.label,
        "MaxMigDeviceCount",
        pynvml.nvmlDeviceGetMaxMigDeviceCount,
        parent.handle,
    )
    found = []
    for number in range(most or 0):
        handle = door.ask(
            refusals,
            parent.label,
            f"MigDevice{number}",
            pynvml.nvmlDeviceGetMigDeviceHandleByIndex,
            parent.handle,
            number,
        )
        if handle is not None:
            slice_ = Slice(door, directory, parent, handle, number)
            slice_.open()
            found.append(slice_)
    return found
