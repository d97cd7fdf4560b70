"""Refusals are remembered; what means the loss of a GPU or of the driver is told apart."""

from __future__ import annotations

import pynvml
import pytest

from ltui.training.gpu.nvml_client import Door, DriverGoneError, GpuLostError, Refusals


class Driver:
    def __init__(self, code):
        self.code, self.asked = code, 0

    def __call__(self):
        self.asked += 1
        raise pynvml.NVMLError(self.code)


@pytest.mark.parametrize(
    ("code", "times"),
    [
        (pynvml.NVML_ERROR_NOT_SUPPORTED, 1), (pynvml.NVML_ERROR_NO_PERMISSION, 1),
        (pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, 1), (pynvml.NVML_ERROR_UNKNOWN, 3),
        (pynvml.NVML_ERROR_TIMEOUT, 3),
    ],
)  # fmt: skip
def test_lasting_refusals_are_not_asked_again(code, times):
    door, refusals, driver = Door(), Refusals(), Driver(code)
    assert [door.ask(refusals, "0", "power", driver) for _ in range(3)] == [None] * 3
    assert driver.asked == times
    # Another GPU, and another question, are asked all the same.
    door.ask(Refusals(), "1", "power", driver)
    door.ask(refusals, "0", "fan", driver)
    assert driver.asked == times + 2


def test_losses():
    door = Door()
    with pytest.raises(GpuLostError, match="fell off the bus"):
        door.ask(Refusals(), "0", "power", Driver(pynvml.NVML_ERROR_GPU_IS_LOST))
    with pytest.raises(DriverGoneError):
        door.ask(Refusals(), "0", "power", Driver(pynvml.NVML_ERROR_UNINITIALIZED))
    assert door.in_flight is None


def test_a_call_is_noted_while_it_runs():
    door = Door()
    noted = door.ask(Refusals(), "3", "power", lambda: door.in_flight)
    assert (noted.call, noted.gpu) == ("power", "3")
    assert door.in_flight is None
