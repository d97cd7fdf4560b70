"""The stand-in driver does what its script says, through the interface of the real one."""

from __future__ import annotations

import inspect
import re
import time
from pathlib import Path

import pynvml
import pytest

from ltui.training.gpu import sampler

GPU_PACKAGE = Path(sampler.__file__).parent
INIT = "nvml.nvmlInit()"


@pytest.mark.parametrize("count", [0, 1, 8, 64])
def test_any_number_of_gpus(under, count):
    driver = under(f"gpus {count} h100\n")
    driver.ask(INIT)
    assert driver.ask("nvml.nvmlDeviceGetCount()") == count
    uuids = driver.ask(f"[nvml.nvmlDeviceGetUUID(gpu(i)) for i in range({count})]")
    assert len(set(uuids)) == count
    assert driver.ask(f"refused(nvml.nvmlDeviceGetHandleByIndex, {count})") == "InvalidArgument"


def test_a_mixture_of_models(under):
    driver = under('gpus 2 h100\ngpus 1 rtx4090\ngpus 1 t4\nset 1 name "My GPU"\n')
    driver.ask(INIT)
    assert driver.ask("[nvml.nvmlDeviceGetName(gpu(i)) for i in range(4)]") == [
        "NVIDIA H100 80GB HBM3", "My GPU", "NVIDIA GeForce RTX 4090", "Tesla T4",
    ]  # fmt: skip


def test_values_over_time(under):
    began = time.time() - 50
    driver = under(
        f"start {began}\ngpus 1 bare\n"
        "set 0 power 0:100,40:100,45:300,60:300 throttle 0@0,49@0x40,1000@0 temp 0@30,60@90\n"
        "set 0 ecc_corrected +2\n"
    )
    driver.ask(INIT)
    assert driver.ask("nvml.nvmlDeviceGetPowerUsage(gpu(0))") == 300_000
    assert driver.ask("nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu(0))") == 0x40
    assert driver.ask("nvml.nvmlDeviceGetTemperature(gpu(0), 0)") == 30
    counted = driver.ask("nvml.nvmlDeviceGetTotalEccErrors(gpu(0), 0, 0)")
    assert 100 <= counted <= 2 * (time.time() - began)


def test_half_way_between_two_points(under):
    driver = under(f"start {time.time() - 1000}\ngpus 1 bare\nset 0 power 0:0,2000:200\n")
    driver.ask(INIT)
    assert driver.ask("nvml.nvmlDeviceGetPowerUsage(gpu(0))") == pytest.approx(100_000, rel=0.05)


def test_a_wave_stays_in_its_bounds_and_moves(under):
    driver = under("gpus 1 bare\nset 0 power ~100,50,0.5\n")
    driver.ask(INIT)
    seen = []
    for _ in range(20):
        seen.append(driver.ask("nvml.nvmlDeviceGetPowerUsage(gpu(0))"))
        time.sleep(0.03)
    assert 50_000 <= min(seen) < 90_000 < 110_000 < max(seen) <= 150_000


def test_steered_while_it_runs(under):
    driver = under("gpus 1 bare\nset 0 fan 20\n")
    driver.ask(INIT)
    assert driver.ask("nvml.nvmlDeviceGetFanSpeed(gpu(0))") == 20
    driver.steer("gpus 1 bare\nset 0 fan 85\n")
    assert driver.ask("nvml.nvmlDeviceGetFanSpeed(gpu(0))") == 85


@pytest.mark.parametrize(
    "line",
    [
        "gpus two h100", "gpus 1 h9000", "gpus 65 h100", "set 7 util 3", "set 0 utilisation 3",
        "set 0 util x", "set 0 power 0:1,2", "set 0 util !NO_SUCH", "process 0 1",
        "xid 0 79 when 3", "fail 0 * NO_SUCH", "hang 0 * long", "slice 0 9 1 0 1g 1", "nonsense 1",
    ],
)  # fmt: skip
def test_a_mistake_in_the_script_is_named(under, line):
    driver = under(f"gpus 1 bare\n\n{line}\n")
    assert driver.ask("refused(nvml.nvmlInit)") == "Unknown"
    assert "script line 3:" in driver.errors.read_text()


def test_a_mistake_while_it_runs_changes_nothing(under):
    driver = under("gpus 1 bare\nset 0 fan 20\n")
    driver.ask(INIT)
    driver.steer("gpus 1 bare\nset 0 fan\n")
    assert driver.ask("nvml.nvmlDeviceGetFanSpeed(gpu(0))") == 20
    assert "script line 2:" in driver.errors.read_text()


def test_a_driver_that_is_not_loaded(under):
    assert under("init DRIVER_NOT_LOADED\n").ask("refused(nvml.nvmlInit)") == "DriverNotLoaded"


def test_calls_before_init_are_refused(under):
    driver = under("gpus 1 h100\n")
    driver.ask("kept.update(lib=nvml._LoadNvmlLibrary())")
    assert driver.ask("refused(nvml.nvmlDeviceGetCount)") == "Uninitialized"


