"""The judgement of the section ``readings``: a reading that is wrong is not accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from msgspec.structs import fields, replace

from ltui.training.gpu.nvml_device import DRIVER
from ltui.training.gpu.reading import GpuProcess, GpuReading, read_recording
from ltui.training.gpu.run_gpus import RankLocation
from ltui.training.state.gpu_values import GpuValues
from tests.gpu.hardware import instruments
from tests.gpu.hardware.beside_smi import NOT_IN_SMI, beside_smi, processes_beside_smi
from tests.gpu.hardware.check import Check, off
from tests.gpu.hardware.rank_places import judge_place, ways_to_choose
from tests.gpu.hardware.readings import RECORDING, judge_loads, judge_symptoms
from tests.gpu.hardware.section import run_section

# As nvidia-smi -q -x of driver 575 names things, and a reading that says the same.
DOCUMENT = """<gpu><product_name>NVIDIA H100 80GB HBM3</product_name>
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
<ecc_errors><volatile><sram_correctable>1</sram_correctable>
<sram_uncorrectable_parity>0</sram_uncorrectable_parity>
<sram_uncorrectable_secded>2</sram_uncorrectable_secded><dram_correctable>3</dram_correctable>
<dram_uncorrectable>0</dram_uncorrectable></volatile>
<aggregate><sram_correctable>77</sram_correctable></aggregate></ecc_errors>
<retired_pages><multiple_single_bit_retirement><retired_count>N/A</retired_count>
</multiple_single_bit_retirement><pending_retirement>N/A</pending_retirement></retired_pages>
<remapped_rows><remapped_row_corr>1</remapped_row_corr><remapped_row_unc>2</remapped_row_unc>
<remapped_row_pending>No</remapped_row_pending><remapped_row_failure>Yes</remapped_row_failure>
</remapped_rows>
<temperature><gpu_temp>61 C</gpu_temp><gpu_temp_tlimit>26 C</gpu_temp_tlimit>
<gpu_temp_slow_tlimit_threshold>-2 C</gpu_temp_slow_tlimit_threshold>
<memory_temp>70 C</memory_temp></temperature>
<gpu_power_readings><average_power_draw>540.11 W</average_power_draw>
<current_power_limit>700.00 W</current_power_limit></gpu_power_readings>
<clocks><sm_clock>1980 MHz</sm_clock><mem_clock>2619 MHz</mem_clock></clocks>
<max_clocks><sm_clock>1980 MHz</sm_clock></max_clocks>
<processes><process_info><pid>4711</pid><used_memory>512 MiB</used_memory></process_info>
</processes></gpu>"""
READING = GpuReading(
    index=0, label="0", uuid="GPU-5eed0000-0000-4000-8000-000000000000",
    name="NVIDIA H100 80GB HBM3", utilisation_percent=97.0, memory_utilisation_percent=58.0,
    memory_used_bytes=43_000_000_000, memory_total_bytes=85_520_809_984, power_w=538.0,
    power_limit_w=700.0, temperature_c=61.0, memory_temperature_c=70.0,
    slowdown_temperature_c=89.0, sm_clock_mhz=1980.0, sm_clock_max_mhz=1980.0,
    memory_clock_mhz=2619.0, throttle_reasons=("power cap",), performance_state=0,
    pcie_generation=5, pcie_generation_max=5, pcie_width=16, pcie_width_max=16, nvlinks=18,
    nvlinks_up=18, ecc_corrected=4, ecc_uncorrected=2, remapped_rows=3, repair_pending=False,
    repair_failed=True,
)  # fmt: skip
LINKS = (18, 18)


def compared(*readings: GpuReading, document: str = DOCUMENT) -> list[Check]:
    return list(beside_smi(readings, ElementTree.fromstring(document), LINKS))


def test_true_readings_are_accepted() -> None:
    checks = compared(READING)
    assert off(checks) == []
    # Only what neither of them knows is left open.
    assert [c.what for c in checks if c.ok is None] == ["fan_percent", "retired_pages"]


def test_every_field_is_compared_or_has_no_counterpart() -> None:
    compared_fields = {check.what for check in compared(READING)}
    others = {"index", "sampled_at", "error", "blocked"}
    assert {f.name for f in fields(GpuValues)} - others == compared_fields | NOT_IN_SMI


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("uuid", "GPU-5eed0000-0000-4000-8000-000000000001"),
        ("power_w", 71.0),
        ("memory_temperature_c", None),
        ("fan_percent", 0.0),
        ("slowdown_temperature_c", 61.0 + 26.0 - 2.0),
        ("throttle_reasons", ()),
        ("throttle_reasons", ("power cap", "thermal slowdown")),
        ("ecc_corrected", 81),
        ("ecc_uncorrected", 0),
        ("nvlinks_up", 17),
        ("retired_pages", 0),
        ("repair_failed", False),
        ("repair_pending", None),
    ],
)
def test_a_wrong_reading_is_off(field: str, wrong: Any) -> None:
    assert off(compared(replace(READING, **{field: wrong}))) == [field]


def test_a_value_between_two_readings_is_right() -> None:
    before, after = replace(READING, power_w=90.0), replace(READING, power_w=690.0)
    assert off(compared(before, after)) == []
    assert off(compared(before)) == off(compared(after)) == ["power_w"]
    flickering = replace(READING, throttle_reasons=())
    assert off(compared(READING, flickering)) == []


def test_memory_errors_of_older_boards() -> None:
    begin, end = DOCUMENT.index("<volatile>"), DOCUMENT.index("</volatile>")
    old = "<volatile><single_bit><total>4</total></single_bit><double_bit><total>5</total>"
    document = f"{DOCUMENT[:begin]}{old}</double_bit>{DOCUMENT[end:]}"
    assert off(compared(READING, document=document)) == ["ecc_uncorrected"]


@pytest.mark.parametrize(
    ("process", "wrong"),
    [
        (GpuProcess(pid=4711, memory_bytes=512 << 20), []),
        (GpuProcess(pid=4711, memory_bytes=12 << 20), ["memory of process 4711"]),
        (GpuProcess(pid=4711), ["memory of process 4711"]),
        (GpuProcess(pid=4712, memory_bytes=512 << 20), ["processes"]),
        (GpuProcess(pid=4711, visible=False), ["processes"]),
    ],
)
def test_processes_beside_smi(process: GpuProcess, wrong: list[str]) -> None:
    gpu = ElementTree.fromstring(DOCUMENT)
    assert off(processes_beside_smi([process], gpu)) == wrong


def test_links_of_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = "GPU 0: NVIDIA H200 (UUID: GPU-1)\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\n"
    monkeypatch.setattr(instruments, "nvidia_smi", lambda *_: answer)
    assert instruments.nvlinks("GPU-1") == (2, 1)
    monkeypatch.setattr(instruments, "nvidia_smi", lambda *_: "all links are inActive\n")
    assert instruments.nvlinks("GPU-1") is None


# -- loads -----------------------------------------------------------------------------------------

BUSY = replace(
    READING, utilisation_percent=100.0, sm_activity=0.96, sm_occupancy=0.3, tensor_activity=0.8,
    dram_activity=0.2, pcie_rx_bytes_per_s=0.0, power_w=690.0,
)  # fmt: skip
LOADS = {
    "product": BUSY,
    "copy": replace(BUSY, tensor_activity=0.0, dram_activity=0.9, power_w=480.0),
    "upload": replace(BUSY, pcie_rx_bytes_per_s=50e9),
    "spin": replace(BUSY, sm_activity=0.01, tensor_activity=0.0, dram_activity=0.0, power_w=120.0),
    "idle": replace(BUSY, utilisation_percent=0.0, sm_activity=0.0, power_w=75.0),
}


@pytest.mark.parametrize(
    ("kind", "changed", "wrong"),
    [
        ("idle", {}, []),
        ("product", {"tensor_activity": 0.008}, ["product: tensor activity"]),
        ("product", {"power_w": 90.0}, ["product: power / limit"]),
        ("copy", {"dram_activity": 0.009}, ["copy: DRAM activity"]),
        ("upload", {"pcie_rx_bytes_per_s": 5e4}, ["upload: PCIe to the GPU, B/s"]),
        ("spin", {"sm_activity": 0.9}, ["spin: SM activity"]),
        ("idle", {"utilisation_percent": 100.0}, ["idle: utilisation"]),
        ("product", {"sm_activity": None, "tensor_activity": None}, []),
    ],
)
def test_a_load_that_the_readings_do_not_show_is_off(
    kind: str, changed: dict[str, Any], wrong: list[str]
) -> None:
    assert off(judge_loads({**LOADS, kind: replace(LOADS[kind], **changed)})) == wrong


def test_a_spinning_kernel_must_be_found_and_no_other() -> None:
    location = RankLocation(rank=0, pid=4711, device="cuda", gpu_uuid=READING.uuid)
    assert off(judge_symptoms(LOADS, location)) == []
    wrong = {**LOADS, "spin": BUSY, "product": LOADS["spin"]}
    assert off(judge_symptoms(wrong, location)) == ["product: findings", "spin: findings"]
    # A GPU that reports nothing is not judged.
    bare = dict.fromkeys(LOADS, GpuReading(index=0, label="0"))
    checks = [*judge_loads(bare), *judge_symptoms(bare, location)]
    assert {check.ok for check in checks} == {None}


# -- the rank of a run -----------------------------------------------------------------------------

UUID = "5eed0000-0000-4000-8000-000000000000"
FACTS = {"uuid": UUID, "pid": 4711, "held_bytes": 512 << 20, "device": "cuda"}
OWN = {"pid": 4711, "owner": "rank", "rank": 0, "memory_bytes": 900 << 20}


def place(way: str = "by index", **changed: Any) -> list[str]:
    gpu = {"index": 0, "ranks": [0], "processes": [OWN], **changed.pop("gpu", {})}
    snapshot = {"gpus": [gpu], "verdicts": [], **changed}
    visible = ways_to_choose(READING)[way]
    return off(judge_place(way, visible, FACTS, snapshot, [READING]))


def test_the_right_place_is_accepted_however_it_was_chosen() -> None:
    ways = ["not set", "by index", "by UUID", "by a prefix of the UUID"]
    assert list(ways_to_choose(READING)) == ways
    assert [place(way) for way in ways] == [[]] * 4


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({"gpu": {"ranks": []}}, "GPU"),
        ({"gpu": {"index": 1}}, "GPU"),
        ({"gpu": {"processes": [{**OWN, "owner": "foreign", "rank": None}]}}, "owner"),
        ({"gpu": {"processes": [{**OWN, "memory_bytes": 1 << 20}]}}, "memory of its process"),
        ({"gpu": {"processes": [{**OWN, "pid": 1, "owner": "foreign"}]}}, "its process"),
        ({"verdicts": [{"kind": "gpu_unseen"}]}, "other programs on its GPU"),
        # A driver may name no process of a container.
        ({"gpu": {"processes": None}}, None),
        ({"gpu": {"processes": []}}, None),
        ({"gpu": {"processes": [{**OWN, "pid": 1, "owner": "unseen", "rank": None}]}}, None),
    ],
)
def test_a_wrong_place_is_off(changed: dict[str, Any], wrong: str | None) -> None:
    assert place(**changed) == ([] if wrong is None else [f"rank, by index: {wrong}"])


def test_another_gpu_by_the_variable_alone_is_off() -> None:
    other = replace(READING, index=1, uuid="GPU-0ddba11")
    snapshot = {"gpus": [{"index": 0, "ranks": [0], "processes": [OWN]}], "verdicts": []}
    checks = judge_place("by index", "1", FACTS, snapshot, [READING, other])
    assert off(checks) == ["rank, by index: GPU by CUDA_VISIBLE_DEVICES alone"]


@pytest.mark.slow
@pytest.mark.usefixtures("library")
@pytest.mark.skipif(DRIVER.exists(), reason="its processes do not open the real driver's files")
def test_rehearsal(tmp_path: Path) -> None:
    """The section over a simulated driver; its recording can be read again."""
    checks = run_section("tests.gpu.hardware.readings", tmp_path, rehearsal=True, limit_s=250)
    assert off(checks) == [], (tmp_path / "log.txt").read_text()[-3000:]
    recording = read_recording(tmp_path / RECORDING)
    assert recording.simulated
    phases = {entry.phase for entry in recording.rounds}
    assert phases >= {"idle", "product", "copy", "upload", "spin", "runs"}
