"""The section ``loaders``: what it makes of snapshots, and its images."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from ltui.training.config.device_selection import Machine
from ltui.training.state.run_snapshot import (
    GpuSnapshot,
    RankSnapshot,
    RunSnapshot,
    RunState,
    Throughput,
)
from tests.gpu.hardware import loaders
from tests.gpu.hardware.conditions import Conditions
from tests.gpu.hardware.loaders import FFCV, Network, Size, fastest, figures, judge, measured
from tests.gpu.hardware.preset_run import words
from tests.gpu.hardware.synthetic_images import CLASSES, bytes_per_pixel, image_folder, photograph
from tests.presets.preset_spec import preset_spec
from tests.system.conftest import Ltui


def snapshots(*steps: int, utilisation: float | None = 80.0) -> list[RunSnapshot]:
    """Return a snapshot a second of a run with these steps."""
    return [
        RunSnapshot(
            id="i",
            name="n",
            state=RunState.RUNNING,
            taken_at=100.0 + second,
            throughput=Throughput(samples_per_s=39.0, data_wait_share=0.25),
            ranks=(RankSnapshot(rank=0, global_step=step),),
            gpus=(
                GpuSnapshot(index=0, ranks=(), utilisation_percent=1.0),
                GpuSnapshot(index=1, ranks=(0,), utilisation_percent=utilisation),
            ),
        )
        for second, step in enumerate(steps)
    ]


def wrong(seen: list[RunSnapshot], *, on_gpu: bool = True) -> list[str]:
    return [c.what for c in judge("x", seen, on_gpu=on_gpu) if c.ok is False]


def test_a_run_that_trains_is_right() -> None:
    assert wrong(snapshots(5, 15, 25)) == []
    assert wrong(snapshots(5, 15, utilisation=None), on_gpu=False) == []


def test_what_is_wrong_with_a_run_is_off() -> None:
    assert wrong(snapshots(5, 5)) == ["x: trains"]
    seen = snapshots(5, 15)
    assert wrong([seen[0], replace(seen[1], state=RunState.FAILED)]) == ["x: trains"]
    assert wrong(snapshots(5, 15, utilisation=None)) == ["x: the GPU of rank 0 is read"]
    seen[1] = replace(seen[1], throughput=Throughput(data_wait_share=1.5))
    assert wrong(seen) == ["x: the share of waiting is known"]


def test_figures_are_medians_over_the_rounds() -> None:
    rounds = [measured(snapshots(0, rate), batch_size=4) for rate in (10, 30, 20)]
    assert measured(snapshots(7, 7), batch_size=4) is None
    found = {c.what: c.measured for c in figures("x", [r for r in rounds if r is not None])}
    assert found == {
        "x: samples/s, median of 3": 80.0,
        "x: samples/s as ltui shows it, median of 3": 39.0,
        "x: share of waiting for data, median of 3": 0.25,
        "x: mean GPU utilisation, %, median of 3": 80.0,
        "x: mean SM activity, median of 3": None,
    }


def test_the_fastest_number_of_workers_is_used() -> None:
    variants = [
        {"loader": FFCV, "workers": 8, "samples_per_s": [5.0, 6.0, 90.0]},
        {"loader": FFCV, "workers": 16, "samples_per_s": [4.0, 5.0, 4.5]},
        {"loader": "DataLoader", "workers": 16, "samples_per_s": [1.0]},
    ]
    assert fastest(variants) == {FFCV: 8, "DataLoader": 16}


@pytest.mark.parametrize("ffcv", [True, False])
@pytest.mark.parametrize("rehearsal", [True, False])
def test_the_settings_are_accepted(monkeypatch, tmp_path, ffcv, rehearsal) -> None:
    monkeypatch.setattr(loaders, "has_ffcv", lambda: ffcv)
    monkeypatch.setattr(loaders, "free_device_bytes", lambda: 0)
    conditions = Conditions(folder=tmp_path, home=tmp_path, rehearsal=rehearsal, deadline=0.0)
    for network in loaders.networks(conditions):
        preset, settings = loaders.training(conditions, network, tmp_path, "DataLoader", 3)
        preset_spec(preset, Machine(gpus=1, cores=16), words(settings)[1::2])


def test_a_run_that_does_not_start_stops_nothing_else(monkeypatch, tmp_path) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("no such preset")

    size = Size(images=1, copies=1, batch_size=1, resolution=1, warm_up_s=0, measured_s=0, rounds=1)
    network = Network(name="x", preset="p", architecture="a", side=1, size=size)
    monkeypatch.setattr(loaders, "start_preset", refuse)
    monkeypatch.setattr(loaders, "has_ffcv", lambda: True)
    conditions = Conditions(folder=tmp_path, home=tmp_path, rehearsal=True, deadline=0.0)
    ltui = Ltui(tmp_path, tmp_path)
    found = list(loaders.in_training(conditions, ltui, network, tmp_path, {}, reserve_s=0.0))
    assert [c.what for c in found if c.ok is False] == ["x, FFCV: trains", "x, DataLoader: trains"]


def test_images_are_like_photographs(tmp_path) -> None:
    folder = image_folder(tmp_path / "images", 20, 380, copies=2)
    assert len(list(folder.rglob("*.jpg"))) == 40
    assert sorted(path.name for path in folder.iterdir()) == sorted(map(str, range(CLASSES)))
    assert 0.45 < bytes_per_pixel(folder) < 0.8
    small = image_folder(tmp_path / "small", 10, 32)
    assert len(list(small.rglob("*.png"))) == 10


def test_a_class_is_a_colour() -> None:
    means = [photograph(number, 32, 32).resize((1, 1)).getpixel((0, 0)) for number in (3, 13, 4)]
    assert means[0] == pytest.approx(means[1], abs=3)
    assert means[0] != pytest.approx(means[2], abs=10)