def test_what_the_script_does_not_give_is_refused(under):
    driver = under("gpus 1 bare\n")
    driver.ask(INIT)
    for call in (
        "nvml.nvmlDeviceGetUtilizationRates", "nvml.nvmlDeviceGetMemoryInfo",
        "nvml.nvmlDeviceGetPowerUsage", "nvml.nvmlDeviceGetEnforcedPowerLimit",
        "nvml.nvmlDeviceGetFanSpeed", "nvml.nvmlDeviceGetPerformanceState",
        "nvml.nvmlDeviceGetCurrentClocksThrottleReasons", "nvml.nvmlDeviceGetMigMode",
        "nvml.nvmlDeviceGetCurrPcieLinkWidth", "nvml.nvmlDeviceGetMarginTemperature",
    ):  # fmt: skip
        assert driver.ask(f"refused({call}, gpu(0))") == "NotSupported", call


def test_one_call_fails_and_the_others_do_not(under):
    driver = under("gpus 2 h100\nfail 0 DeviceGetPowerUsage NO_PERMISSION\nset 1 temp !UNKNOWN\n")
    driver.ask(INIT)
    assert driver.ask("refused(nvml.nvmlDeviceGetPowerUsage, gpu(0))") == "NoPermission"
    assert driver.ask("refused(nvml.nvmlDeviceGetPowerUsage, gpu(1))") is None
    assert driver.ask("refused(nvml.nvmlDeviceGetTemperature, gpu(1), 0)") == "Unknown"


def test_a_gpu_falls_off_the_bus_and_comes_back(under):
    driver = under("gpus 2 h100\n")
    driver.ask(INIT)
    driver.ask("kept.update(h=gpu(1))")
    driver.steer("gpus 2 h100\nlost 1\n")
    assert driver.ask("refused(nvml.nvmlDeviceGetPowerUsage, kept['h'])") == "GpuIsLost"
    assert driver.ask("refused(nvml.nvmlDeviceGetPowerUsage, gpu(0))") is None
    driver.steer("gpus 2 h100\n")
    assert driver.ask("refused(nvml.nvmlDeviceGetPowerUsage, kept['h'])") is None


def test_a_vanished_gpu_is_lost_for_who_holds_it(under):
    driver = under("gpus 2 h100\n")
    driver.ask(INIT)
    driver.ask("kept.update(h=gpu(1))")
    driver.steer("gpus 1 h100\n")
    assert driver.ask("refused(nvml.nvmlDeviceGetPowerUsage, kept['h'])") == "GpuIsLost"


def test_xids_reach_only_who_listened_before(under):
    driver = under("gpus 2 h100\nxid 0 13\n")
    driver.ask(INIT)
    driver.ask("kept.update(set=nvml.nvmlEventSetCreate())")
    driver.ask("[nvml.nvmlDeviceRegisterEvents(gpu(i), 8, kept['set']) for i in range(2)]")
    assert driver.ask("refused(nvml.nvmlEventSetWait, kept['set'], 0)") == "Timeout"
    driver.steer("gpus 2 h100\nxid 0 13\nxid 0 13\nxid 1 79\n")
    told = "(lambda e: (e.eventData, nvml.nvmlDeviceGetIndex(e.device)))"
    wait = "nvml.nvmlEventSetWait(kept['set'], 0)"
    assert driver.ask(f"{told}({wait})") == (13, 0)
    assert driver.ask(f"{told}({wait})") == (79, 1)
    assert driver.ask("refused(nvml.nvmlEventSetWait, kept['set'], 0)") == "Timeout"


def test_processes_with_their_memory(under):
    driver = under("gpus 1 h100\nprocess 0 self 3e9\nprocess 0 77 -1\nprocess 0 78 1e6 graphics\n")
    driver.ask(INIT)
    listed = driver.ask(
        "[(p.pid, p.usedGpuMemory) for p in nvml.nvmlDeviceGetComputeRunningProcesses(gpu(0))]"
    )
    assert listed == [(driver.process.pid, 3_000_000_000), (77, None)]
    drawing = driver.ask("[p.pid for p in nvml.nvmlDeviceGetGraphicsRunningProcesses(gpu(0))]")
    assert drawing == [78]


def test_mig_slices(under):
    driver = under("gpus 1 h100\nslice 0 2 9 0 1g.10gb 10e9\nprocess 0/2 self 1e9\n")
    driver.ask(INIT)
    assert driver.ask("nvml.nvmlDeviceGetMigMode(gpu(0))") == [1, 1]
    assert driver.ask("refused(nvml.nvmlDeviceGetMigDeviceHandleByIndex, gpu(0), 0)") == "NotFound"
    part = "nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu(0), 2)"
    assert driver.ask(f"nvml.nvmlDeviceGetUUID({part})").startswith("MIG-")
    assert driver.ask(f"nvml.nvmlDeviceGetGpuInstanceId({part})") == 9
    assert driver.ask(f"nvml.nvmlDeviceGetMemoryInfo({part}).total") == 10_000_000_000
    # A GPU in MIG mode gives no utilisation, and lists the processes of its slices.
    assert driver.ask("refused(nvml.nvmlDeviceGetUtilizationRates, gpu(0))") == "NotSupported"
    assert driver.ask("len(nvml.nvmlDeviceGetComputeRunningProcesses(gpu(0)))") == 1


def test_it_has_every_function_that_the_sampler_calls(under):
    """Symbols as this release of the bindings looks them up."""
    used: set[str] = set()
    for path in GPU_PACKAGE.glob("*.py"):
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
    driver = under("gpus 1 h100\n")
    driver.ask(INIT)
    missing = driver.ask(f"[s for s in {sorted(symbols)} if not hasattr(nvml.nvmlLib, s)]")
    assert missing == []
