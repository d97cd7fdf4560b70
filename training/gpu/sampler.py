"""Sampler that reads every GPU once a second in its own thread. Its readers never wait.

A driver call that hangs blocks only that thread. Readers detect this by the age of the pending call
and report that the driver does not answer. The thread is a daemon, so that the process can exit
while the driver hangs.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain
from typing import Any

import pynvml
from msgspec.structs import replace

from ltui.training.gpu.nvml_device import (
    DriverGoneError,
    GpuLostError,
    NvmlClient,
    NvmlDevice,
    PendingCall,
    ProcessInfoCache,
)
from ltui.training.gpu.reading import NO_DRIVER, NO_GPU, NOT_READ_YET, GpuReading, GpuView, Xid
from ltui.training.gpu.whole_gpu import Device, MigDevice, open_mig_devices

CALL_TIMEOUT_S = 2.0
"""Age in seconds from which a driver call is reported as hanging."""
OPEN_TIMEOUT_S = 10.0
"""Age in seconds for the call that opens the driver. With many GPUs it takes seconds."""
REOPEN_DELAY_S = 15.0
"""Seconds to wait before a driver that failed is opened again."""
RESCAN_PERIOD_S = 30.0
"""Seconds between two searches for new MIG devices and for GPUs that could not be opened."""
MAX_QUEUED_XIDS = 256
"""Maximum number of XID errors kept until ``take_xids``."""
OPENING = "Init"
_NO_EVENTS = frozenset({pynvml.NVML_ERROR_TIMEOUT, pynvml.NVML_ERROR_GPU_IS_LOST})


class GpuSampler:
    """Samples all GPUs from construction until ``stop``."""

    def __init__(self, *, period_s: float = 1.0, slow_every: int = 5) -> None:
        """``slow_every``: number of samples between two readings of slowly changing values."""
        assert period_s > 0
        assert slow_every > 0
        self._period_s, self._slow_every = period_s, slow_every
        self._client, self._process_cache = NvmlClient(), ProcessInfoCache()
        self._latest: dict[int, GpuReading] = {}
        self._note: str | None = NOT_READ_YET
        self._complete = False
        self._xids: deque[Xid] = deque(maxlen=MAX_QUEUED_XIDS)
        self._last_xid: dict[int, Xid] = {}
        self._devices: list[Device] = []
        self._without_handle: set[int] = set()
        self._mig_devices: dict[int, list[MigDevice]] = {}
        self._events: Any = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu sampler", daemon=True)
        self._thread.start()

    # -- for readers ------------------------------------------------------------------------------

    def latest(self) -> GpuView:
        """Return the latest readings without waiting."""
        complete = self._complete  # Read it before the readings: a round may end in between.
        readings = tuple(sorted(self._latest.copy().values(), key=lambda r: r.index))
        call = self._client.pending_call
        age_s = 0.0 if call is None else time.monotonic() - call.began
        if call is None or age_s < (OPEN_TIMEOUT_S if call.call == OPENING else CALL_TIMEOUT_S):
            return GpuView(readings=readings, note=self._note, complete=complete)
        return GpuView(
            readings=tuple(_mark_unanswered(reading, call, age_s) for reading in readings),
            note=f"driver has not answered for {age_s:.0f} s ({_call_text(call)})",
            not_answering_s=age_s,
            complete=complete,
        )

    def take_xids(self) -> tuple[Xid, ...]:
        """Return the XID errors since the last call, oldest first."""
        taken = []
        while self._xids:
            taken.append(self._xids.popleft())
        return tuple(taken)

    def stop(self, wait_s: float = 0.0) -> bool:
        """Stop sampling. Return True if the thread has ended within ``wait_s`` seconds."""
        self._stopping.set()
        if wait_s > 0:
            self._thread.join(wait_s)
        return not self._thread.is_alive()

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._open()
                self._sample_until_stopped()
            except DriverGoneError as error:
                self._note = f"the NVIDIA driver is no longer available: {error}"
            except pynvml.NVMLError as error:
                self._note = _cannot_open(error)
                if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
                    return
            except Exception as error:  # noqa: BLE001 - top of a thread; the error becomes the note
                self._note = f"GPU readings failed: {type(error).__name__}: {error}"
            finally:
                self._release()
            self._stopping.wait(REOPEN_DELAY_S)

    def _open(self) -> None:
        self._client.call(OPENING, None, pynvml.nvmlInit)
        count = self._client.call("DeviceGetCount", None, pynvml.nvmlDeviceGetCount)
        self._events = None
        with suppress(pynvml.NVMLError):
            self._events = self._client.call("EventSetCreate", None, pynvml.nvmlEventSetCreate)
        self._latest, self._complete = {}, False
        self._without_handle = set(range(count))
        self._add_devices()
        self._note = None if count else NO_GPU

    def _add_devices(self) -> None:
        """Open the GPUs for which the driver has not returned a handle yet."""
        get_handle = pynvml.nvmlDeviceGetHandleByIndex
        for index in sorted(self._without_handle):
            try:
                handle = self._client.call("DeviceGetHandleByIndex", str(index), get_handle, index)
            except pynvml.NVMLError as error:
                reason = f"the driver can't open this GPU: {error}"
                if error.value == pynvml.NVML_ERROR_GPU_IS_LOST:
                    reason = "the driver lost this GPU"
                self._publish([GpuReading(index=index, label=str(index), error=reason)])
                continue
            device = Device(self._client, self._process_cache, handle, index)
            self._without_handle.remove(index)
            self._devices.append(device)
            self._register_events(device)

    def _release(self) -> None:
        """Free all resources of the driver. Every call may fail, because the driver may be gone."""
        devices = chain[NvmlDevice](self._devices, *self._mig_devices.values())
        self._devices, self._mig_devices = [], {}
        closers: list[Any] = [device.close for device in devices]
        if self._events is not None:
            events, self._events = self._events, None
            closers.append(lambda: pynvml.nvmlEventSetFree(events))
        for close in [*closers, pynvml.nvmlShutdown]:
            with suppress(pynvml.NVMLError):
                self._client.call("close", None, close)

    def _sample_until_stopped(self) -> None:
        opened: set[int] = set()
        tick, next_s, next_rescan_s = 0, time.monotonic(), 0.0
        while not self._stopping.is_set():
            self._take_events()
            rescan = time.monotonic() >= next_rescan_s
            if rescan:
                next_rescan_s = time.monotonic() + RESCAN_PERIOD_S
                self._add_devices()
            for device in self._devices:
                if self._stopping.is_set():
                    return
                self._publish(self._read(device, tick, opened, rescan))
            self._complete = True
            self._process_cache.retain_only(
                {p.pid for r in self._latest.copy().values() for p in r.processes or ()}
            )
            tick += 1
            # After a slow sample the schedule is not caught up: the next sample is a period later.
            next_s = max(next_s + self._period_s, time.monotonic())
            self._stopping.wait(next_s - time.monotonic())

    def _read(
        self, device: Device, tick: int, opened: set[int], rescan: bool
    ) -> Iterable[GpuReading]:
        """Return the readings of a GPU and its MIG devices.

        The GPUs take turns in reading their slowly changing values.
        """
        mig_devices = self._mig_devices.get(device.index, [])
        slow = tick == 0 or tick % self._slow_every == device.index % self._slow_every
        try:
            if device.index not in opened:
                device.open()
                opened.add(device.index)
                slow = True
            if rescan:
                mig_devices = self._refresh_mig_devices(device)
            reading = device.read(slow=slow, throughput=tick > 0)
            return [reading, *(part.read() for part in mig_devices)]
        except GpuLostError as error:
            return [
                device.error_reading(str(error)),
                *(part.error_reading(str(error)) for part in mig_devices),
            ]

    def _refresh_mig_devices(self, device: Device) -> list[MigDevice]:
        device.refresh_mig_mode()
        before = self._mig_devices.get(device.index, [])
        if not device.mig_enabled and not before:
            return before
        current = open_mig_devices(device) if device.mig_enabled else []
        if [part.key for part in current] == [part.key for part in before]:
            current, before = before, current
        for mig_device in before:
            mig_device.close()
            if mig_device.index not in {part.index for part in current}:
                self._latest.pop(mig_device.index, None)
        self._mig_devices[device.index] = current
        return current

    def _publish(self, readings: Iterable[GpuReading]) -> None:
        for reading in readings:
            xid = self._last_xid.get(reading.index)
            self._latest[reading.index] = replace(reading, last_xid=xid) if xid else reading

    # -- XID errors --------------------------------------------------------------------------------

    def _register_events(self, device: Device) -> None:
        if self._events is None:
            return
        # Refused, for example in a virtual machine. XID errors are then not reported.
        with suppress(pynvml.NVMLError):
            self._client.call(
                "DeviceRegisterEvents",
                device.label,
                pynvml.nvmlDeviceRegisterEvents,
                device.handle,
                pynvml.nvmlEventTypeXidCriticalError,
                self._events,
            )

    def _take_events(self) -> None:
        for _ in range(MAX_QUEUED_XIDS):
            if self._events is None:
                return
            try:
                event = self._client.call(
                    "EventSetWait", None, pynvml.nvmlEventSetWait, self._events, 0
                )
            except pynvml.NVMLError as error:
                if error.value not in _NO_EVENTS:
                    self._events = None
                return
            if event.eventType == pynvml.nvmlEventTypeXidCriticalError:
                self._record_xid(event)

    def _record_xid(self, event: Any) -> None:
        device = self._device_of(event.device)
        if device is None:
            return
        target: NvmlDevice = device
        for mig_device in self._mig_devices.get(device.index, []):
            if mig_device.fixed.get("gpu_instance") == event.gpuInstanceId:
                target = mig_device
        xid = Xid(
            at=time.time(),
            code=int(event.eventData),
            index=target.index,
            uuid=target.fixed.get("uuid"),
        )
        self._xids.append(xid)
        self._last_xid[target.index] = xid

    def _device_of(self, handle: Any) -> Device | None:
        """Return the GPU with the address of ``handle``: the driver has one handle per GPU."""
        address = _address(handle)
        return next((d for d in self._devices if _address(d.handle) == address), None)


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def _call_text(call: PendingCall) -> str:
    return f"{call.call}, GPU {call.gpu}" if call.gpu is not None else call.call


def _mark_unanswered(reading: GpuReading, call: PendingCall, age_s: float) -> GpuReading:
    """Return the last reading with an error, because the pending call blocks new readings."""
    if call.gpu in (None, reading.label):
        return replace(reading, error=f"driver has not answered for {age_s:.0f} s")
    error = f"not read for {age_s:.0f} s: driver call for GPU {call.gpu} hangs"
    return replace(reading, error=error, blocked=True)


def _cannot_open(error: pynvml.NVMLError) -> str:
    if error.value in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED):
        return NO_DRIVER
    if error.value == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return "the NVIDIA driver was updated; the machine must be restarted"
    return f"the NVIDIA driver can't be opened: {error}"
