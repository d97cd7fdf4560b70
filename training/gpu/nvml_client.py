"""The one door to the driver: remembers refusals, and tells which call has not come back.

A call into a sick driver may hang for ever, and nothing can interrupt it. So the thread that calls
leaves a note before each call, and another thread can read how old the note is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pynvml

T = TypeVar("T")

RETRY_AFTER_S = {
    pynvml.NVML_ERROR_NOT_SUPPORTED: 300.0,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: 3600.0,
    pynvml.NVML_ERROR_INVALID_ARGUMENT: 300.0,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH: 3600.0,
    pynvml.NVML_ERROR_NO_PERMISSION: 60.0,
}
"""How long a refused question is not put again. Some refusals pass: MIG is turned off, say."""

_LOST = {
    pynvml.NVML_ERROR_GPU_IS_LOST: "fell off the bus",
    pynvml.NVML_ERROR_RESET_REQUIRED: "needs a reset",
}
_GONE = {
    pynvml.NVML_ERROR_UNINITIALIZED,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
}


class GpuLostError(Exception):
    """This GPU answers nothing any more; the text says why."""


class DriverGoneError(Exception):
    """The driver must be opened anew."""


@dataclass(slots=True)
class UnsupportedCalls:
    """Until when which question to one GPU is not worth asking."""

    until: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PendingCall:
    """A call that has been made and has not come back."""

    call: str
    gpu: str | None
    """Label of the GPU that it asks about."""
    began: float
    """``time.monotonic()``."""


class NvmlClient:
    """Used by one thread; ``in_flight`` may be read by any."""

    def __init__(self) -> None:
        self.pending_call: PendingCall | None = None
        self.calls = 0

    def call(self, name: str, gpu: str | None, function: Callable[..., T], *args: Any) -> T:
        """The call itself; raises what the driver says."""
        self.calls += 1
        self.pending_call = PendingCall(name, gpu, time.monotonic())
        try:
            return function(*args)
        finally:
            self.pending_call = None

    def ask(
        self,
        unsupported: UnsupportedCalls,
        gpu: str,
        name: str,
        function: Callable[..., T],
        *args: Any,
    ) -> T | None:
        """The answer, or None where the driver refuses it. ``name`` tells questions apart."""
        if unsupported.until and unsupported.until.get(name, 0.0) > time.monotonic():
            return None
        try:
            return self.call(name, gpu, function, *args)
        except pynvml.NVMLError as error:
            if error.value in _LOST:
                raise GpuLostError(_LOST[error.value]) from error
            if error.value in _GONE:
                raise DriverGoneError(str(error)) from error
            pause = RETRY_AFTER_S.get(error.value)
            if pause is not None:
                unsupported.until[name] = time.monotonic() + pause
            return None
