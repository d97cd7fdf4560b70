"""What ``devices`` may say, and which GPUs a run then gets."""

from __future__ import annotations

import pytest

from ltui.training.gpu.free_gpus import (
    AllDevices,
    DeviceCount,
    FreeDevices,
    GpusBusy,
    GpuSelection,
    NamedDevices,
    busy_reason,
    free_gpus,
    parse_devices,
    select_gpus,
)
from ltui.training.gpu.reading import GpuProcess, GpuReading, mig_index
from ltui.training.problem import ProblemError

GIB = 1 << 30


def gpu(index, used=0.2, total=80.0, *, pids=(), **more):
    values = {
        "index": index, "label": str(index), "uuid": f"GPU-{index}", "memory_used_bytes":
        int(used * GIB), "memory_total_bytes": int(total * GIB),
        "processes": tuple(GpuProcess(pid=pid, user="eve") for pid in pids), **more,
    }  # fmt: skip
    return GpuReading(**values)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (2, DeviceCount(2)), ("2", DeviceCount(2)), ("auto", AllDevices()), (-1, AllDevices()),
        ("-1", AllDevices()), ([2], NamedDevices((2,))), ("2,", NamedDevices((2,))),
        ("0,2", NamedDevices((0, 2))), ("[1, 3]", NamedDevices((1, 3))),
        ("0-2,5", NamedDevices((0, 1, 2, 5))), ("free:2", FreeDevices(2)),
        ("free", FreeDevices(1)), (" free:1 ", FreeDevices(1)),
        ("GPU-ab,MIG-cd", NamedDevices(("GPU-ab", "MIG-cd"))),
    ],
)  # fmt: skip
def test_forms_of_devices(text, expected):
    assert parse_devices(text) == expected


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (0, "at least 1"), ("-2", "at least 1"), ("free:0", "requests no GPU"),
        ("free:x", "valid number of free"), ("free:", "valid number of free"),
        ("freely", "valid number of free"),
        ("1,x", "'x' is neither"), ("", "empty"), (",", "empty"), ("1,1", "1 is listed twice"),
        ("3-1", "neither"), (True, "not a valid"), (None, "not a valid"), ("cuda:1", "neither"),
        ("0-2,1", "listed twice"), ([0, "GPU"], "neither"), (1.5, "neither"),
    ],
)  # fmt: skip
def test_mistakes_are_named(text, what):
    with pytest.raises(ProblemError) as raised:
        parse_devices(text, "--set trainer.devices")
    (problem,) = raised.value.problems
    assert what in problem.what
    assert problem.where == "--set trainer.devices"
    assert problem.remedy


@pytest.mark.parametrize(
    ("reading", "reason"),
    [
        (gpu(0), None), (gpu(0, pids=[7]), "used by pid 7 (user eve)"),
        (gpu(0, pids=[7, 8]), "used by pid 7 (user eve) and 1 more"),
        (gpu(0, used=30), "30.0 GiB of its memory are used by processes that are not visible"),
        (gpu(0, error="fell off the bus"), "fell off the bus"),
        (gpu(0, memory_used_bytes=None), "the driver does not report its memory"),
        (gpu(0, processes=(GpuProcess(pid=1, graphics=True),)), None),
        (gpu(0, processes=None), None), (gpu(0, used=0.9, total=8, processes=None),
         "0.9 GiB of its memory are used by processes that are not visible"),
    ],
)  # fmt: skip
def test_what_is_occupied(reading, reason):
    assert busy_reason(reading) == reason


def test_most_free_memory_first():
    gpus = (gpu(0, 0.5), gpu(1, pids=[3]), gpu(2, 0.1), gpu(3, 0.5), gpu(4, 0.1, 40))
    assert [r.index for r in free_gpus(gpus)] == [2, 0, 3, 4]
    assert select_gpus(FreeDevices(2), gpus) == GpuSelection(indices=(2, 0), visible="GPU-2,GPU-0")


def test_waiting_for_busy_ones():
    gpus = (gpu(0), gpu(1, pids=[3]))
    answer = select_gpus(FreeDevices(2), gpus)
    assert isinstance(answer, GpusBusy)
    assert answer.reason == "1 of the 2 GPUs are free; GPU 1: used by pid 3 (user eve)"
    assert isinstance(select_gpus(NamedDevices((1,)), gpus), GpusBusy)


def test_what_can_never_be_had():
    with pytest.raises(ProblemError, match="3 GPUs are requested, but there are 2"):
        select_gpus(FreeDevices(3), (gpu(0), gpu(1)))
    with pytest.raises(ProblemError, match="no GPU on this machine"):
        select_gpus(FreeDevices(1), ())
    with pytest.raises(ProblemError) as raised:
        select_gpus(NamedDevices((1, 7, "GPU-9")), (gpu(0), gpu(1)))
    assert [p.what for p in raised.value.problems] == [
        "there is no GPU 7; there are 0, 1.", "there is no GPU GPU-9; there are 0, 1.",
    ]  # fmt: skip


def test_the_order_of_a_list_is_kept():
    assert select_gpus(NamedDevices((1, "GPU-0")), (gpu(0), gpu(1))) == GpuSelection(
        indices=(1, 0), visible="GPU-1,GPU-0"
    )


def test_without_uuids_indices_are_used():
    gpus = (gpu(0, uuid=None), gpu(1))
    assert select_gpus(NamedDevices((0, 1)), gpus) == GpuSelection(
        indices=(0, 1), visible="0,1", by_index=True
    )


def test_slices_stand_for_their_gpu():
    whole = gpu(0, mig_enabled=True)
    part = gpu(mig_index(0, 1), label="0/1", uuid="MIG-x", parent=0, total=10)
    assert select_gpus(FreeDevices(1), (whole, part)) == GpuSelection(
        indices=(101,), visible="MIG-x"
    )
    with pytest.raises(ProblemError, match="partitioned into MIG devices"):
        select_gpus(NamedDevices((0,)), (whole, part))
