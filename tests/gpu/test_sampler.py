"""The whole path from the driver's C interface to readings: the sampler over the stand-in."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from ltui.training.gpu.reading import NO_DRIVER, NO_GPU
from ltui.training.gpu.sampler import GpuSampler

NOBODY = 4_194_305
"""Above the largest process id there can be."""


def complete(count):
    """Every GPU has been read, the rates too, which need two samples."""
    return lambda view: (
        len(view.readings) == count
        and all(r.error or (r.sampled_at and view.note is None) for r in view.readings)
    )


def test_everything_an_h100_tells(under):
    gpus = under("gpus 1 h100\nprocess 0 self 43e9\nset 0 throttle 0x24 fan !NOT_SUPPORTED\n",
                 sampling=True)  # fmt: skip
    view = gpus.view_when(lambda v: v.readings and v.readings[0].sm_activity is not None)
    (r,) = view.readings
    assert (r.index, r.label, r.name) == (0, "0", "NVIDIA H100 80GB HBM3")
    assert (r.utilisation_percent, r.memory_utilisation_percent) == (97, 58)
    assert (r.memory_used_bytes, r.memory_total_bytes) == (43_000_000_000, 85_520_809_984)
    assert (r.power_w, r.power_limit_w) == (540, 700)
    assert (r.temperature_c, r.memory_temperature_c) == (61, 70)
    assert r.slowdown_temperature_c == 61 + 26 + 2
    assert (r.sm_clock_mhz, r.sm_clock_max_mhz, r.memory_clock_mhz) == (1980, 1980, 2619)
    assert r.throttle_reasons == ("power cap", "thermal slowdown")
    assert r.fan_percent is None
    assert r.performance_state == 0
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
    assert process.pid == gpus.process.pid
    assert process.memory_bytes == 43_000_000_000
    assert process.visible
    assert process.user
    assert process.name


def test_without_gpm_links_are_measured_by_their_counters(under):
    gpus = under("gpus 1 a100\n", sampling=True)
    view = gpus.view_when(
        lambda v: v.readings and None not in (
            v.readings[0].nvlink_tx_bytes_per_s, v.readings[0].pcie_tx_bytes_per_s
        )
    )  # fmt: skip
    (r,) = view.readings
    assert r.nvlink_tx_bytes_per_s == pytest.approx(21e6 * 1024, rel=0.2)
    assert r.pcie_rx_bytes_per_s == 900e6
    assert r.slowdown_temperature_c == 89
    assert r.sm_activity is None
    assert r.tensor_activity is None


def test_a_gpu_that_tells_nothing_has_no_zeros(under):
    gpus = under("gpus 1 bare\n", sampling=True)
    (r,) = gpus.view_when(complete(1)).readings
    told = {f: getattr(r, f) for f in r.__struct_fields__}
    given = {f for f, value in told.items() if value is not None}
    # The list of processes is empty, not unknown.
    assert given == {
        "index", "label", "uuid", "name", "sampled_at", "mig_enabled", "processes",
    }  # fmt: skip
    assert r.processes == ()


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


def test_a_mixture_with_and_without_gpm(under):
    gpus = under("gpus 1 h100\ngpus 1 a100\ngpus 1 rtx4090\ngpus 1 t4\n", sampling=True)
    view = gpus.view_when(lambda v: len(v.readings) == 4 and v.readings[0].sm_activity)
    assert [r.sm_activity is not None for r in view.readings] == [True, False, False, False]
    assert [r.fan_percent for r in view.readings] == [None, None, 54, None]
    assert [r.ecc_corrected for r in view.readings] == [0, 0, None, 0]


def test_one_refusal_leaves_the_rest(under):
    gpus = under("gpus 1 h100\nfail 0 DeviceGetUtilizationRates NO_PERMISSION\n", sampling=True)
    read = complete(1)
    (r,) = gpus.view_when(lambda v: read(v) and v.readings[0].power_w == 540).readings
    assert r.utilisation_percent is None
    assert r.error is None


def test_what_is_refused_is_not_asked_every_time(under):
    per_sample = {}
    for model in ("h100", "bare"):
        gpus = under(f"gpus 8 {model}\n", sampling=True)
        first = gpus.view_when(complete(8)).readings[7].sampled_at
        gpus.view_when(lambda v, since=first: v.readings[7].sampled_at >= since + 1.0)
        before, at = gpus.ask("(sampler._client.calls, sampler._latest[7].sampled_at)")
        gpus.view_when(lambda v, since=at: v.readings[7].sampled_at >= since + 1.0)
        after, later = gpus.ask("(sampler._client.calls, sampler._latest[7].sampled_at)")
        per_sample[model] = (after - before) / ((later - at) / 0.1)
    assert per_sample["bare"] < per_sample["h100"] / 3


def test_a_gpu_lost_in_mid_run(under):
    gpus = under("gpus 3 h100\n", sampling=True)
    uuid = gpus.view_when(complete(3)).readings[1].uuid
    gpus.steer("gpus 3 h100\nlost 1\n")
    view = gpus.view_when(lambda v: v.readings[1].error is not None)
    assert view.readings[1].error == "fell off the bus"
    assert view.readings[1].uuid == uuid
    assert view.readings[1].power_w is None
    at = view.readings[2].sampled_at
    view = gpus.view_when(lambda v: v.readings[2].sampled_at > at + 0.3)
    assert (view.readings[0].error, view.readings[2].error, view.note) == (None, None, None)
    gpus.steer("gpus 3 h100\n")
    gpus.view_when(lambda v: v.readings[1].power_w == 540)


def test_a_gpu_that_is_lost_before_it_was_ever_read(under):
    gpus = under("gpus 2 h100\nlost 1\n", sampling=True)
    view = gpus.view_when(lambda v: len(v.readings) == 2)
    assert view.readings[0].error is None
    assert "the driver lost this GPU" in view.readings[1].error
    gpus.steer("gpus 2 h100\n")
    gpus.view_when(lambda v: v.readings[1].power_w == 540)


def test_a_driver_that_goes_and_comes_back(under):
    gpus = under("gpus 2 h100\n", sampling=True)
    gpus.view_when(complete(2))
    gpus.steer("gpus 2 h100\nfail * * UNINITIALIZED\n")
    view = gpus.view_when(lambda v: v.note is not None)
    assert "driver is no longer available" in view.note
    gpus.steer("gpus 2 h100\nset * power 99\n")
    gpus.view_when(lambda v: complete(2)(v) and v.readings[1].power_w == 99)


# -- hangs -----------------------------------------------------------------------------------------


def test_a_call_that_hangs_is_itself_a_reading(under):
    gpus = under("gpus 4 h100\n", sampling=True)
    gpus.view_when(complete(4))
    gpus.steer("gpus 4 h100\nhang 2 DeviceGetPowerUsage forever\n")
    view = gpus.view_when(lambda v: v.not_answering_s is not None)
    age = f"for {view.not_answering_s:.0f} s"
    assert view.note.startswith(f"driver has not answered {age} (DeviceGetPowerUsage, GPU 2)")
    held_up, hanging = (
        f"not read {age}: driver call for GPU 2 hangs",
        f"driver has not answered {age}",
    )
    assert [r.error for r in view.readings] == [held_up, held_up, hanging, held_up]
    # What was last known stays, with its time.
    assert view.readings[2].power_w == 540
    assert view.readings[2].sampled_at < time.time() - 1.5
    later = gpus.view_when(lambda v: (v.not_answering_s or 0) > view.not_answering_s + 0.5)
    assert later.readings[2].sampled_at == view.readings[2].sampled_at
    gpus.steer("gpus 4 h100\nset 2 power 321\n")
    view = gpus.view_when(lambda v: v.readings[2].power_w == 321)
    assert (view.note, view.readings[2].error) == (None, None)


def test_the_first_round_is_complete_when_every_gpu_was_read(under):
    gpus = under("gpus 4 h100\nhang 2 DeviceGetPowerUsage forever\n", sampling=True)
    view = gpus.view_when(lambda v: len(v.readings) == 2)
    assert not view.complete
    gpus.steer("gpus 4 h100\n")
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


def test_stop_ends_the_thread(under):
    gpus = under("gpus 8 h100\n", sampling=True)
    gpus.view_when(complete(8))
    assert gpus.ask("sampler.stop(10.0)") is True


def test_stop_in_this_process_leaves_no_thread():
    """Whether or not this machine has a driver; the suite's hygiene looks for what is left."""
    assert GpuSampler(period_s=0.05).stop(10.0)


