"""A complete GPU: the queries of its readings, and the values kept between them.

Cheap values are read at every sample. Counters and states that change slowly are read at ``slow``
samples and reused in between. The same holds for PCIe throughput, for which the driver measures
20 ms per direction.
"""

from __future__ import annotations

import time
from typing import Any

import pynvml

from ltui.training.gpu.nvml_device import DeviceClient, NvmlClient, NvmlDevice, ProcessInfoCache
from ltui.training.gpu.reading import GpuReading, mig_index, reason_names

ALL_LINKS = 0xFFFFFFFF
MAX_NVLINKS = 18
"""Largest number of NVLinks of any GPU so far. The driver refuses queries for absent links."""
KIB = 1024.0

_FIELD_VALUE = {
    pynvml.NVML_VALUE_TYPE_DOUBLE: "dVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
    5: "siVal",
}
_SLOWDOWN_MARGIN_FIELD = 194
# Early releases of the bindings do not have this constant, nor the function read by getattr below.
_NVLINK_ERRORS = (
    pynvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
    pynvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL,
    pynvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL,
)
_NVLINK_BYTES = {
    (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, ALL_LINKS): "nvlink_tx_bytes_per_s",
    (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, ALL_LINKS): "nvlink_rx_bytes_per_s",
}
_SLOW_FIELDS: tuple[int | tuple[int, int], ...] = (
    *_NVLINK_ERRORS,
    *_NVLINK_BYTES,
    pynvml.NVML_FI_DEV_RETIRED_SBE,
    pynvml.NVML_FI_DEV_RETIRED_DBE,
    pynvml.NVML_FI_DEV_RETIRED_PENDING,
    pynvml.NVML_FI_DEV_REMAPPED_COR,
    pynvml.NVML_FI_DEV_REMAPPED_UNC,
    pynvml.NVML_FI_DEV_REMAPPED_PENDING,
    pynvml.NVML_FI_DEV_REMAPPED_FAILURE,
)
_ECC = {
    "ecc_corrected": (pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_VOLATILE_ECC),
    "ecc_uncorrected": (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC),
}


