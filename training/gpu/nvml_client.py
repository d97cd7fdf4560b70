"""The client for all NVML calls: remembers unsupported calls and exposes the call in progress.

A call into a faulty driver may hang forever, and nothing can interrupt it. The calling thread
therefore publishes each call before it makes it, and another thread can read the age of the call.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import pynvml
from msgspec import Struct

T = TypeVar("T")

RETRY_AFTER_S = {
    pynvml.NVML_ERROR_NOT_SUPPORTED: 300.0,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: 3600.0,
    pynvml.NVML_ERROR_INVALID_ARGUMENT: 300.0,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH: 3600.0,
    pynvml.NVML_ERROR_NO_PERMISSION: 60.0,
}
"""Seconds until a refused query is tried again, by NVML error code.

Some refusals are temporary, for example while MIG is enabled.
"""

_LOST_REASONS = {
    pynvml.NVML_ERROR_GPU_IS_LOST: "fell off the bus",
    pynvml.NVML_ERROR_RESET_REQUIRED: "needs a reset",
}
_DRIVER_GONE_CODES = {
    pynvml.NVML_ERROR_UNINITIALIZED,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
}


class GpuLostError(Exception):
    """The driver no longer answers for this GPU. The text gives the reason."""


class DriverGoneError(Exception):
    """The connection to the driver is lost; it must be opened again."""


class PendingCall(Struct, frozen=True):
    """A call that has not returned yet."""

    call: str
    gpu: str | None
    """Label of the GPU that the call is about; None for the driver."""
    began: float
    """``time.monotonic()`` at the start of the call."""


class NvmlClient:
    """Used by one thread. Any thread may read ``pending_call``."""

    def __init__(self) -> None:
        self.pending_call: PendingCall | None = None
        self.calls = 0

    def call(self, name: str, gpu: str | None, function: Callable[..., T], *args: Any) -> T:
        """Call the driver. Raises ``pynvml.NVMLError``."""
        self.calls += 1
        self.pending_call = PendingCall(name, gpu, time.monotonic())
        try:
            return function(*args)
        finally:
            self.pending_call = None


class DeviceClient:
    """Queries about one GPU or MIG device; those that the driver refuses are not repeated soon."""

    def __init__(self, client: NvmlClient, label: str) -> None:
        self._client, self._label = client, label
        self._retry_at: dict[str, float] = {}
        """Name of a refused query to the ``time.monotonic()`` of the next attempt."""

    def query(self, name: str, function: Callable[..., T], *args: Any) -> T | None:
        """Return the driver's answer, or None if the driver refuses the query.

        ``name`` identifies the query. Raises ``GpuLostError`` and ``DriverGoneError``.
        """
        if self._retry_at and self._retry_at.get(name, 0.0) > time.monotonic():
            return None
        try:
            return self._client.call(name, self._label, function, *args)
        except pynvml.NVMLError as error:
            if error.value in _LOST_REASONS:
                raise GpuLostError(_LOST_REASONS[error.value]) from error
            if error.value in _DRIVER_GONE_CODES:
                raise DriverGoneError(str(error)) from error
            if error.value in RETRY_AFTER_S:
                self._retry_at[name] = time.monotonic() + RETRY_AFTER_S[error.value]
            return None
