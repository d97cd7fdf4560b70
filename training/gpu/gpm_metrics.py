"""GPM, the GPU performance monitoring of Hopper and newer: activity between two samples."""

from __future__ import annotations

import time
from typing import Any

import pynvml

from ltui.training.gpu.nvml_client import DeviceClient

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
        name, function, arguments = "GpmSampleGet", pynvml.nvmlGpmSampleGet, [self._handle, sample]
        if self._mig_instance is not None:
            name, function = "GpmMigSampleGet", pynvml.nvmlGpmMigSampleGet
            arguments.insert(1, self._mig_instance)
        return self._client.query(name, function, *arguments) is not None

    def _metrics_between(self, before: Any, after: Any) -> dict[str, float]:
        request = pynvml.c_nvmlGpmMetricsGet_t()
        request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(self._metrics)
        request.sample1, request.sample2 = before, after
        for entry, metric in zip(request.metrics, self._metrics, strict=False):
            entry.metricId = metric
        answer = self._client.query("GpmMetricsGet", pynvml.nvmlGpmMetricsGet, request)
        if answer is None:
            return {}
        return {
            field: entry.value * unit
            for entry, (field, unit) in zip(request.metrics, self._metrics.values(), strict=False)
            if entry.nvmlReturn == pynvml.NVML_SUCCESS and entry.value >= 0
        }