class Device(NvmlDevice):
    """A complete GPU."""

    def __init__(
        self, client: NvmlClient, process_cache: ProcessInfoCache, handle: Any, index: int
    ) -> None:
        super().__init__(client, process_cache, handle, index, str(index))
        self._slow_values: dict[str, Any] = {}
        self._counters: tuple[float, dict[str, float]] | None = None
        self.mig_enabled = False

    def open(self) -> None:
        """Read the values that do not change while the driver is loaded."""
        query = self._query
        self.fixed = {
            "uuid": _decode_text(query(pynvml.nvmlDeviceGetUUID)),
            "name": _decode_text(query(pynvml.nvmlDeviceGetName)),
            "sm_clock_max_mhz": query(pynvml.nvmlDeviceGetMaxClockInfo, pynvml.NVML_CLOCK_SM),
            "pcie_generation_max": query(pynvml.nvmlDeviceGetMaxPcieLinkGeneration),
            "pcie_width_max": query(pynvml.nvmlDeviceGetMaxPcieLinkWidth),
            "slowdown_temperature_c": self._slowdown_temperature(),
        }
        self.refresh_mig_mode()
        self._open_gpm(self.handle)

    def refresh_mig_mode(self) -> None:
        """Read whether MIG is enabled."""
        mode = self._query(pynvml.nvmlDeviceGetMigMode)
        self.mig_enabled = mode is not None and mode[0] == 1

    def read(self, *, slow: bool, throughput: bool) -> GpuReading:
        """Return a new reading.

        ``slow`` refreshes the values that are otherwise reused; ``throughput`` includes the PCIe
        throughput in them.
        """
        values = {**self.fixed, **self._read_fast()}
        if slow:
            self._slow_values.update(self._read_slow())
        values.update(self._slow_values)
        values.update(self._read_gpm())
        if slow and throughput and "pcie_tx_bytes_per_s" not in values:
            self._slow_values.update(self._pcie_throughput())
            values.update(self._slow_values)
        return self._reading(mig_enabled=self.mig_enabled, **values)

    # -- queries -----------------------------------------------------------------------------------

    def _fields(self, name: str, fields: tuple[int | tuple[int, int], ...]) -> dict[Any, float]:
        """Return the field values that the driver provides."""
        answers = self._query(pynvml.nvmlDeviceGetFieldValues, list(fields), name=name)
        return {
            field: getattr(answer.value, _FIELD_VALUE[answer.valueType])
            for field, answer in zip(fields, answers or (), strict=False)
            if answer.nvmlReturn == pynvml.NVML_SUCCESS and answer.valueType in _FIELD_VALUE
        }

    def _read_fast(self) -> dict[str, Any]:
        query = self._query
        utilisation = query(pynvml.nvmlDeviceGetUtilizationRates)
        power = query(pynvml.nvmlDeviceGetPowerUsage)
        mask = query(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons)
        state = query(pynvml.nvmlDeviceGetPerformanceState)
        fields = self._fields("MemoryTemperature", (pynvml.NVML_FI_DEV_MEMORY_TEMP,))
        return {
            "utilisation_percent": None if utilisation is None else float(utilisation.gpu),
            "memory_utilisation_percent": None
            if utilisation is None
            else float(utilisation.memory),
            **self._memory(),
            "power_w": _from_milli(power),
            "temperature_c": query(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU),
            # Boards without the sensor may return 0 instead of refusing the query.
            "memory_temperature_c": fields.get(pynvml.NVML_FI_DEV_MEMORY_TEMP) or None,
            "sm_clock_mhz": query(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM),
            "memory_clock_mhz": query(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_MEM),
            "throttle_reasons": None if mask is None else reason_names(mask),
            "performance_state": state if state is not None and 0 <= state <= 15 else None,
        }

    def _read_slow(self) -> dict[str, Any]:
        query = self._query
        limit = query(pynvml.nvmlDeviceGetEnforcedPowerLimit)
        return {
            "power_limit_w": _from_milli(limit),
            "fan_percent": query(pynvml.nvmlDeviceGetFanSpeed),
            "pcie_generation": query(pynvml.nvmlDeviceGetCurrPcieLinkGeneration),
            "pcie_width": query(pynvml.nvmlDeviceGetCurrPcieLinkWidth),
            **{
                field: query(pynvml.nvmlDeviceGetTotalEccErrors, *which)
                for field, which in _ECC.items()
            },
            **self._read_counters(),
            **self._read_nvlinks(),
        }

    def _read_counters(self) -> dict[str, Any]:
        """Return the NVLink counters and the memory repairs, which one driver call provides."""
        values = self._fields("SlowFields", _SLOW_FIELDS)
        now_s = time.monotonic()
        errors = [values[field] for field in _NVLINK_ERRORS if field in values]
        retired = _sum(values, pynvml.NVML_FI_DEV_RETIRED_SBE, pynvml.NVML_FI_DEV_RETIRED_DBE)
        remapped = _sum(values, pynvml.NVML_FI_DEV_REMAPPED_COR, pynvml.NVML_FI_DEV_REMAPPED_UNC)
        pending = _sum(
            values, pynvml.NVML_FI_DEV_RETIRED_PENDING, pynvml.NVML_FI_DEV_REMAPPED_PENDING
        )
        failed = values.get(pynvml.NVML_FI_DEV_REMAPPED_FAILURE)
        counters = {
            name: values[field] * KIB for field, name in _NVLINK_BYTES.items() if field in values
        }
        rates = _rates(self._counters, now_s, counters)
        self._counters = (now_s, counters)
        return {
            "nvlink_errors": int(sum(errors)) if errors else None,
            "retired_pages": retired,
            "remapped_rows": remapped,
            "repair_pending": None if pending is None else pending > 0,
            "repair_failed": None if failed is None else failed > 0,
            **rates,
        }

    def _read_nvlinks(self) -> dict[str, int | None]:
        """Return the number of NVLinks and of active ones.

        Links that a board does not have are refused, also between links that it has.
        """
        answers = [
            self._query(pynvml.nvmlDeviceGetNvLinkState, link) for link in range(MAX_NVLINKS)
        ]
        states = [up for up in answers if up is not None]
        return {"nvlinks": len(states) or None, "nvlinks_up": sum(states) if states else None}

    def _pcie_throughput(self) -> dict[str, float | None]:
        query, throughput = self._query, pynvml.nvmlDeviceGetPcieThroughput
        sent = query(throughput, pynvml.NVML_PCIE_UTIL_TX_BYTES)
        received = query(throughput, pynvml.NVML_PCIE_UTIL_RX_BYTES)
        return {
            "pcie_tx_bytes_per_s": None if sent is None else sent * 1000.0,
            "pcie_rx_bytes_per_s": None if received is None else received * 1000.0,
        }

    def _slowdown_temperature(self) -> float | None:
        """Return the temperature at which the driver slows the GPU down, in °C.

        Older boards report this temperature. Newer ones report the remaining margin in degrees and
        the margin at which the slowdown begins.
        """
        query = self._query
        threshold = query(
            pynvml.nvmlDeviceGetTemperatureThreshold, pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
        )
        if threshold:
            return float(threshold)
        temperature = query(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU)
        function = getattr(pynvml, "nvmlDeviceGetMarginTemperature", None)
        margin = function and query(function)
        fields = self._fields("SlowdownMargin", (_SLOWDOWN_MARGIN_FIELD,))
        slowdown_margin = fields.get(_SLOWDOWN_MARGIN_FIELD)
        if temperature is None or margin is None or slowdown_margin is None:
            return None
        return float(temperature + margin - slowdown_margin)


