"""Ranks to GPUs and processes to owners, over readings written by hand."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from ltui.training.gpu.reading import GpuProcess, GpuReading, Xid, mig_index
from ltui.training.gpu.run_gpus import RankLocation, gpu_snapshots, map_ranks, ranks_of
from ltui.training.json_codec import to_json
from ltui.training.state.run_snapshot import (
    GpuProcessSnapshot,
    RunSnapshot,
    RunState,
    snapshot_from_json,
)


def gpu(index, *, name="H100", pids=(), **more):
    processes = tuple(GpuProcess(pid=pid, start_ticks=pid * 10) for pid in pids)
    return GpuReading(
        index=index, label=str(index), uuid=f"GPU-{index}aaa-bbb", name=name,
        **{"processes": processes, **more},
    )  # fmt: skip


def part(parent, number, *, pids=(), gi=1):
    processes = tuple(GpuProcess(pid=pid, start_ticks=pid * 10) for pid in pids)
    return GpuReading(
        index=mig_index(parent, number), label=f"{parent}/{number}", parent=parent,
        uuid=f"MIG-{parent}{number}cc-ddd", gpu_instance=gi, processes=processes,
    )  # fmt: skip


def place(rank, **more):
    return RankLocation(rank=rank, **{"device": f"cuda:{rank}", **more})


FOUR = tuple(gpu(i) for i in range(4))
MIXED = (gpu(0, name="T4"), gpu(1, name="H100"))


def test_by_the_uuid_that_torch_gives():
    ranks = map_ranks(FOUR, [place(0, gpu_uuid="3aaa-bbb"), place(1, gpu_uuid="GPU-2AAA-BBB")])
    assert ranks == {0: 3, 1: 2}


def test_a_uuid_that_the_driver_does_not_show():
    assert map_ranks(FOUR, [place(0, gpu_uuid="9999")]) == {}


@pytest.mark.parametrize(
    ("visible", "device", "expected"),
    [
        (None, "cuda:2", 2), ("3,1", "cuda:0", 3), ("3,1", "cuda:1", 1), ("2", "cuda", 2),
        ("GPU-1aaa-bbb,GPU-0aaa-bbb", "cuda:0", 1), ("GPU-1a", "cuda:0", 1),
        (" 2 , 0 ", "cuda:1", 0),
    ],
)  # fmt: skip
def test_by_visible_devices(visible, device, expected):
    ranks = map_ranks(FOUR, [place(0, device=device, visible_devices=visible)])
    assert ranks == {0: expected}


@pytest.mark.parametrize(
    ("visible", "device"),
    [
        ("3,1", "cuda:2"), ("GPU-", "cuda:0"), ("", "cuda:0"), ("7", "cuda:0"), ("-1", "cuda:0"),
        (None, None),
    ],
)  # fmt: skip
def test_what_visible_devices_leave_open(visible, device):
    assert map_ranks(FOUR, [place(0, device=device, visible_devices=visible)]) == {}


def test_numbers_mean_nothing_among_different_models():
    assert map_ranks(MIXED, [place(0)]) == {}
    by_bus = map_ranks(MIXED, [place(0, device_order="PCI_BUS_ID")])
    assert by_bus == {0: 0}
    by_uuid = map_ranks(MIXED, [place(0, visible_devices="GPU-1aaa-bbb")])
    assert by_uuid == {0: 1}


def test_by_the_process_list():
    readings = (gpu(0, name="T4", pids=[50]), gpu(1, pids=[51, 52]))
    places = [place(r, pid=50 + r, device=None) for r in range(3)]
    ranks = map_ranks(readings, places)
    assert ranks == {0: 0, 1: 1, 2: 1}
    assert ranks_of(ranks, 1) == (1, 2)


def test_a_process_on_several_gpus_is_told_by_its_device():
    readings = (gpu(0, pids=[50, 51]), gpu(1, pids=[51]))
    ranks = map_ranks(readings, [place(0, pid=50), place(1, pid=51)])
    assert ranks == {0: 0, 1: 1}
    assert map_ranks(readings, [place(1, pid=51, device=None)]) == {}


def test_slices():
    readings = (gpu(0, mig_enabled=True, pids=[50]), part(0, 0), part(0, 1, pids=[50], gi=2))
    assert map_ranks(readings, [place(0, gpu_uuid="01cc-ddd")]) == {0: 101}
    assert map_ranks(readings, [place(0, gpu_uuid="GPU-0aaa-bbb", pid=50)]) == {0: 101}
    assert map_ranks(readings, [place(0, visible_devices="MIG-00cc-ddd")]) == {0: 100}
    named = place(0, gpu_uuid="0aaa-bbb", visible_devices="MIG-00cc-ddd")
    assert map_ranks(readings, [named]) == {0: 100}
    for open_ in (place(0, gpu_uuid="GPU-0aaa-bbb"), place(0), place(0, visible_devices="0")):
        assert map_ranks(readings, [open_]) == {}


def test_ranks_elsewhere_and_on_the_processor_have_none():
    assert map_ranks(FOUR, [place(0, device="cpu"), place(1, on_this_host=False)]) == {}


def test_without_readings_it_is_unknown():
    assert map_ranks((), [place(0)]) == {}


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
        gpu(3), power_w=71.0, throttle_reasons=("power cap",), sm_activity=0.5, label="3",
        repair_pending=False, last_xid=Xid(at=5.0, code=79, index=3), nvlinks_up=17,
        processes=(GpuProcess(pid=9, user="eve", memory_bytes=7),), error="fell off the bus",
    )  # fmt: skip
    (shown,) = gpu_snapshots((reading,), map_ranks((), []), [], None)
    assert (shown.power_w, shown.xid_code, shown.xid_at, shown.nvlinks_up) == (71.0, 79, 5.0, 17)
    assert shown.memory_used_bytes is None
    run = RunSnapshot(id="a", name="a", state=RunState.RUNNING, gpus=(shown,))
    back = snapshot_from_json(json.loads(json.dumps(to_json(run))))
    assert back.gpus == (shown,)
    assert back.gpus[0].processes == (
        GpuProcessSnapshot(pid=9, owner="foreign", memory_bytes=7, user="eve"),
    )
