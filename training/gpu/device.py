"""One GPU as the driver offers it: its handle, kept between samples, and each reading's question.

Cheap readings are taken at every sample. Counters and states that change slowly, and PCIe
throughput, for which the driver measures 20 ms a direction, are taken at ``slow`` samples and held.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import pynvml

from ltui.training.gpu import gpm_metrics, throttle_reasons
from ltui.training.gpu.gpu_processes import ProcessInfoCache
from ltui.training.gpu.nvml_client import NvmlClient, UnsupportedCalls
from ltui.training.gpu.reading import GpuProcess, GpuReading

T = TypeVar("T")

NO_INSTANCE = 0xFFFFFFFF
ALL_LINKS = 0xFFFFFFFF
MAX_NVLINKS = 18
"""Of any GPU so far; asking for a link that isn't there is refused."""
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
# Named by number, and asked for by getattr below, because early releases of the bindings lack them.
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
    "ecc_corrected_ever": (pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_AGGREGATE_ECC),
    "ecc_uncorrected_ever": (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_AGGREGATE_ECC),
}


class Device:
    """A whole GPU. Methods that ask may raise ``GpuLostError`` and ``DriverGoneError``."""

    def __init__(
        self, client: NvmlClient, process_cache: ProcessInfoCache, handle: Any, index: int
    ) -> None:
        self.handle, self.index, self.label = handle, index, str(index)
        self._client, self._process_cache = client, process_cache
        self._unsupported = UnsupportedCalls()
        self.fixed: dict[str, Any] = {}
        self._held: dict[str, Any] = {}
        self._counters: tuple[float, dict[str, float]] | None = None
        self._gpm: gpm_metrics.GpmSampler | None = None
        self.mig_enabled = False

    def open(self) -> None:
        """What does not change while the driver runs."""
        ask = self._ask
        self.fixed = {
            "uuid": _text(ask("DeviceGetUUID", pynvml.nvmlDeviceGetUUID)),
            "name": _text(ask("DeviceGetName", pynvml.nvmlDeviceGetName)),
            "sm_clock_max_mhz": ask(
                "DeviceGetMaxClockInfo", pynvml.nvmlDeviceGetMaxClockInfo, pynvml.NVML_CLOCK_SM
            ),
            "pcie_generation_max": ask(
                "MaxPcieLinkGeneration", pynvml.nvmlDeviceGetMaxPcieLinkGeneration
            ),
            "pcie_width_max": ask("MaxPcieLinkWidth", pynvml.nvmlDeviceGetMaxPcieLinkWidth),
            "slowdown_temperature_c": self._slowdown_temperature(),
        }
        self.refresh_mig_mode()
        if gpm_metrics.gpm_supported(self._client, self._unsupported, self.label, self.handle):
            self._gpm = gpm_metrics.GpmSampler(
                self._client, self._unsupported, self.label, self.handle
            )

    def refresh_mig_mode(self) -> None:
        mode = self._ask("DeviceGetMigMode", pynvml.nvmlDeviceGetMigMode)
        self.mig_enabled = mode is not None and mode[0] == 1

    def close(self) -> None:
        if self._gpm is not None:
            self._gpm.close()
            self._gpm = None

    def read(self, *, slow: bool, throughput: bool) -> GpuReading:
        """A reading now. ``slow`` renews the held values; ``throughput`` asks for PCIe's too."""
        values = {**self.fixed, **self._fast()}
        if slow:
            self._held.update(self._slow())
        values.update(self._held)
        if self._gpm is not None:
            values.update(self._gpm.read())
        if slow and throughput and "pcie_tx_bytes_per_s" not in values:
            self._held.update(self._pcie_throughput())
            values.update(self._held)
        return GpuReading(
            index=self.index,
            label=self.label,
            mig_enabled=self.mig_enabled,
            sampled_at=time.time(),
            processes=running(self._ask, self._process_cache),
            **values,
        )

    def lost(self, error: str) -> GpuReading:
        """The reading of a GPU that answers nothing: what it is, and why."""
        return GpuReading(
            index=self.index, label=self.label, error=error, sampled_at=time.time(), **self.fixed
        )

    # -- asking ------------------------------------------------------------------------------------

    def _ask(self, name: str, function: Callable[..., T], *arguments: Any) -> T | None:
        return self._client.ask(
            self._unsupported, self.label, name, function, self.handle, *arguments
        )

    def _fields(self, name: str, fields: tuple[int | tuple[int, int], ...]) -> dict[Any, float]:
        """Those of the field values that the driver gives."""
        answers = self._ask(name, pynvml.nvmlDeviceGetFieldValues, list(fields))
        return {
            field: getattr(answer.value, _FIELD_VALUE[answer.valueType])
            for field, answer in zip(fields, answers or (), strict=False)
            if answer.nvmlReturn == pynvml.NVML_SUCCESS and answer.valueType in _FIELD_VALUE
        }

    def _fast(self) -> dict[str, Any]:
        ask = self._ask
        use = ask("DeviceGetUtilizationRates", pynvml.nvmlDeviceGetUtilizationRates)
        power = ask("DeviceGetPowerUsage", pynvml.nvmlDeviceGetPowerUsage)
        mask = ask("ClocksEventReasons", pynvml.nvmlDeviceGetCurrentClocksThrottleReasons)
        state = ask("DeviceGetPerformanceState", pynvml.nvmlDeviceGetPerformanceState)
        heat = self._fields("MemoryTemperature", (pynvml.NVML_FI_DEV_MEMORY_TEMP,))
        return {
            "utilisation_percent": None if use is None else float(use.gpu),
            "memory_utilisation_percent": None if use is None else float(use.memory),
            **memory(ask),
            "power_w": _thousandth(power),
            "temperature_c": ask(
                "DeviceGetTemperature", pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU
            ),
            # Boards without the sensor may say 0 instead of refusing.
            "memory_temperature_c": heat.get(pynvml.NVML_FI_DEV_MEMORY_TEMP) or None,
            "sm_clock_mhz": ask("ClockSm", pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM),
            "memory_clock_mhz": ask(
                "ClockMem", pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_MEM
            ),
            "throttle_reasons": None if mask is None else throttle_reasons.reasons(mask),
            "performance_state": state if state is not None and 0 <= state <= 15 else None,
        }

    def _slow(self) -> dict[str, Any]:
        ask = self._ask
        limit = ask("EnforcedPowerLimit", pynvml.nvmlDeviceGetEnforcedPowerLimit)
        return {
            "power_limit_w": _thousandth(limit),
            "fan_percent": ask("DeviceGetFanSpeed", pynvml.nvmlDeviceGetFanSpeed),
            "pcie_generation": ask("PcieGeneration", pynvml.nvmlDeviceGetCurrPcieLinkGeneration),
            "pcie_width": ask("PcieWidth", pynvml.nvmlDeviceGetCurrPcieLinkWidth),
            **{
                field: ask(field, pynvml.nvmlDeviceGetTotalEccErrors, *which)
                for field, which in _ECC.items()
            },
            **self._counted(),
            **self._links(),
        }

    def _counted(self) -> dict[str, Any]:
        """NVLink's counters and the memory's repairs, which the driver gives in one call."""
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
            place: values[field] * KIB for field, place in _NVLINK_BYTES.items() if field in values
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

    def _links(self) -> dict[str, int | None]:
        """How many NVLinks there are and how many are up. One refusal ends the count."""
        states: list[int] = []
        for link in range(MAX_NVLINKS):
            up = self._ask(f"NvLinkState{link}", pynvml.nvmlDeviceGetNvLinkState, link)
            if up is None:
                break
            states.append(up)
        return {"nvlinks": len(states) or None, "nvlinks_up": sum(states) if states else None}

    def _pcie_throughput(self) -> dict[str, float | None]:
        ask, throughput = self._ask, pynvml.nvmlDeviceGetPcieThroughput
        sent = ask("PcieThroughputTx", throughput, pynvml.NVML_PCIE_UTIL_TX_BYTES)
        received = ask("PcieThroughputRx", throughput, pynvml.NVML_PCIE_UTIL_RX_BYTES)
        return {
            "pcie_tx_bytes_per_s": None if sent is None else sent * 1000.0,
            "pcie_rx_bytes_per_s": None if received is None else received * 1000.0,
        }

    def _slowdown_temperature(self) -> float | None:
        """Where the driver slows the GPU down for heat.

        Older boards name the temperature; newer ones tell how many degrees are left, and at how
        many the slowdown begins.
        """
        ask = self._ask
        direct = ask(
            "SlowdownThreshold",
            pynvml.nvmlDeviceGetTemperatureThreshold,
            pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN,
        )
        if direct:
            return float(direct)
        now = ask("Temperature", pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU)
        left = getattr(pynvml, "nvmlDeviceGetMarginTemperature", None)
        margin = left and ask("MarginTemperature", left)
        at = self._fields("SlowdownMargin", (_SLOWDOWN_MARGIN_FIELD,))
        limit = at.get(_SLOWDOWN_MARGIN_FIELD)
        if now is None or margin is None or limit is None:
            return None
        return float(now + margin - limit)