# -- XIDs, processes, slices -----------------------------------------------------------------------


def test_xids(under):
    gpus = under("gpus 2 h100\n", sampling=True)
    gpus.view_when(complete(2))
    gpus.steer("gpus 2 h100\nxid 1 31\nxid 1 79\nlost 1\n")
    view = gpus.view_when(lambda v: v.readings[1].last_xid and v.readings[1].last_xid.code == 79)
    told = gpus.ask("sampler.take_xids()")
    assert [(x.index, x.code) for x in told] == [(1, 31), (1, 79)]
    assert told[0].uuid == view.readings[1].uuid
    assert abs(told[0].at - time.time()) < 20
    assert gpus.ask("sampler.take_xids()") == ()
    assert view.readings[0].last_xid is None
    gpus.view_when(lambda v: v.readings[1].error == "fell off the bus")


def test_no_xids_where_the_driver_refuses_events(under):
    gpus = under("gpus 1 h100\nfail 0 DeviceRegisterEvents NOT_SUPPORTED\n", sampling=True)
    gpus.view_when(complete(1))
    gpus.steer("gpus 1 h100\nxid 0 79\nset 0 power 77\n")
    gpus.view_when(lambda v: v.readings[0].power_w == 77)
    assert gpus.ask("sampler.take_xids()") == ()


