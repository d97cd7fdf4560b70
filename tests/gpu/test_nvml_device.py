"""Calls of the driver: refusals are remembered, losses are told apart, and processes are found."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pynvml
import pytest

from ltui.training.gpu import nvml_device
from ltui.training.gpu.nvml_device import (
    DeviceClient,
    DriverGoneError,
    GpuLostError,
    NvmlClient,
    ProcessInfoCache,
)
from ltui.training.gpu.whole_gpu import Device


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
    client, driver = NvmlClient(), Driver(code)
    device = DeviceClient(client, "0")
    assert [device.query(driver, name="power") for _ in range(3)] == [None] * 3
    assert driver.asked == times
    # Another GPU, and another question, are asked all the same.
    DeviceClient(client, "1").query(driver, name="power")
    device.query(driver, name="fan")
    assert driver.asked == times + 2


def test_losses():
    client = NvmlClient()
    with pytest.raises(GpuLostError, match="fell off the bus"):
        DeviceClient(client, "0").query(Driver(pynvml.NVML_ERROR_GPU_IS_LOST), name="power")
    with pytest.raises(DriverGoneError):
        DeviceClient(client, "0").query(Driver(pynvml.NVML_ERROR_UNINITIALIZED), name="power")
    assert client.pending_call is None


def test_a_call_is_noted_while_it_runs():
    client = NvmlClient()
    noted = DeviceClient(client, "3").query(lambda: client.pending_call, name="power")
    assert noted is not None
    assert (noted.call, noted.gpu) == ("power", "3")
    assert client.pending_call is None


def test_links_that_a_board_lacks_lie_between_others(monkeypatch):
    """An H100 for PCIe has 12 of 18 links."""

    def state(_handle, link):
        if link in (4, 5, 10, 11, 16, 17):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return int(link != 0)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetNvLinkState", state)
    device = Device(NvmlClient(), ProcessInfoCache(), None, 0)
    assert device._read_nvlinks() == {"nvlinks": 12, "nvlinks_up": 11}


# -- which process here is the one that the driver lists by its pid --------------------------------


@pytest.fixture
def device_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that stands for a device file of the driver."""
    file = tmp_path / "nvidia0"
    file.touch()
    monkeypatch.setattr(nvml_device, "DRIVER", tmp_path)
    monkeypatch.setattr(nvml_device, "DEVICE_FILES", str(tmp_path / "nvidia"))
    return file


def is_visible(pid: int) -> bool:
    described = ProcessInfoCache().describe(pid, 5, graphics=False)
    assert (described.pid, described.memory_bytes) == (pid, 5)
    return described.visible


def test_a_process_of_the_same_pid_that_uses_no_gpu_is_another(device_file: Path) -> None:
    """In a container, the driver may list the pids of the host."""
    with device_file.open() as opened:
        process = subprocess.Popen(["sleep", "60"], pass_fds=[opened.fileno()])
    other = subprocess.Popen(["sleep", "60"])
    try:
        assert is_visible(process.pid)
        assert not is_visible(other.pid)
    finally:
        for sleeping in (process, other):
            sleeping.kill()
            sleeping.wait()


def test_a_process_that_cannot_be_looked_into_may_be_it(
    device_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are secret, or there are no device files."""
    with monkeypatch.context() as patch:
        patch.setattr(nvml_device, "open_files", lambda _pid: [])
        assert is_visible(os.getpid())
    monkeypatch.setattr(nvml_device, "DRIVER", device_file.parent / "missing")
    assert is_visible(os.getpid())
