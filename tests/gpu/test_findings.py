"""Plain words from samples, with time as an argument: when a finding comes, stays and goes."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from ltui.training.gpu.findings import FindingsState, update_findings, verdicts
from ltui.training.state.run_snapshot import (
    GpuProcessSnapshot,
    GpuSnapshot,
    RankSnapshot,
    RankState,
)

HEALTHY = GpuSnapshot(
    index=0, name="H100", ranks=(0,), utilisation_percent=97.0, memory_used_bytes=40,
    memory_total_bytes=100, power_w=540.0, power_limit_w=700.0, temperature_c=60.0,
    slowdown_temperature_c=89.0, sm_clock_mhz=1980.0, throttle_reasons=(), pcie_width=16,
    pcie_width_max=16, pcie_generation=5, pcie_generation_max=5, nvlinks=18, nvlinks_up=18,
    ecc_uncorrected=0, repair_pending=False, repair_failed=False, processes=(),
)  # fmt: skip
WAITING = replace(HEALTHY, power_w=71.0, utilisation_percent=100.0)
RANKS = tuple(RankSnapshot(rank=rank, state=RankState.OK) for rank in range(4))
STALLED = tuple(replace(rank, state=RankState.STALLED) for rank in RANKS)
SILENT = tuple(RankSnapshot(rank=rank) for rank in range(2))
OURS = GpuProcessSnapshot(pid=1, owner="rank", rank=0)
EVE = GpuProcessSnapshot(pid=4711, owner="foreign", user="eve", name="python")
GHOST = GpuProcessSnapshot(pid=9, owner="unseen")


class Clock:
    """Feeds samples once a second and keeps the time."""

    def __init__(self, ranks=RANKS):
        self.state, self.now, self.ranks = FindingsState(), 1000.0, ranks

    def see(self, *gpus, seconds=1):
        """The same sample for some seconds; the texts that are then shown."""
        for _ in range(seconds):
            fresh = [replace(g, sampled_at=self.now) for g in gpus]
            self.state = update_findings(self.state, fresh, self.ranks, self.now)
            self.now += 1.0
        return [f.text for f in self.state.findings]


def others(*clocks, **more):
    return [
        replace(HEALTHY, index=i, ranks=(i,), sm_clock_mhz=clock, **more)
        for i, clock in enumerate(clocks)
    ]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"throttle_reasons": ("power cap",)},
        {"nvlinks_up": 0},  # links that never were up
        {"pcie_width": 4, "pcie_generation": 3, "utilisation_percent": 0.0},
        {"processes": (GHOST,)},  # which may be our own
        {"sm_clock_mhz": 900.0},  # of a single GPU
    ],
)
def test_a_healthy_gpu_has_no_findings(change):
    assert Clock().see(replace(HEALTHY, **change), seconds=60) == []


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (STALLED, "for 30 s: kernels wait in a collective"),
        (RANKS, "small kernels"),
        (SILENT, "kernels wait or do little work"),
        (STALLED[:1], "a kernel runs that does next to nothing"),
    ],
)
def test_low_power_is_explained_by_what_the_ranks_do(ranks, words):
    (text,) = Clock(ranks).see(WAITING, seconds=31)
    assert words in text
    assert ("collective" in text) == (ranks == STALLED)


def test_low_power_at_high_utilisation():
    clock = Clock(STALLED)
    assert clock.see(WAITING, seconds=20) == []
    assert clock.see(WAITING) == [
        "power 71 W at 100 % utilisation for 20 s: kernels wait in a collective"
    ]
    # A value on the edge does not end it; five seconds of work do.
    assert clock.see(replace(WAITING, power_w=200.0), seconds=30)
    assert clock.see(HEALTHY, seconds=4)
    assert clock.see(HEALTHY, seconds=2) == []


@pytest.mark.parametrize(
    "change",
    [
        {"sm_activity": 0.8}, {"power_limit_w": None}, {"utilisation_percent": None},
        {"power_w": None}, {"ranks": ()},
    ],
)  # fmt: skip
def test_low_power_needs_its_evidence(change):
    assert Clock(STALLED).see(replace(WAITING, **change), seconds=60) == []


def test_a_dip_of_power_is_not_kept():
    clock = Clock()
    for _ in range(8):
        assert clock.see(WAITING, seconds=8) == []
        assert clock.see(HEALTHY, seconds=4) == []


def test_thermal_slowdown():
    clock = Clock()
    hot = replace(HEALTHY, throttle_reasons=("hardware thermal slowdown",), temperature_c=91.0)
    assert clock.see(hot, seconds=2) == []
    clock.see(hot, seconds=38)
    assert clock.see(hot) == ["thermal slowdown for 40 s (91 °C, limit 89 °C)"]
    clock.see(HEALTHY, seconds=3)
    # Back within the grace: it is the same slowdown.
    assert clock.see(hot)[0].startswith("thermal slowdown for 44 s")


def test_memory_all_but_full():
    clock = Clock()
    assert clock.see(replace(HEALTHY, memory_used_bytes=96), seconds=30) == []
    assert clock.see(replace(HEALTHY, memory_used_bytes=97), seconds=5) == ["memory at 97 %"]
    assert clock.see(replace(HEALTHY, memory_used_bytes=95), seconds=30) == ["memory at 95 %"]
    assert clock.see(replace(HEALTHY, memory_used_bytes=94), seconds=6) == []


def test_one_rank_below_the_others_clock():
    clock = Clock()
    gpus = others(1980.0, 1980.0, 1980.0, 1580.0)
    gpus[3] = replace(gpus[3], throttle_reasons=("power cap",))
    assert clock.see(*gpus, seconds=10) == []
    assert clock.see(*gpus) == [
        "the GPU clock of rank 3 is 20 % lower than the others' (1580 of 1980 MHz): power cap"
    ]
    assert [v.culprits for v in verdicts(clock.state.findings)] == [(3,)]


def test_clocks_are_compared_among_one_model_under_load_only():
    assert Clock().see(*others(1980.0, 900.0, utilisation_percent=10.0), seconds=30) == []
    mixed = others(1980.0, 900.0)
    mixed[1] = replace(mixed[1], name="T4")
    assert Clock().see(*mixed, seconds=30) == []


def test_a_foreign_process():
    clock = Clock()
    gpu = replace(HEALTHY, index=2, processes=(OURS, EVE))
    clock.see(gpu)
    (finding,) = clock.state.findings
    assert finding.sentence == "GPU 2: used by another process (python, pid 4711, user eve)"
    assert clock.see(replace(gpu, processes=(OURS,)), seconds=4)
    assert clock.see(replace(gpu, processes=(OURS,)), seconds=3) == []
    (text,) = Clock().see(replace(HEALTHY, processes=(GHOST, OURS)), seconds=30)
    assert "not visible" in text


def test_memory_errors_count_from_the_beginning_of_the_run():
    clock = Clock()
    old = replace(HEALTHY, ecc_uncorrected=3)
    assert clock.see(old, seconds=5) == []
    assert clock.see(replace(old, ecc_uncorrected=5)) == [
        "2 uncorrected memory errors during the run"
    ]
    # The driver was loaded anew and counts from zero.
    clock.see(replace(old, ecc_uncorrected=0), seconds=10)
    assert clock.see(replace(old, ecc_uncorrected=0)) == []
    assert clock.see(replace(old, ecc_uncorrected=1)) == [
        "1 uncorrected memory error during the run"
    ]


def test_faulty_memory_and_links():
    assert "reset" in Clock().see(replace(HEALTHY, repair_pending=True))[0]
    failed = replace(HEALTHY, repair_pending=True, repair_failed=True)
    assert "replace the GPU" in Clock().see(failed)[0]
    clock = Clock()
    clock.see(HEALTHY)
    assert clock.see(replace(HEALTHY, nvlinks_up=16)) == ["2 of 18 NVLinks went down"]
    assert clock.see(HEALTHY, seconds=6) == []
    narrow = replace(HEALTHY, pcie_width=4, pcie_generation=3)
    assert Clock().see(narrow, seconds=30) == [
        "PCIe link runs as generation 3 of 5", "PCIe link with 4 of 16 lanes",
    ]  # fmt: skip


def test_xid_is_shown_for_a_while_with_its_age():
    clock = Clock()
    clock.see(HEALTHY)
    hit = replace(HEALTHY, xid_code=79, xid_at=clock.now - 1)
    assert clock.see(hit) == ["XID 79: the GPU fell off the bus (1 s ago)"]
    assert clock.state.findings[0].level == "error"
    assert clock.see(hit, seconds=300)[0].endswith("(5 min ago)")
    assert clock.see(hit, seconds=310) == []


def test_a_second_xid_counts_from_its_own_time():
    clock = Clock()
    clock.see(replace(HEALTHY, xid_code=13, xid_at=clock.now), seconds=60)
    assert clock.see(replace(HEALTHY, xid_code=31, xid_at=clock.now)) == [
        "XID 31: a kernel accessed memory that it does not own (page fault) (0 s ago)"
    ]


def test_a_hanging_driver_is_told_once():
    clock = Clock()
    gpus = [
        replace(g, blocked=True, error="not read for 4 s: driver call for GPU 1 hangs")
        for g in others(1.0, 1.0, 1.0)
    ]
    gpus[1] = replace(gpus[1], blocked=None, error="driver has not answered for 4 s")
    assert clock.see(*gpus) == ["driver has not answered for 4 s"]
    assert clock.state.findings[0].place == "GPU 1"
    assert clock.see(*others(1980.0, 1980.0, 1980.0)) == []


def test_old_readings_are_no_evidence():
    hot = replace(HEALTHY, throttle_reasons=("thermal slowdown",), sampled_at=1000.0)
    state, shown = FindingsState(), []
    for now in range(1000, 1020):
        state = update_findings(state, [hot], RANKS, float(now))
        shown.append(bool(state.findings))
    assert shown[4]
    assert not shown[-1]


def test_errors_come_first_and_a_lost_gpu_is_one_finding():
    clock = Clock()
    full = replace(HEALTHY, memory_used_bytes=99)
    clock.see(full, seconds=10)
    assert clock.see(full, replace(HEALTHY, index=1, error="fell off the bus")) == [
        "fell off the bus", "memory at 99 %",
    ]  # fmt: skip
    clock = Clock()
    lost = replace(HEALTHY, error="fell off the bus", xid_code=79, xid_at=clock.now)
    (text,) = clock.see(lost)
    assert text.startswith("XID 79: the GPU fell off the bus")
    # Another XID does not say why the GPU can't be read.
    assert clock.see(replace(lost, xid_code=13))[0] == "fell off the bus"
