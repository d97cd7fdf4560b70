"""Section ``readings``: are the readings of the panel true, and what do they cost?

They are compared with nvidia-smi at the same moment, while the GPU is idle and under load. Kernels
whose effect is known show the others: a large bf16 product keeps the tensor cores busy, a copy the
memory, an upload the PCIe link, and a kernel that only spins draws little power at full
utilisation, which is what a collective that does not complete looks like. Then ltui must name the
GPU of the rank of a real run. All readings are kept in ``recording.jsonl``, which ``ltui demo gpus
--recording`` plays and ``tests/gpu/test_recordings.py`` reads.

The rehearsal reads a simulated driver.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import fields

from ltui.training.gpu.reading import GpuReading
from ltui.training.gpu.run_gpus import RankLocation, gpu_snapshots, map_ranks
from ltui.training.gpu.symptoms import LOW_POWER, symptoms
from ltui.training.state.gpu_values import GpuValues
from ltui.training.state.run_snapshot import RankSnapshot, RankState
from tests.gpu.hardware.beside_smi import beside_smi, processes_beside_smi
from tests.gpu.hardware.check import Check, Conditions, above, below
from tests.gpu.hardware.gpu_samples import GpuSamples
from tests.gpu.hardware.instruments import described_gpus, installed_gpus, nvidia_smi, nvlinks
from tests.gpu.hardware.rank_places import check_places
from tests.gpu.hardware.simulated_driver import SimulatedDriver
from tests.run_module import ROOT

LOAD = "tests.gpu.hardware.gpu_load"
RECORDING = "recording.jsonl"
SAMPLER_SHARE = 2.0
"""Percent of a core that the sampler may take at one sample a second."""
PHASES_S = {"idle": 8.0, "product": 12.0, "copy": 6.0, "upload": 8.0, "spin": 6.0}
"""Seconds until each kind of load is judged: the driver averages the power over one second, and
some values are read every five samples."""
PAUSE_S = 8.0
COST_S = 10.0
UPLOADED_BYTES_PER_S = 1e9
GPM = "2,3,5,10"
"""NVML's numbers of SM utilisation, SM occupancy, tensor activity and DRAM bandwidth."""


def checks(conditions: Conditions) -> Iterator[Check]:
    """Compare, load, measure and map; write the recording at the end."""
    try:
        driver = SimulatedDriver(conditions.folder / "driver") if conditions.rehearsal else None
        # In a rehearsal more often, so that it is short.
        samples = GpuSamples(period_s=0.2 if conditions.rehearsal else 1.0)
    except RuntimeError as error:
        yield Check("GPU readings", str(error), "readings", False)
        return
    index = samples.sampler.latest().readings[0].index
    try:
        try:
            with _Load(conditions, driver, samples) as load:
                yield from _measure(load)
                index = load.index
        except (RuntimeError, OSError) as error:
            yield Check("load of the GPU", str(error), "no error", False)
        samples.phase = "runs"
        readings = samples.sampler.latest().readings
        yield from check_places(conditions, readings, samples.latest(index), driver)
    finally:
        samples.stop()
        versions = [version for _, version in installed_gpus()]
        rounds = samples.write(
            conditions.folder / RECORDING,
            versions[0] if versions else None,
            simulated=conditions.rehearsal,
        )
    yield Check("rounds of readings in the recording", rounds)


