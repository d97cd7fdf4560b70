"""Recordings of readings: written from the sampler, read again, and played in the panel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from ltui.app.gpu_demo import recorded_demo
from ltui.training.gpu.reading import (
    GpuProcess,
    GpuReading,
    RecordedGpus,
    Recording,
    Round,
    read_recording,
    write_recording,
)
from ltui.training.gpu.run_gpus import RunGpus
from ltui.widgets.run_tables import BELOW, GpuTable

RECORDINGS = sorted((Path(__file__).parent / "recordings").glob("*.jsonl"))
"""Recordings of real GPUs, if there are any: ``recording.jsonl`` of the section ``readings``."""


@pytest.fixture(scope="module")
def from_the_stand_in(shared_under: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of the stand-in driver: two GPUs, one of which reports next to nothing."""
    gpus = shared_under("gpus 1 h100\ngpus 1 bare\nprocess 0 self 43e9\n", sampling=True)
    rounds = []
    for at_s, (phase, line, power_w) in enumerate(
        (("idle", "util 0 power 80", 80), ("busy", "util 100 power 690 throttle 4", 690))
    ):
        gpus.steer(f"gpus 1 h100\ngpus 1 bare\nprocess 0 self 43e9\nset 0 {line}\n")
        view = gpus.view_when(
            lambda v, power_w=power_w: (
                len(v.readings) == 2
                and v.readings[0].power_w == power_w
                and v.readings[0].sm_activity is not None
            )
        )
        rounds.append(Round(at_s=float(at_s), phase=phase, readings=view.readings))
    path = tmp_path_factory.mktemp("recorded") / "recording.jsonl"
    write_recording(path, Recording(rounds=tuple(rounds), driver="575.57.08", simulated=True))
    return path


def test_what_is_read_is_what_was_written(from_the_stand_in: Path) -> None:
    recording = read_recording(from_the_stand_in)
    assert (recording.driver, recording.simulated) == ("575.57.08", True)
    idle, busy = recording.rounds
    assert (idle.phase, busy.phase, busy.at_s) == ("idle", "busy", 1.0)
    full, bare = busy.readings
    assert (full.power_w, full.utilisation_percent) == (690, 100)
    assert full.throttle_reasons == ("power cap",)
    assert full.nvlinks_up == 18
    assert (full.fan_percent, bare.power_w, bare.throttle_reasons) == (None, None, None)
    again = from_the_stand_in.with_name("again.jsonl")
    write_recording(again, recording)
    assert again.read_text() == from_the_stand_in.read_text()


def test_nothing_identifies_the_machine(tmp_path: Path) -> None:
    process = GpuProcess(
        pid=4711, memory_bytes=5, start_ticks=99, user="ada", name="secret.py", run_id="brave-owl"
    )
    reading = GpuReading(
        index=1, label="1", uuid="GPU-deadbeef-0000", sampled_at=1.7e9, processes=(process,)
    )
    path = tmp_path / "recording.jsonl"
    write_recording(path, Recording(rounds=(Round(at_s=0.0, readings=(reading,)),)))
    text = path.read_text()
    for word in ("4711", "99", "ada", "secret", "brave", "deadbeef", "17000"):
        assert word not in text
    (entry,) = read_recording(path).rounds
    (kept,) = entry.readings[0].processes or ()
    assert (kept.memory_bytes, kept.visible) == (5, True)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is no recording"),
        ("[1]", "is no recording"),
        ('{"format": 9}', "format 9 instead of 1"),
        ('{"format": 1, "driver": null, "simulated": false}', "has no readings"),
        (
            '{"format": 1, "driver": null, "simulated": false}\n'
            '{"at_s": 0, "phase": "", "readings": [{"index": 0, "label": "0", "colour": 1}]}',
            "colour",
        ),
    ],
)
def test_another_file_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "recording.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=reason):
        read_recording(path)


def test_a_recording_is_played_in_its_time_and_again() -> None:
    reading = GpuReading(index=0, label="0", power_w=0.0)
    rounds = [
        Round(at_s=at_s, readings=(replace(reading, power_w=at_s),)) for at_s in (0.0, 1.0, 2.5)
    ]
    now = [1000.0]
    gpus = RecordedGpus(rounds, lambda: now[0])
    played = []
    for now[0] in (1000.0, 1000.9, 1001.0, 1002.6, 1003.9, 1004.0, 1005.5):
        (current,) = gpus.latest().readings
        assert now[0] - 2 < (current.sampled_at or 0) <= now[0]
        played.append(current.power_w)
    assert played == [0.0, 0.0, 1.0, 2.5, 2.5, 0.0, 1.0]


async def test_the_demo_shows_a_recording_and_says_what_it_is(from_the_stand_in: Path) -> None:
    recording = read_recording(from_the_stand_in)
    for simulated, word in ((True, "simulated"), (False, "recorded")):
        app = recorded_demo(replace(recording, simulated=simulated))
        async with app.run_test(size=(120, 30)) as pilot:
            await pilot.pause()
            # On a slow machine, notes may stand below a GPU already.
            keys = app.screen.query_one(GpuTable).keys
            assert [key for key in keys if BELOW not in key] == ["0", "1"]
            assert word in str(app.screen.query_one("#title").render())


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_a_recording_of_a_real_gpu(path: Path) -> None:
    """The panel's data of every round: complete, and no problem found where there was none."""
    recording = read_recording(path)
    assert not recording.simulated
    assert {entry.phase for entry in recording.rounds} >= {"idle", "product", "spin"}
    now = [0.0]
    gpus = RunGpus(None, source=RecordedGpus(recording.rounds, lambda: now[0]))
    for entry in recording.rounds:
        now[0] = entry.at_s
        view = gpus.sample((), now[0])
        assert len(view.gpus) == len(entry.readings)
        if entry.phase != "spin":
            assert not view.findings
