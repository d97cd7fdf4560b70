"""The line of the launch form about this machine's GPUs."""

from __future__ import annotations

from ltui.app.launch.launch_text import free_gpus_text
from ltui.training.gpu.reading import NO_DRIVER, GpuProcess, GpuReading, GpuView

GIB = 1 << 30


def reading(index: int, used: int = 0, *processes: GpuProcess) -> GpuReading:
    return GpuReading(
        index=index,
        label=str(index),
        name="NVIDIA H100 80GB HBM3",
        memory_used_bytes=used,
        memory_total_bytes=80 * GIB,
        processes=processes,
    )


def test_free_and_used() -> None:
    used = reading(1, 40 * GIB, GpuProcess(pid=77, user="ada"))
    text = free_gpus_text(GpuView(readings=(reading(0), used))).plain
    assert "GPUs: 1 of 2 free" in text
    assert "free:1 chooses the one with the most free memory" in text
    first, second = text.splitlines()[1:]
    assert "80.0 GiB left  free" in first
    assert "40.0 GiB left  used by pid 77 (user ada)" in second


def test_of_many_those_in_use_come_first() -> None:
    busy = reading(60, 3 * GIB, GpuProcess(pid=5))
    view = GpuView(readings=(*(reading(i) for i in range(60)), busy))
    lines = free_gpus_text(view).plain.splitlines()
    assert lines[0].startswith("GPUs: 60 of 61 free")
    assert "60  H100" in lines[1]
    assert lines[-1] == "  and 53 more"


def test_none_and_a_hung_driver() -> None:
    assert NO_DRIVER in free_gpus_text(GpuView(note=NO_DRIVER)).plain
    hung = GpuView(readings=(reading(0),), note="driver has not answered for 4 s")
    assert "driver has not answered for 4 s" in free_gpus_text(hung).plain
