"""Which GPUs are free, and which a run gets."""

from __future__ import annotations

import pytest

from ltui.training.gpu.reading import (
    GpuProcess,
    GpuReading,
    busy_reason,
    free_gpus,
    mig_index,
    select_gpus,
    visible_variables,
)
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


def chosen(number, gpus):
    return [reading.index for reading in select_gpus(number, gpus)]


def test_most_free_memory_first():
    gpus = (gpu(0, 0.5), gpu(1, pids=[3]), gpu(2, 0.1), gpu(3, 0.5), gpu(4, 0.1, 40))
    assert [r.index for r in free_gpus(gpus)] == [2, 0, 3, 4]
    assert chosen(2, gpus) == [2, 0]
    freest = select_gpus(2, gpus)
    assert not isinstance(freest, str)
    assert visible_variables(freest) == {"CUDA_VISIBLE_DEVICES": "GPU-2,GPU-0"}


def test_waiting_for_busy_ones():
    gpus = (gpu(0), gpu(1, pids=[3]))
    assert select_gpus(2, gpus) == "1 of the 2 GPUs are free; GPU 1: used by pid 3 (user eve)"


def test_what_can_never_be_had():
    with pytest.raises(ProblemError, match="3 GPUs are requested, but there are 2"):
        select_gpus(3, (gpu(0), gpu(1)))
    with pytest.raises(ProblemError, match="no GPU on this machine"):
        select_gpus(1, ())


def test_without_uuids_indices_are_used():
    assert visible_variables((gpu(0, uuid=None), gpu(1))) == {
        "CUDA_VISIBLE_DEVICES": "0,1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }  # fmt: skip


def test_slices_stand_for_their_gpu():
    whole = gpu(0, mig_enabled=True)
    part = gpu(mig_index(0, 1), label="0/1", uuid="MIG-x", parent=0, total=10)
    assert chosen(1, (whole, part)) == [101]
    assert visible_variables((part,)) == {"CUDA_VISIBLE_DEVICES": "MIG-x"}
