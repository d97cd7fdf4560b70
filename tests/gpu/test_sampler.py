"""The whole path from the driver's C interface to readings: the sampler over the stand-in."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pynvml
import pytest

from ltui.training.gpu import sampler
from ltui.training.gpu.reading import NO_DRIVER, NO_GPU

NOBODY = 4_194_305
"""Above the largest process id there can be."""
MODELS = f"""
gpus 1 h100
gpus 1 a100
gpus 1 rtx4090
gpus 1 t4
gpus 1 bare
gpus 1 h100
set 0 throttle 0x24 fan !NOT_SUPPORTED
process 0 self 43e9
process 1 {{other}} 2e9
process 1 {NOBODY} -1
process 3 {os.getpid()} 0
fail 5 DeviceGetUtilizationRates NO_PERMISSION
"""
FOUR = "gpus 4 h100\n"


def complete(count):
    """Every GPU has been read, the rates too, which need two samples."""
    return lambda view: (
        len(view.readings) == count
        and all(r.error or (r.sampled_at and view.note is None) for r in view.readings)
    )


@pytest.fixture(scope="module")
def models(shared_under):
    """The process that reads GPUs of five models, a process on one of them, and the readings."""
    environment = {**os.environ, "LTUI_RUN_ID": "brave-owl-3f2a"}
    with subprocess.Popen(["sleep", "600"], env=environment) as other:
        try:
            gpus = shared_under(MODELS.format(other=other.pid), sampling=True)
            view = gpus.view_when(
                lambda v: (
                    complete(6)(v)
                    and v.readings[0].sm_activity is not None
                    and v.readings[1].nvlink_tx_bytes_per_s is not None
                    and v.readings[1].pcie_tx_bytes_per_s is not None
                )
            )
            yield gpus, other, view.readings
        finally:
            other.kill()


def test_everything_an_h100_tells(models):
    gpus, _, (r, *_) = models
    assert (r.index, r.label, r.name) == (0, "0", "NVIDIA H100 80GB HBM3")
    assert (r.utilisation_percent, r.memory_utilisation_percent) == (97, 58)
    assert (r.memory_used_bytes, r.memory_total_bytes) == (43_000_000_000, 85_520_809_984)
    assert (r.power_w, r.power_limit_w) == (540, 700)
    assert (r.temperature_c, r.memory_temperature_c) == (61, 70)
    assert r.slowdown_temperature_c == 61 + 26 + 2
    assert (r.sm_clock_mhz, r.sm_clock_max_mhz, r.memory_clock_mhz) == (1980, 1980, 2619)
    assert r.throttle_reasons == ("power cap", "thermal slowdown")
    assert (r.fan_percent, r.performance_state) == (None, 0)
    assert (r.pcie_generation, r.pcie_generation_max) == (5, 5)
    assert (r.pcie_width, r.pcie_width_max) == (16, 16)
    assert r.pcie_tx_bytes_per_s == pytest.approx(210e6)
    assert r.pcie_rx_bytes_per_s == pytest.approx(1450e6)
    assert (r.nvlinks, r.nvlinks_up, r.nvlink_errors) == (18, 18, 0)
    assert r.nvlink_tx_bytes_per_s == pytest.approx(41e6 * 1024, rel=1e-3)
    assert (r.ecc_corrected, r.ecc_uncorrected) == (0, 0)
    assert (r.retired_pages, r.remapped_rows) == (None, 0)
    assert (r.repair_pending, r.repair_failed) == (False, False)
    assert (r.sm_activity, r.sm_occupancy) == (0.84, pytest.approx(0.31))
    assert (r.tensor_activity, r.dram_activity) == (pytest.approx(0.38), 0.52)
    (process,) = r.processes
    assert (process.pid, process.memory_bytes) == (gpus.process.pid, 43_000_000_000)
    assert process.visible
    assert process.user
    assert process.name


def test_without_gpm_links_are_measured_by_their_counters(models):
    r = models[2][1]
    assert r.nvlink_tx_bytes_per_s == pytest.approx(21e6 * 1024, rel=0.2)
    assert r.pcie_rx_bytes_per_s == 900e6
    assert r.slowdown_temperature_c == 89
    assert (r.sm_activity, r.tensor_activity) == (None, None)


def test_a_gpu_that_tells_nothing_has_no_zeros(models):
    r = models[2][4]
    given = {f for f in r.__struct_fields__ if getattr(r, f) is not None}
    # The list of processes is empty, not unknown.
    assert given == {
        "index", "label", "uuid", "name", "sampled_at", "mig_enabled", "processes",
    }  # fmt: skip
    assert r.processes == ()


def test_models_differ_in_what_they_have(models):
    readings = models[2][:4]
    assert [r.sm_activity is not None for r in readings] == [True, False, False, False]
    assert [r.fan_percent for r in readings] == [None, None, 54, None]
    assert [r.ecc_corrected for r in readings] == [0, 0, None, 0]


def test_one_refusal_leaves_the_rest(models):
    r = models[2][5]
    assert (r.utilisation_percent, r.power_w, r.error) == (None, 540, None)


def test_who_is_on_a_gpu(models):
    _, other, readings = models
    mine, ghost = readings[1].processes
    assert (mine.pid, mine.name, mine.run_id) == (other.pid, "sleep", "brave-owl-3f2a")
    assert (ghost.pid, ghost.visible, ghost.user, ghost.memory_bytes) == (NOBODY, False, None, None)
    # Inside a container, some drivers say 0 bytes.
    assert [(p.pid, p.memory_bytes) for p in readings[3].processes] == [(os.getpid(), None)]


def test_the_stand_in_has_every_function_that_the_sampler_calls(models):
    """Symbols as this release of the bindings looks them up."""
    used: set[str] = set()
    for path in Path(sampler.__file__).parent.glob("*.py"):
        used |= set(re.findall(r"pynvml\.(nvml[A-Z]\w+)", path.read_text()))
    used = {name for name in used if callable(getattr(pynvml, name, None))}
    assert len(used) > 30
    symbols: set[str] = set()
    while used:
        source = inspect.getsource(inspect.unwrap(getattr(pynvml, used.pop())))
        found = set(re.findall(r'_nvmlGetFunctionPointer\("(\w+)"\)', source))
        symbols |= found
        if not found:  # a wrapper of another version of the call
            used |= set(re.findall(r"return (nvml\w+)\(", source))
    asked = f"[s for s in {sorted(symbols)} if not hasattr(nvml.nvmlLib, s)]"
    assert models[0].ask(asked) == []


def test_no_driver():
    program = (
        "import time; from ltui.training.gpu.sampler import GpuSampler; s = GpuSampler()\n"
        "while s._thread.is_alive(): time.sleep(0.01)\n"
        "print(s.latest().note, len(s.latest().readings), s.stop(1.0))"
    )
    env = {k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60
    )
    if "no NVIDIA driver" not in done.stdout:
        pytest.skip("this machine has an NVIDIA driver")
    assert done.stdout.strip() == f"{NO_DRIVER} 0 True"


def test_no_gpu(under):
    gpus = under("", sampling=True)
    assert gpus.view_when(lambda v: v.note == NO_GPU).readings == ()


def test_a_driver_that_is_loaded_later(under):
    gpus = under("init DRIVER_NOT_LOADED\n", sampling=True)
    assert gpus.view_when(lambda v: v.note == NO_DRIVER).readings == ()
    gpus.steer("gpus 1 h100\n")
    gpus.view_when(complete(1))


def test_64_gpus(under):
    gpus = under("gpus 64 h100\nset 63 power 123\n", sampling=True)
    view = gpus.view_when(complete(64))
    assert [r.index for r in view.readings] == list(range(64))
    assert view.readings[63].power_w == 123
    assert view.readings[62].power_w == 540
    assert gpus.ask("sampler.stop(10.0)") is True


@pytest.fixture(scope="module")
def four_h100s(shared_under):
    return shared_under(FOUR, sampling=True)


@pytest.fixture
def four(four_h100s):
    """The sampler of four GPUs without problems, and without XIDs that were not taken."""
    four_h100s.steer(FOUR)
    four_h100s.view_when(lambda v: complete(4)(v) and not any(r.error for r in v.readings))
    return four_h100s


def test_a_gpu_lost_in_mid_run(four):
    uuid = four.view_when(complete(4)).readings[1].uuid
    four.steer(f"{FOUR}lost 1\n")
    view = four.view_when(lambda v: v.readings[1].error is not None)
    assert view.readings[1].error == "fell off the bus"
    assert view.readings[1].uuid == uuid
    assert view.readings[1].power_w is None
    at = view.readings[2].sampled_at
    view = four.view_when(lambda v: v.readings[2].sampled_at > at + 0.3)
    assert (view.readings[0].error, view.readings[2].error, view.note) == (None, None, None)
    four.steer(FOUR)
    four.view_when(lambda v: v.readings[1].power_w == 540)


def test_a_gpu_that_is_lost_before_it_was_ever_read(under):
    gpus = under("gpus 2 h100\nlost 1\n", sampling=True)
    view = gpus.view_when(lambda v: len(v.readings) == 2)
    assert view.readings[0].error is None
    assert "the driver lost this GPU" in view.readings[1].error
    gpus.steer("gpus 2 h100\n")
    gpus.view_when(lambda v: v.readings[1].power_w == 540)


def test_a_driver_that_goes_and_comes_back(four):
    four.steer(f"{FOUR}fail * * UNINITIALIZED\n")
    view = four.view_when(lambda v: v.note is not None)
    assert "driver is no longer available" in view.note
    four.steer(f"{FOUR}set * power 99\n")
    four.view_when(lambda v: complete(4)(v) and v.readings[1].power_w == 99)


# -- hangs -----------------------------------------------------------------------------------------


def test_a_call_that_hangs_is_itself_a_reading(four):
    four.steer(FOUR)
    four.view_when(lambda v: complete(4)(v) and all(r.power_w == 540 for r in v.readings))
    four.steer(f"{FOUR}hang 2 DeviceGetPowerUsage forever\n")
    view = four.view_when(lambda v: v.not_answering_s is not None)
    age = f"for {view.not_answering_s:.0f} s"
    assert view.note.startswith(f"driver has not answered {age} (DeviceGetPowerUsage, GPU 2)")
    held_up = f"not read {age}: driver call for GPU 2 hangs"
    hanging = f"driver has not answered {age}"
    assert [r.error for r in view.readings] == [held_up, held_up, hanging, held_up]
    # What was last known stays, with its time.
    assert view.readings[2].power_w == 540
    assert view.readings[2].sampled_at < time.time() - 1.5
    later = four.view_when(lambda v: (v.not_answering_s or 0) > view.not_answering_s + 0.5)
    assert later.readings[2].sampled_at == view.readings[2].sampled_at
    four.steer(f"{FOUR}set 2 power 321\n")
    view = four.view_when(lambda v: v.readings[2].power_w == 321)
    assert (view.note, view.readings[2].error) == (None, None)


def test_the_first_round_is_complete_when_every_gpu_was_read(under):
    gpus = under(f"{FOUR}hang 2 DeviceGetPowerUsage forever\n", sampling=True)
    view = gpus.view_when(lambda v: len(v.readings) == 2)
    assert not view.complete
    gpus.steer(FOUR)
    assert len(gpus.view_when(lambda v: v.complete).readings) == 4


def test_a_process_ends_while_the_driver_hangs(under):
    gpus = under("gpus 1 h100\n", sampling=True)
    gpus.view_when(complete(1))
    gpus.steer("gpus 1 h100\nhang 0 * forever\n")
    gpus.view_when(lambda v: v.not_answering_s is not None)
    assert gpus.ask("sampler.stop(0.2)") is False
    assert gpus.close() == 0


def test_opening_the_driver_hangs(under):
    gpus = under("gpus 1 h100\nhang - Init forever\n", sampling=True)
    view = gpus.view_when(lambda v: v.not_answering_s is not None)
    assert view.note == f"driver has not answered for {view.not_answering_s:.0f} s (Init)"
    assert view.readings == ()
    gpus.steer("gpus 1 h100\n")
    gpus.view_when(complete(1))


def test_stop_in_this_process_leaves_no_thread():
    """Whether or not this machine has a driver; the suite's hygiene looks for what is left."""
    assert sampler.GpuSampler(period_s=0.05).stop(10.0)