# -- what whole GPUs and slices are asked alike ----------------------------------------------------

Ask = Callable[..., Any]


def memory(ask: Ask) -> dict[str, Any]:
    """Used and total bytes. The newer call leaves out what the driver keeps for itself."""
    answer = ask("MemoryInfo2", pynvml.nvmlDeviceGetMemoryInfo, pynvml.nvmlMemory_v2)
    if answer is None:
        answer = ask("MemoryInfo", pynvml.nvmlDeviceGetMemoryInfo)
    if answer is None:
        return {}
    return {"memory_used_bytes": int(answer.used), "memory_total_bytes": int(answer.total)}


def running(ask: Ask, process_cache: ProcessInfoCache) -> tuple[GpuProcess, ...] | None:
    """The processes on a GPU or slice; None where the driver does not tell."""
    found: dict[int, GpuProcess] = {}
    compute = ask("ComputeProcesses", pynvml.nvmlDeviceGetComputeRunningProcesses)
    graphics = ask("GraphicsProcesses", pynvml.nvmlDeviceGetGraphicsRunningProcesses)
    if compute is None and graphics is None:
        return None
    for drawing, listed in ((True, graphics), (False, compute)):
        for process in listed or ():
            instance = process.gpuInstanceId
            found[process.pid] = process_cache.describe(
                process.pid,
                process.usedGpuMemory,
                graphics=drawing,
                gpu_instance=None if instance == NO_INSTANCE else instance,
            )
    return tuple(found[pid] for pid in sorted(found))


def _text(value: Any) -> str | None:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _thousandth(value: int | None) -> float | None:
    return None if value is None else value / 1000.0


def _sum(values: dict[Any, float], *fields: int) -> int | None:
    """Of those given; None where none is."""
    given = [values[field] for field in fields if field in values]
    return int(sum(given)) if given else None


def _rates(
    before: tuple[float, dict[str, float]] | None, now_s: float, counters: dict[str, float]
) -> dict[str, float]:
    """Growth per second; nothing at first, and nothing where a counter began anew."""
    if before is None or now_s <= before[0]:
        return {}
    then_s, earlier = before
    return {
        place: (count - earlier[place]) / (now_s - then_s)
        for place, count in counters.items()
        if place in earlier and count >= earlier[place]
    }
