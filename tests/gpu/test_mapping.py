"""Over readings written by hand: ranks to GPUs, processes to owners, and which GPUs a run gets."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from ltui.training.gpu.reading import (
    GpuProcess,
    GpuReading,
    Xid,
    busy_reason,
    free_gpus,
    mig_index,
    select_gpus,
    visible_variables,
)
from ltui.training.gpu.run_gpus import RankLocation, gpu_snapshots, map_ranks, ranks_of
from ltui.training.json_codec import to_json
from ltui.training.problem import ProblemError
from ltui.training.state.run_snapshot import (
    GpuProcessSnapshot,
    RunSnapshot,
    RunState,
    snapshot_from_json,
)

GIB = 1 << 30


def gpu(index, used=0.2, total=80.0, *, name="H100", pids=(), **more):
    processes = tuple(GpuProcess(pid=pid, start_ticks=pid * 10, user="eve") for pid in pids)
    values = {
        "uuid": f"GPU-{index}aaa-bbb", "memory_used_bytes": int(used * GIB),
        "memory_total_bytes": int(total * GIB), "processes": processes, **more,
    }  # fmt: skip
    return GpuReading(index=index, label=str(index), name=name, **values)


def part(parent, number, *, pids=(), gi=1):
    return replace(
        gpu(mig_index(parent, number), total=10, pids=pids, name=None),
        label=f"{parent}/{number}", parent=parent, uuid=f"MIG-{parent}{number}cc-ddd",
        gpu_instance=gi,
    )  # fmt: skip


def place(rank, **more):
    return RankLocation(rank=rank, **{"device": f"cuda:{rank}", **more})


FOUR = tuple(gpu(i) for i in range(4))
MIXED = (gpu(0, name="T4"), gpu(1, name="H100"))
SLICES = (gpu(0, mig_enabled=True, pids=[50]), part(0, 0), part(0, 1, pids=[50], gi=2))


@pytest.mark.parametrize(
    ("readings", "location", "expected"),
    [
        # By the UUID that torch gives.
        (FOUR, {"gpu_uuid": "3aaa-bbb"}, 3),
        (FOUR, {"gpu_uuid": "GPU-2AAA-BBB"}, 2),
        (FOUR, {"gpu_uuid": "9999"}, None),
        # By the visible devices.
        (FOUR, {"device": "cuda:2"}, 2),
        (FOUR, {"visible_devices": "3,1"}, 3),
        (FOUR, {"device": "cuda:1", "visible_devices": "3,1"}, 1),
        (FOUR, {"device": "cuda", "visible_devices": "2"}, 2),
        (FOUR, {"visible_devices": "GPU-1aaa-bbb,GPU-0aaa-bbb"}, 1),
        (FOUR, {"visible_devices": "GPU-1a"}, 1),
        (FOUR, {"device": "cuda:1", "visible_devices": " 2 , 0 "}, 0),
        (FOUR, {"device": "cuda:2", "visible_devices": "3,1"}, None),
        (FOUR, {"visible_devices": "GPU-"}, None),
        (FOUR, {"visible_devices": ""}, None),
        (FOUR, {"visible_devices": "7"}, None),
        (FOUR, {"visible_devices": "-1"}, None),
        (FOUR, {"device": None}, None),
        # Numbers mean nothing among different models.
        (MIXED, {}, None),
        (MIXED, {"device_order": "PCI_BUS_ID"}, 0),
        (MIXED, {"visible_devices": "GPU-1aaa-bbb"}, 1),
        # Slices.
        (SLICES, {"gpu_uuid": "01cc-ddd"}, 101),
        (SLICES, {"gpu_uuid": "GPU-0aaa-bbb", "pid": 50}, 101),
        (SLICES, {"visible_devices": "MIG-00cc-ddd"}, 100),
        (SLICES, {"gpu_uuid": "0aaa-bbb", "visible_devices": "MIG-00cc-ddd"}, 100),
        (SLICES, {"gpu_uuid": "GPU-0aaa-bbb"}, None),
        (SLICES, {}, None),
        (SLICES, {"visible_devices": "0"}, None),
        # Elsewhere, on the processor, and without readings.
        (FOUR, {"device": "cpu"}, None),
        (FOUR, {"on_this_host": False}, None),
        ((), {}, None),
    ],
)
def test_a_rank_is_mapped_to_its_gpu_or_to_none(readings, location, expected):
    ranks = map_ranks(readings, [place(0, **location)])
    assert ranks == ({} if expected is None else {0: expected})


def test_by_the_process_list():
    readings = (gpu(0, name="T4", pids=[50]), gpu(1, pids=[51, 52]))
    places = [place(r, pid=50 + r, device=None) for r in range(3)]
    ranks = map_ranks(readings, places)
    assert ranks == {0: 0, 1: 1, 2: 1}
    assert ranks_of(ranks, 1) == (1, 2)


def test_a_process_on_several_gpus_is_told_by_its_device():
    readings = (gpu(0, pids=[50, 51]), gpu(1, pids=[51]))
    assert map_ranks(readings, [place(0, pid=50), place(1, pid=51)]) == {0: 0, 1: 1}
    assert map_ranks(readings, [place(1, pid=51, device=None)]) == {}


def test_owners_of_processes():
    processes = (
        GpuProcess(pid=50, memory_bytes=4, start_ticks=500),
        GpuProcess(pid=60, run_id="mine", start_ticks=1),
        GpuProcess(pid=61, run_id="other", user="eve", start_ticks=1),
        GpuProcess(pid=62, visible=False),
        GpuProcess(pid=63, graphics=True, name="Xorg", start_ticks=1),
    )
    readings = (gpu(0, processes=processes),)
    places = [place(0, pid=50)]
    (shown,) = gpu_snapshots(readings, map_ranks(readings, places), places, "mine")
    assert shown.processes is not None
    assert [p.owner for p in shown.processes] == ["rank", "run", "foreign", "unseen", "display"]
    assert shown.processes[0].rank == 0
    assert shown.ranks == (0,)


def test_a_full_reading_survives_the_way_to_the_front_ends():
    reading = replace(
        gpu(3, memory_used_bytes=None), power_w=71.0, throttle_reasons=("power cap",),
        sm_activity=0.5, repair_pending=False, last_xid=Xid(at=5.0, code=79, index=3),
        nvlinks_up=17, processes=(GpuProcess(pid=9, user="eve", memory_bytes=7),),
        error="fell off the bus",
    )  # fmt: skip
    (shown,) = gpu_snapshots((reading,), {}, [], None)
    assert (shown.power_w, shown.xid_code, shown.xid_at, shown.nvlinks_up) == (71.0, 79, 5.0, 17)
    assert shown.memory_used_bytes is None
    run = RunSnapshot(id="a", name="a", state=RunState.RUNNING, gpus=(shown,))
    back = snapshot_from_json(json.loads(json.dumps(to_json(run))))
    assert back.gpus == (shown,)
    assert back.gpus[0].processes == (
        GpuProcessSnapshot(pid=9, owner="foreign", memory_bytes=7, user="eve"),
    )


# -- which GPUs are free, and which a run gets -----------------------------------------------------


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
    freest = select_gpus(2, gpus)
    assert not isinstance(freest, str)
    assert visible_variables(freest) == {"CUDA_VISIBLE_DEVICES": "GPU-2aaa-bbb,GPU-0aaa-bbb"}
    assert visible_variables((gpu(0, uuid=None), gpu(1))) == {
        "CUDA_VISIBLE_DEVICES": "0,1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }  # fmt: skip


def test_waiting_for_busy_ones():
    gpus = (gpu(0), gpu(1, pids=[3]))
    assert select_gpus(2, gpus) == "1 of the 2 GPUs are free; GPU 1: used by pid 3 (user eve)"
    with pytest.raises(ProblemError, match="3 GPUs are requested, but there are 2"):
        select_gpus(3, (gpu(0), gpu(1)))
    with pytest.raises(ProblemError, match="no GPU on this machine"):
        select_gpus(1, ())


def test_slices_stand_for_their_gpu():
    whole, slice_ = gpu(0, mig_enabled=True), part(0, 1)
    assert select_gpus(1, (whole, slice_)) == [slice_]
    assert visible_variables((slice_,)) == {"CUDA_VISIBLE_DEVICES": "MIG-01cc-ddd"}