def _decode_text(value: Any) -> str | None:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _from_milli(value: int | None) -> float | None:
    return None if value is None else value / 1000.0


def _sum(values: dict[Any, float], *fields: int) -> int | None:
    """Return the sum of the fields that are present; None if there are none."""
    present = [values[field] for field in fields if field in values]
    return int(sum(present)) if present else None


def _rates(
    previous: tuple[float, dict[str, float]] | None, now_s: float, counters: dict[str, float]
) -> dict[str, float]:
    """Return the growth of each counter per second.

    The first sample has no rates, and a counter that was reset has none.
    """
    if previous is None or now_s <= previous[0]:
        return {}
    previous_s, earlier = previous
    return {
        name: (count - earlier[name]) / (now_s - previous_s)
        for name, count in counters.items()
        if name in earlier and count >= earlier[name]
    }


class MigDevice(NvmlDevice):
    """A MIG device. It has its own memory, processes and GPM metrics.

    Power, temperature and clocks exist only for the complete GPU.
    """

    def __init__(self, parent: Device, handle: Any, number: int) -> None:
        index, label = mig_index(parent.index, number), f"{parent.index}/{number}"
        super().__init__(parent.nvml, parent.process_cache, handle, index, label)
        instance = self._query(pynvml.nvmlDeviceGetGpuInstanceId)
        self.fixed = {
            "uuid": self._query(pynvml.nvmlDeviceGetUUID),
            "name": self._query(pynvml.nvmlDeviceGetName),
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


def open_mig_devices(parent: Device) -> list[MigDevice]:
    """Open and return the current MIG devices of a GPU."""
    # A new client, because it has not remembered which devices were refused before.
    parent_client = DeviceClient(parent.nvml, parent.label)
    max_devices = parent_client.query(pynvml.nvmlDeviceGetMaxMigDeviceCount, parent.handle)
    handles = [
        parent_client.query(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, parent.handle, number)
        for number in range(max_devices or 0)
    ]
    return [
        MigDevice(parent, handle, number)
        for number, handle in enumerate(handles)
        if handle is not None
    ]