# -- XIDs and slices -------------------------------------------------------------------------------


def test_xids(four):
    four.steer(f"{FOUR}xid 1 31\nxid 1 79\nlost 1\n")
    view = four.view_when(lambda v: v.readings[1].last_xid and v.readings[1].last_xid.code == 79)
    told = four.ask("sampler.take_xids()")
    assert [(x.index, x.code) for x in told] == [(1, 31), (1, 79)]
    assert told[0].uuid == view.readings[1].uuid
    assert abs(told[0].at - time.time()) < 20
    assert four.ask("sampler.take_xids()") == ()
    assert view.readings[0].last_xid is None
    four.view_when(lambda v: v.readings[1].error == "fell off the bus")


def test_no_xids_where_the_driver_refuses_events(under):
    gpus = under("gpus 1 h100\nfail 0 DeviceRegisterEvents NOT_SUPPORTED\n", sampling=True)
    gpus.view_when(complete(1))
    gpus.steer("gpus 1 h100\nxid 0 79\nset 0 power 77\n")
    gpus.view_when(lambda v: v.readings[0].power_w == 77)
    assert gpus.ask("sampler.take_xids()") == ()


def test_slices_come_and_go(four):
    four.steer(
        f"{FOUR}slice 1 0 3 0 1g.10gb 10e9\nslice 1 2 5 0 2g.20gb 20e9\n"
        "set 1/2 mem_used 7e9 gpm 1 sm_activity 66\nprocess 1/2 self 7e9\n"
    )
    view = four.view_when(lambda v: len(v.readings) == 6 and v.readings[5].sm_activity)
    assert [r.label for r in view.readings] == ["0", "1", "2", "3", "1/0", "1/2"]
    whole, (first, second) = view.readings[1], view.readings[4:]
    assert whole.mig_enabled
    assert (whole.utilisation_percent, whole.power_w) == (None, 540)
    assert (first.parent, second.parent, second.gpu_instance) == (1, 1, 5)
    assert (first.memory_total_bytes, second.memory_used_bytes) == (10**10, 7 * 10**9)
    assert (first.sm_activity, second.sm_activity) == (None, 0.66)
    assert first.processes == ()
    assert [p.pid for p in second.processes] == [four.process.pid]
    assert second.power_w is None
    four.steer(FOUR)
    view = four.view_when(lambda v: len(v.readings) == 4 and not v.readings[1].mig_enabled)
    assert view.note is None
