"""A simulated GPU for rehearsals: the stand-in for NVML, and an nvidia-smi that reads it.

python -m tests.gpu.hardware.simulated_driver ARGUMENTS    answers like ``nvidia-smi ARGUMENTS``
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import pynvml

from ltui.training.gpu.reading import POWER_CAP, reason_names
from tests.gpu.standin import nvml_stand_in
from tests.run_module import ROOT

MODULE = "tests.gpu.hardware.simulated_driver"
LOADS = {
    "idle": "util 0 mem_util 0 power 75 throttle 1 sm_activity 0 tensor_activity 0 dram_activity 0",
    "product": "util 100 mem_util 40 power 690 throttle 4 sm_activity 96 tensor_activity 80"
    " dram_activity 20",
    "copy": "util 100 mem_util 98 power 480 throttle 0 sm_activity 50 tensor_activity 0"
    " dram_activity 90",
    "upload": "util 60 mem_util 9 power 130 throttle 0 sm_activity 1 tensor_activity 0"
    " dram_activity 2 pcie_rx 25000000",
    "spin": "util 100 mem_util 0 power 120 throttle 0 sm_activity 1 tensor_activity 0"
    " dram_activity 0",
}


class SimulatedDriver:
    """The stand-in with one H100, for this process and those that it starts."""

    def __init__(self, folder: Path) -> None:
        """Build it in ``folder``. Raises ``RuntimeError`` without a C compiler."""
        library = nvml_stand_in.build(folder)
        self._script = folder / "gpus.txt"
        self._lines: dict[str, str] = {}
        self.load("idle")
        os.environ.update(nvml_stand_in.environment(folder, self._script))
        # By its full path, because a process reads LD_LIBRARY_PATH when it starts.
        ctypes.CDLL(str(library))
        program = folder / "nvidia-smi"
        program.write_text(f'#!/bin/sh\ncd {ROOT} && exec {sys.executable} -m {MODULE} "$@"\n')
        program.chmod(0o755)
        os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"

    def load(self, kind: str) -> None:
        """Have the GPU read as under this load."""
        self._write("load", f"set 0 {LOADS[kind]}")

    def hold(self, pid: int | None, held_bytes: int = 0) -> None:
        """Have a process, and no other, hold memory of the GPU."""
        self._write("process", "" if pid is None else f"process 0 {pid} {held_bytes}")

    def _write(self, what: str, line: str) -> None:
        self._lines[what] = line
        text = "\n".join(["gpus 1 h100", *self._lines.values()])
        nvml_stand_in.write_script(self._script, text + "\n")


def main(arguments: list[str]) -> str:
    """Return the answer to the arguments that ``instruments.py`` uses."""
    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    name, driver = pynvml.nvmlDeviceGetName(gpu), pynvml.nvmlSystemGetDriverVersion()
    if arguments[0] == "--query-gpu=name,driver_version":
        return f"{name}, {driver}\n"
    if arguments[0] == "nvlink":
        return f"GPU 0: {name}\n" + "".join(f"\t Link {link}: 26.562 GB/s\n" for link in range(18))
    if arguments == ["-q", "-x"]:
        return _document(gpu, name, driver)
    return f"nvidia-smi {' '.join(arguments)} is not simulated\n"


def _document(gpu: object, name: str, driver: str) -> str:
    """Return the XML document, with names of entries as in driver 575 and newer."""
    memory = pynvml.nvmlDeviceGetMemoryInfo(gpu, pynvml.nvmlMemory_v2)
    use = pynvml.nvmlDeviceGetUtilizationRates(gpu)
    capped = POWER_CAP in reason_names(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu))
    processes = "".join(
        f"<process_info><pid>{process.pid}</pid><type>C</type>"
        f"<used_memory>{process.usedGpuMemory >> 20} MiB</used_memory></process_info>"
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)
    )
    return f"""<nvidia_smi_log><driver_version>{driver}</driver_version><gpu>
<product_name>{name}</product_name><uuid>{pynvml.nvmlDeviceGetUUID(gpu)}</uuid>
<pci><pci_gpu_link_info><pcie_gen><max_link_gen>5</max_link_gen>
<current_link_gen>5</current_link_gen></pcie_gen><link_widths><max_link_width>16x</max_link_width>
<current_link_width>16x</current_link_width></link_widths></pci_gpu_link_info></pci>
<fan_speed>N/A</fan_speed><performance_state>P0</performance_state>
<clocks_event_reasons><clocks_event_reason_sw_power_cap>{"Active" if capped else "Not Active"}
</clocks_event_reason_sw_power_cap></clocks_event_reasons>
<fb_memory_usage><total>{memory.total >> 20} MiB</total><used>{memory.used >> 20} MiB</used>
</fb_memory_usage><utilization><gpu_util>{use.gpu} %</gpu_util>
<memory_util>{use.memory} %</memory_util></utilization>
<ecc_errors><volatile><sram_correctable>0</sram_correctable>
<sram_uncorrectable_parity>0</sram_uncorrectable_parity><dram_correctable>0</dram_correctable>
<dram_uncorrectable>0</dram_uncorrectable></volatile></ecc_errors>
<retired_pages><pending_retirement>N/A</pending_retirement></retired_pages>
<remapped_rows><remapped_row_corr>0</remapped_row_corr><remapped_row_unc>0</remapped_row_unc>
<remapped_row_pending>No</remapped_row_pending><remapped_row_failure>No</remapped_row_failure>
</remapped_rows><temperature><gpu_temp>61 C</gpu_temp><gpu_temp_tlimit>26 C</gpu_temp_tlimit>
<gpu_temp_slow_tlimit_threshold>-2 C</gpu_temp_slow_tlimit_threshold>
<memory_temp>70 C</memory_temp></temperature><gpu_power_readings>
<average_power_draw>{pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000:.2f} W</average_power_draw>
<current_power_limit>700.00 W</current_power_limit></gpu_power_readings>
<clocks><sm_clock>1980 MHz</sm_clock><mem_clock>2619 MHz</mem_clock></clocks>
<max_clocks><sm_clock>1980 MHz</sm_clock></max_clocks>
<processes>{processes}</processes></gpu></nvidia_smi_log>
"""


if __name__ == "__main__":
    print(main(sys.argv[1:]), end="")