def test_who_is_on_a_gpu(under):
    other = subprocess.Popen(["sleep", "60"], env={**os.environ, "LTUI_RUN_ID": "brave-owl-3f2a"})
    try:
        script = f"gpus 1 h100\nprocess 0 {other.pid} 2e9\nprocess 0 {NOBODY} -1\n"
        gpus = under(script, sampling=True)
        (r,) = gpus.view_when(complete(1)).readings
        mine, ghost = r.processes
        assert (mine.pid, mine.name, mine.run_id) == (other.pid, "sleep", "brave-owl-3f2a")
        assert (ghost.pid, ghost.visible, ghost.user, ghost.memory_bytes) == (
            NOBODY, False, None, None,
        )  # fmt: skip
    finally:
        other.kill()
        other.wait()


def test_a_process_without_its_memory_is_listed(under):
    """Inside a container, some drivers say 0 bytes."""
    gpus = under(f"gpus 1 h100\nprocess 0 {os.getpid()} 0\n", sampling=True)
    (r,) = gpus.view_when(complete(1)).readings
    assert [(p.pid, p.memory_bytes) for p in r.processes] == [(os.getpid(), None)]


def test_slices_come_and_go(under):
    gpus = under("gpus 2 h100\n", sampling=True)
    gpus.view_when(complete(2))
    gpus.steer(
        "gpus 2 h100\nslice 1 0 3 0 1g.10gb 10e9\nslice 1 2 5 0 2g.20gb 20e9\n"
        "set 1/2 mem_used 7e9 gpm 1 sm_activity 66\nprocess 1/2 self 7e9\n"
    )
    view = gpus.view_when(lambda v: len(v.readings) == 4 and v.readings[3].sm_activity)
    assert [r.label for r in view.readings] == ["0", "1", "1/0", "1/2"]
    whole, first, second = view.readings[1:]
    assert whole.mig_enabled
    assert whole.utilisation_percent is None
    assert whole.power_w == 540
    assert (first.parent, second.parent, second.gpu_instance) == (1, 1, 5)
    assert (first.memory_total_bytes, second.memory_used_bytes) == (10**10, 7 * 10**9)
    assert (first.sm_activity, second.sm_activity) == (None, 0.66)
    assert first.processes == ()
    assert [p.pid for p in second.processes] == [gpus.process.pid]
    assert second.power_w is None
    gpus.steer("gpus 2 h100\n")
    view = gpus.view_when(lambda v: len(v.readings) == 2 and not v.readings[1].mig_enabled)
    assert view.note is None
