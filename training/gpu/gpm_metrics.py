"""GPM, performance monitoring of Hopper and newer: what a GPU really did between two samples."""

from __future__ import annotations

import time
from typing import Any

import pynvml

from ltui.training.gpu.nvml_client import NvmlClient, UnsupportedCalls

MIB = float(1 << 20)
SHORTEST_S = 0.1
"""The driver gives nothing useful between samples that are closer."""

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
"""Metric to the field of a reading, and what its unit is multiplied by."""
MIG_FIELDS = ("sm_activity", "sm_occupancy", "tensor_activity", "dram_activity")


def gpm_supported(
    client: NvmlClient, unsupported: UnsupportedCalls, label: str, handle: Any
) -> bool:
    """Whether the driver offers GPM for this GPU."""
    answer = client.ask(
        unsupported, label, "GpmQueryDeviceSupport", pynvml.nvmlGpmQueryDeviceSupport, handle
    )
    return bool(answer is not None and answer.isSupportedDevice)


class GpmSampler:
    """Metrics of one GPU or slice between this read and the one before."""

    def __init__(
        self,
        client: NvmlClient,
        unsupported: UnsupportedCalls,
        label: str,
        handle: Any,
        *,
        mig_instance: int | None = None,
    ) -> None:
        """``handle`` is the whole GPU's, also for the slice with GPU instance ``slice_id``."""
        self._client, self._unsupported, self._label = client, unsupported, label
        self._handle, self._mig_instance = handle, mig_instance
        self._samples = (pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc())
        self._taken_s: float | None = None
        """When the first of the two samples was taken."""
        self._metrics = {
            metric: place
            for metric, place in METRICS.items()
            if mig_instance is None or place[0] in MIG_FIELDS
        }

    def read(self) -> dict[str, float]:
        """The fields that the driver gave; empty on the first read."""
        before, after = self._samples
        now_s = time.monotonic()
        if self._taken_s is not None and now_s - self._taken_s < SHORTEST_S:
            return {}
        first = self._taken_s is None
        if not self._take(after):
            self._taken_s = None
            return {}
        self._samples, self._taken_s = (after, before), now_s
        return {} if first else self._between(before, after)

    def close(self) -> None:
        for sample in self._samples:
            pynvml.nvmlGpmSampleFree(sample)

    def _take(self, sample: Any) -> bool:
        name, function, arguments = "GpmSampleGet", pynvml.nvmlGpmSampleGet, [self._handle, sample]
        if self._mig_instance is not None:
            name, function = "GpmMigSampleGet", pynvml.nvmlGpmMigSampleGet
            arguments.insert(1, self._mig_instance)
        return (
            self._client.ask(self._unsupported, self._label, name, function, *arguments) is not None
        )

    def _between(self, before: Any, after: Any) -> dict[str, float]:
        request = pynvml.c_nvmlGpmMetricsGet_t()
        request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(self._metrics)
        request.sample1, request.sample2 = before, after
        for place, metric in zip(request.metrics, self._metrics, strict=False):
            place.metricId = metric
        answer = self._client.ask(
            self._unsupported, self._label, "GpmMetricsGet", pynvml.nvmlGpmMetricsGet, request
        )
        if answer is None:
            return {}
        return {
            field: place.value * unit
            for place, (field, unit) in zip(request.metrics, self._metrics.values(), strict=False)
            if place.nvmlReturn == pynvml.NVML_SUCCESS and place.value >= 0
        }
