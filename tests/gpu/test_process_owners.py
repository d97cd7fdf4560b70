"""Which process here is the one that the driver lists by its pid."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from ltui.training.gpu import nvml_device
from ltui.training.gpu.nvml_device import ProcessInfoCache


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


def test_a_process_whose_files_are_secret_may_be_it(
    device_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml_device, "open_files", lambda _pid: [])
    assert is_visible(os.getpid())


def test_without_device_files_nothing_can_be_said(
    device_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml_device, "DRIVER", device_file.parent / "missing")
    assert is_visible(os.getpid())
