"""Runs ``check_readings.py`` where there is a GPU to check the readings against."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.standin import nvml_stand_in

PROGRAM = Path(__file__).with_name("check_readings.py")


def _why_not() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return "no NVIDIA driver on this machine (no nvidia-smi)"
    if subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=60).returncode != 0:
        return "nvidia-smi finds no working driver"
    asked = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    if subprocess.run([sys.executable, "-c", asked], timeout=100).returncode != 0:
        return "torch sees no CUDA device"
    return None


# As nvidia-smi -q -x of driver 575 names things, for the stand-in's H100.
DOCUMENT = """<nvidia_smi_log><driver_version>575.57.08</driver_version><gpu>
<product_name>NVIDIA H100 80GB HBM3</product_name>
<uuid>GPU-5eed0000-0000-4000-8000-000000000000</uuid>
<pci><pci_gpu_link_info><pcie_gen><max_link_gen>5</max_link_gen>
<current_link_gen>5</current_link_gen></pcie_gen><link_widths><max_link_width>16x</max_link_width>
<current_link_width>16x</current_link_width></link_widths></pci_gpu_link_info></pci>
<fan_speed>N/A</fan_speed><performance_state>P0</performance_state>
<clocks_event_reasons><clocks_event_reason_sw_power_cap>Active</clocks_event_reason_sw_power_cap>
<clocks_event_reason_hw_thermal_slowdown>Not Active</clocks_event_reason_hw_thermal_slowdown>
</clocks_event_reasons>
<fb_memory_usage><total>81559 MiB</total><used>41008 MiB</used></fb_memory_usage>
<utilization><gpu_util>97 %</gpu_util><memory_util>58 %</memory_util></utilization>
<remapped_rows><remapped_row_corr>0</remapped_row_corr><remapped_row_unc>0</remapped_row_unc>
</remapped_rows>
<temperature><gpu_temp>61 C</gpu_temp><gpu_temp_tlimit>26 C</gpu_temp_tlimit>
<gpu_temp_slow_tlimit_threshold>-2 C</gpu_temp_slow_tlimit_threshold>
<memory_temp>70 C</memory_temp></temperature>
<gpu_power_readings><average_power_draw>540.11 W</average_power_draw>
<current_power_limit>700.00 W</current_power_limit></gpu_power_readings>
<clocks><sm_clock>1980 MHz</sm_clock><mem_clock>2619 MHz</mem_clock></clocks>
<max_clocks><sm_clock>1980 MHz</sm_clock></max_clocks></gpu></nvidia_smi_log>"""


@pytest.mark.parametrize(
    ("wrong", "code"), [(("", ""), 0), (("540.11", "71.00"), 1), (("70 C", "N/A"), 1)]
)
def test_the_comparison_notices(library, tmp_path, wrong, code):
    """The script itself, over the stand-in and an answer of nvidia-smi written by hand."""
    answer = tmp_path / "answer.xml"
    answer.write_text(DOCUMENT.replace(*wrong) if wrong[0] else DOCUMENT)
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\ncat {answer}\n")
    smi.chmod(0o755)
    script = tmp_path / "gpus.txt"
    script.write_text("gpus 1 h100\nset 0 throttle 4\n")
    env = nvml_stand_in.environment(library.parent, script)
    env["PATH"] = f"{tmp_path}{os.pathsep}{env['PATH']}"
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--only", "smi"],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert ("OFF" in done.stdout) == bool(code)


@pytest.mark.timeout(300)
def test_readings_are_true(tmp_path):
    if reason := _why_not():
        pytest.skip(reason)
    figures = tmp_path / "readings.json"
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--json", str(figures)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert figures.is_file()
