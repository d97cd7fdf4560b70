"""Reads every GPU once a second in a thread of its own; whoever asks for the newest never waits.

A driver call that hangs holds up that thread alone. The asker sees from the age of the call in
flight that the driver does not answer, and says so. The thread is a daemon: a process can end while
its driver hangs.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import pynvml

from ltui.training.gpu.device import Device
from ltui.training.gpu.gpu_processes import ProcessInfoCache
from ltui.training.gpu.mig_device import MigDevice, open_mig_devices
from ltui.training.gpu.nvml_client import DriverGoneError, GpuLostError, NvmlClient, PendingCall
from ltui.training.gpu.reading import BLOCKED_PREFIX, GpuReading, Xid

CALL_TIMEOUT_S = 2.0
"""A driver call older than this is said to hang."""
OPEN_TIMEOUT_S = 10.0
"""The same for opening the driver, which takes seconds on machines with many GPUs."""
REOPEN_DELAY_S = 15.0
"""Pause before a driver that could not be opened, or has gone, is opened again."""
RESCAN_PERIOD_S = 30.0
"""From one look for new MIG slices, and for GPUs that were refused, to the next."""
MAX_QUEUED_XIDS = 256
OPENING = "Init"
NOT_READ_YET = "GPUs not read yet"
NO_DRIVER = "no NVIDIA driver on this machine"
NO_GPU = "the NVIDIA driver shows no GPU"
_NO_EVENTS = frozenset({pynvml.NVML_ERROR_TIMEOUT, pynvml.NVML_ERROR_GPU_IS_LOST})


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuView:
    """What is known of the GPUs at the moment of asking."""

    readings: tuple[GpuReading, ...] = ()
    """By index; MIG slices after whole GPUs. Those of a driver that hangs carry it as ``error``."""
    note: str | None = None
    """Why there are no readings, or why they are old."""
    not_answering_s: float | None = None
    """How long the driver has not come back from a call."""
    complete: bool = True
    """False while the first round is under way: GPUs not read yet are missing from ``readings``."""


class GpuSampler:
    """Samples from construction until ``stop``."""

    def __init__(self, *, period_s: float = 1.0, slow_every: int = 5) -> None:
        """``slow_every``: samples from one reading of what changes slowly to the next."""
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

    # -- for the owner -----------------------------------------------------------------------------

    def latest(self) -> GpuView:
        """The newest readings, at once."""
        complete = self._complete  # Before the readings: a round may end in between.
        readings = tuple(sorted(self._latest.copy().values(), key=lambda r: r.index))
        call = self._client.pending_call
        age_s = 0.0 if call is None else time.monotonic() - call.began
        if call is None or age_s < (OPEN_TIMEOUT_S if call.call == OPENING else CALL_TIMEOUT_S):
            return GpuView(readings=readings, note=self._note, complete=complete)
        return GpuView(
            readings=tuple(_not_answering(reading, call, age_s) for reading in readings),
            note=f"driver not answering since {age_s:.0f} s ({_place(call)})",
            not_answering_s=age_s,
            complete=complete,
        )

    def take_xids(self) -> tuple[Xid, ...]:
        """The XID errors since this was last asked, oldest first."""
        taken = []
        while self._xids:
            taken.append(self._xids.popleft())
        return tuple(taken)

    def stop(self, wait_s: float = 0.0) -> bool:
        """Ends the sampling; true if the thread has ended within ``wait_s``."""
        self._stopping.set()
        if wait_s > 0:
            self._thread.join(wait_s)
        return not self._thread.is_alive()

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._open()
                self._sample_on()
            except DriverGoneError as error:
                self._note = f"the NVIDIA driver has gone: {error}"
            except pynvml.NVMLError as error:
                self._note = _cannot_open(error)
                if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
                    return
            except Exception as error:  # noqa: BLE001 - top of a thread; becomes the note
                self._note = f"GPU readings failed: {type(error).__name__}: {error}"
            finally:
                self._close()
            self._stopping.wait(REOPEN_DELAY_S)

    def _open(self) -> None:
        self._client.call(OPENING, None, pynvml.nvmlInit)
        count = self._client.call("DeviceGetCount", None, pynvml.nvmlDeviceGetCount)
        self._events = self._new_event_set()
        self._latest, self._complete = {}, False
        self._without_handle = set(range(count))
        self._add_devices()
        self._note = None if count else NO_GPU

    def _add_devices(self) -> None:
        """Those that the driver has not given a handle of yet."""
        for index in sorted(self._without_handle):
            self._add_device(index)

    def _add_device(self, index: int) -> None:
        find = pynvml.nvmlDeviceGetHandleByIndex
        try:
            handle = self._client.call("DeviceGetHandleByIndex", str(index), find, index)
        except pynvml.NVMLError as error:
            lost = error.value == pynvml.NVML_ERROR_GPU_IS_LOST
            why = "the driver lost this GPU" if lost else f"the driver can't open this GPU: {error}"
            self._publish([GpuReading(index=index, label=str(index), error=why)])
            return
        device = Device(self._client, self._process_cache, handle, index)
        self._without_handle.remove(index)
        self._devices.append(device)
        self._listen(device)

    def _close(self) -> None:
        """Gives back what the driver holds for us. Every call may fail: the driver may be gone."""
        parts: list[Device | MigDevice] = [*self._devices, *chain(*self._mig_devices.values())]
        self._devices, self._mig_devices = [], {}
        closers: list[Any] = [part.close for part in parts]
        if self._events is not None:
            events, self._events = self._events, None
            closers.append(lambda: pynvml.nvmlEventSetFree(events))
        for close in [*closers, pynvml.nvmlShutdown]:
            try:
                self._client.call("close", None, close)
            except pynvml.NVMLError:
                continue

    def _sample_on(self) -> None:
        opened: set[int] = set()
        tick, next_s, look_s = 0, time.monotonic(), 0.0
        while not self._stopping.is_set():
            self._take_events()
            look = time.monotonic() >= look_s
            if look:
                look_s = time.monotonic() + RESCAN_PERIOD_S
                self._add_devices()
            for device in self._devices:
                if self._stopping.is_set():
                    return
                self._publish(self._read(device, tick, opened, look))
            self._complete = True
            self._process_cache.retain_only(
                {p.pid for r in self._latest.copy().values() for p in r.processes or ()}
            )
            tick += 1
            # A sample that took long is not made up for: the next comes a period later.
            next_s = max(next_s + self._period_s, time.monotonic())
            self._stopping.wait(next_s - time.monotonic())

    def _read(
        self, device: Device, tick: int, opened: set[int], look: bool
    ) -> Iterable[GpuReading]:
        """Readings of a GPU and its slices. The slow ones take turns among the GPUs."""
        slices = self._mig_devices.get(device.index, [])
        slow = tick == 0 or tick % self._slow_every == device.index % self._slow_every
        try:
            if device.index not in opened:
                device.open()
                opened.add(device.index)
                slow = True
            if look:
                slices = self._refresh_mig_devices(device)
            whole = device.read(slow=slow, throughput=tick > 0)
            return [whole, *(part.read() for part in slices)]
        except GpuLostError as error:
            return [device.lost(str(error)), *(part.lost(str(error)) for part in slices)]

    def _refresh_mig_devices(self, device: Device) -> list[MigDevice]:
        device.refresh_mig_mode()
        before = self._mig_devices.get(device.index, [])
        if not device.mig_enabled and not before:
            return before
        found = (
            open_mig_devices(self._client, self._process_cache, device)
            if device.mig_enabled
            else []
        )
        if [part.key for part in found] == [part.key for part in before]:
            found, before = before, found
        for part in before:
            part.close()
            if part.index not in {kept.index for kept in found}:
                self._latest.pop(part.index, None)
        self._mig_devices[device.index] = found
        return found

    def _publish(self, readings: Iterable[GpuReading]) -> None:
        for reading in readings:
            xid = self._last_xid.get(reading.index)
            self._latest[reading.index] = replace(reading, last_xid=xid) if xid else reading

    # -- XID errors --------------------------------------------------------------------------------

    def _new_event_set(self) -> Any:
        try:
            return self._client.call("EventSetCreate", None, pynvml.nvmlEventSetCreate)
        except pynvml.NVMLError:
            return None

    def _listen(self, device: Device) -> None:
        if self._events is None:
            return
        try:
            self._client.call(
                "DeviceRegisterEvents",
                device.label,
                pynvml.nvmlDeviceRegisterEvents,
                device.handle,
                pynvml.nvmlEventTypeXidCriticalError,
                self._events,
            )
        except pynvml.NVMLError:
            return  # Refused, for instance in a virtual machine: there are no XIDs to tell of then.

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
                self._tell(event)

    def _tell(self, event: Any) -> None:
        device = self._device_of(event.device)
        if device is None:
            return
        place: Device | MigDevice = device
        for part in self._mig_devices.get(device.index, []):
            if part.fixed.get("gpu_instance") == event.gpuInstanceId:
                place = part
        xid = Xid(
            at=time.time(),
            code=int(event.eventData),
            index=place.index,
            uuid=place.fixed.get("uuid"),
        )
        self._xids.append(xid)
        self._last_xid[place.index] = xid

    def _device_of(self, handle: Any) -> Device | None:
        """By address: the driver hands out one handle a GPU."""
        address = _address(handle)
        return next((d for d in self._devices if _address(d.handle) == address), None)


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def _place(call: PendingCall) -> str:
    return f"{call.call}, GPU {call.gpu}" if call.gpu is not None else call.call


def _not_answering(reading: GpuReading, call: PendingCall, age_s: float) -> GpuReading:
    """The last reading, marked as one that the hanging call keeps from being renewed."""
    if call.gpu in (None, reading.label):
        return replace(reading, error=f"driver not answering since {age_s:.0f} s")
    return replace(reading, error=f"{BLOCKED_PREFIX} {age_s:.0f} s: driver hangs at GPU {call.gpu}")


def _cannot_open(error: pynvml.NVMLError) -> str:
    if error.value in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED):
        return NO_DRIVER
    if error.value == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return "the NVIDIA driver was updated; the machine must be restarted"
    return f"the NVIDIA driver can't be opened: {error}"