class _Load:
    """The process that loads the GPU, and the readings meanwhile."""

    def __init__(
        self, conditions: Conditions, driver: SimulatedDriver | None, samples: GpuSamples
    ) -> None:
        self._driver, self.samples = driver, samples
        self.speed = 0.2 if conditions.rehearsal else 1.0
        """Factor of all durations."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", LOAD, conditions.accelerator],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.facts: dict[str, Any] = json.loads(self._answer())
        if driver is not None:
            driver.hold(self.facts["pid"], self.facts["held_bytes"])
            self.facts["uuid"] = samples.latest(0).uuid
        self.location = RankLocation(
            rank=0, pid=self.facts["pid"], device="cuda", gpu_uuid=self.facts["uuid"]
        )
        self.index = 0
        """Index of the loaded GPU among the readings."""

    def __enter__(self) -> _Load:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        if self._driver is not None:
            self._driver.hold(None)

    def begin(self, kind: str) -> None:
        """Begin a kind of load."""
        if self._driver is not None:
            self._driver.load(kind)
        assert self.process.stdin is not None
        self.process.stdin.write(f"{kind}\n")
        self.process.stdin.flush()
        self._answer()
        self.samples.phase = kind

    def _answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the process that loads the GPU has ended; see log.txt")
        return line

    def wait(self, seconds: float) -> None:
        time.sleep(seconds * self.speed)


def _measure(load: _Load) -> Iterator[Check]:
    samples = load.samples
    load.begin("idle")
    load.wait(PHASES_S["idle"])
    readings = samples.sampler.latest().readings
    index = map_ranks(readings, [load.location]).get(0)
    yield Check("torch's UUID leads to a GPU", index, "a GPU", index is not None)
    load.index = readings[0].index if index is None else index
    yield from _beside_smi(load, "idle")
    share, calls = samples.cost(COST_S * load.speed)
    yield below("sampler, idle: % of a core", share, SAMPLER_SHARE)
    yield Check("sampler: driver calls a second", calls)
    last: dict[str, GpuReading] = {}
    for kind in ("product", "copy", "upload", "spin"):
        load.begin(kind)
        load.wait(PHASES_S[kind])
        last[kind] = samples.latest(load.index)
        if kind == "product":
            share, _ = samples.cost(COST_S * load.speed)
            yield below("sampler, under load: % of a core", share, SAMPLER_SHARE)
            yield from _beside_smi(load, kind)
            yield Check("nvidia-smi dmon: GPM under load", _dmon(), "as below")
    load.begin("idle")
    load.wait(PAUSE_S)
    last["idle"] = samples.latest(load.index)
    yield from judge_loads(last)
    yield from judge_symptoms(last, load.location)
    given = {field.name for field in fields(GpuValues)} - {"error", "blocked"}
    refused = [name for name in sorted(given) if getattr(last["product"], name) is None]
    yield Check("n/a on this GPU", refused)
    yield Check("queries that the driver refuses", samples.refused(load.index))


def _beside_smi(load: _Load, kind: str) -> Iterator[Check]:
    """Compare all GPUs with nvidia-smi at the same moment."""
    samples, began = load.samples, time.time() - 1.5 * load.samples.period_s
    described = described_gpus()
    if not described:
        yield Check(f"nvidia-smi, {kind}", None, "an answer", False)
        return
    compared = 0
    for reading in samples.sampler.latest().readings:
        if reading.uuid not in described:
            continue  # a MIG device
        compared += 1
        gpu = described[reading.uuid]
        around = samples.since(reading.index, began)
        place = f"GPU {reading.label}, {kind}"
        for check in beside_smi(around, gpu, nvlinks(reading.uuid)):
            yield Check(f"{place}: {check.what}", check.measured, check.expected, check.ok)
        if reading.processes is not None and reading.index == load.index:
            for check in processes_beside_smi(samples.latest(load.index).processes or (), gpu):
                yield Check(f"{place}: {check.what}", check.measured, check.expected, check.ok)
    yield Check(f"GPUs compared, {kind}", compared, "> 0", compared > 0)


def _dmon() -> str | None:
    """Return nvidia-smi's own GPM values, as text: its columns differ between versions."""
    answer = nvidia_smi("dmon", "--gpm-metrics", GPM, "-c", "2")
    if answer is None:
        return None
    lines = [" ".join(line.split()) for line in answer.splitlines() if line.strip()]
    return " / ".join([lines[0], lines[-1]]) if lines else None


def judge_loads(last: Mapping[str, GpuReading]) -> Iterator[Check]:
    """Judge the last reading under each kind of load."""
    product, copy, upload, spin, idle = (
        last[kind] for kind in ("product", "copy", "upload", "spin", "idle")
    )
    for kind in ("product", "copy", "spin"):
        yield above(f"{kind}: utilisation", last[kind].utilisation_percent, 90)
    yield below("idle: utilisation", idle.utilisation_percent, 10)
    yield above("product: power / limit", _power_share(product), 0.5)
    yield below("spin: power / limit", _power_share(spin), LOW_POWER)
    reasons = product.throttle_reasons
    yield Check("product: throttle reasons", None if reasons is None else [*reasons])
    yield Check("product: SM clock, MHz", [product.sm_clock_mhz, product.sm_clock_max_mhz])
    yield above("upload: PCIe to the GPU, B/s", upload.pcie_rx_bytes_per_s, UPLOADED_BYTES_PER_S)
    if product.sm_activity is None:
        yield Check("GPM", None, "Hopper or newer")
        return
    yield above("product: tensor activity", product.tensor_activity, 0.4)
    yield above("product: SM activity", product.sm_activity, 0.8)
    yield above("product: SM occupancy", product.sm_occupancy, 0.0)
    yield below("copy: tensor activity", copy.tensor_activity, 0.05)
    yield above("copy: DRAM activity", copy.dram_activity, 0.6)
    yield below("spin: SM activity", spin.sm_activity, 0.1)
    yield below("spin: DRAM activity", spin.dram_activity, 0.1)
    yield below("idle: SM activity", idle.sm_activity, 0.05)


def judge_symptoms(last: Mapping[str, GpuReading], location: RankLocation) -> Iterator[Check]:
    """Judge what ltui finds in these readings, as if a rank that others wait for ran on the GPU."""
    for kind, waits in (("product", False), ("copy", False), ("spin", True)):
        reading = last[kind]
        snapshots = gpu_snapshots([reading], map_ranks([reading], [location]), [location], None)
        rank = RankSnapshot(rank=0, pid=location.pid, device="cuda", state=RankState.STALLED)
        found = symptoms(snapshots, {0: rank}, {}, reading.sampled_at or 0.0)
        kinds = [symptom.kind for symptom in found if symptom.starts_finding]
        known = None not in (reading.power_w, reading.power_limit_w, reading.utilisation_percent)
        right = ("waiting" in kinds) is waits
        expected = "waiting" if waits else "not waiting"
        yield Check(f"{kind}: findings", kinds, expected, right if known else None)


def _power_share(reading: GpuReading) -> float | None:
    if reading.power_w is None or not reading.power_limit_w:
        return None
    return reading.power_w / reading.power_limit_w
