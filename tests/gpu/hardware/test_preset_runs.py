"""The sections ``preset_runs`` and ``loaders``: what they make of snapshots, losses, pictures."""

from __future__ import annotations

import math

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
from tests.gpu.hardware import loaders, pictures, preset_runs
from tests.gpu.hardware.check import Conditions, off
from tests.gpu.hardware.detached_run import words
from tests.gpu.hardware.loaders import FFCV, Network, Size, fastest, figures, judge, measured
from tests.gpu.hardware.pictures import impersonal, private_words
from tests.gpu.hardware.preset_runs import judge_loss, judge_training, size_for, trials
from tests.gpu.hardware.synthetic_images import CLASSES, bytes_per_pixel, image_folder, photograph
from tests.presets.preset_spec import preset_spec
from tests.system.conftest import Ltui

GPU = GpuSnapshot(
    index=1, ranks=(0,), utilisation_percent=80.0, memory_used_bytes=1, sm_activity=None
)
RUN = RunSnapshot(
    id="i",
    name="n",
    state=RunState.RUNNING,
    throughput=Throughput(samples_per_s=39.0, data_wait_share=0.25),
    gpus=(GpuSnapshot(index=0, ranks=(), utilisation_percent=1.0), GPU),
    model_flop_utilisation=0.4,
)


def snapshots(*steps: int, gpu: GpuSnapshot = GPU) -> list[RunSnapshot]:
    """Return a snapshot a second of a run with these steps."""
    run = replace(RUN, gpus=(RUN.gpus[0], gpu))
    return [
        replace(run, taken_at=100.0 + second, ranks=(RankSnapshot(rank=0, global_step=step),))
        for second, step in enumerate(steps)
    ]


def _conditions(tmp_path, rehearsal: bool = True) -> Conditions:
    return Conditions(folder=tmp_path, home=tmp_path, rehearsal=rehearsal, deadline=0.0)


@pytest.mark.parametrize(
    ("change", "on_gpu", "wrong"),
    [
        ({}, True, []),
        ({"model_flop_utilisation": None}, True, []),
        ({"gpus": ()}, False, []),
        ({"state": RunState.FAILED}, True, ["p: trains"]),
        ({"gpus": ()}, True, ["p: readings of the GPU of rank 0"]),
        ({"gpus": (replace(GPU, ranks=()),)}, True, ["p: readings of the GPU of rank 0"]),
        (
            {"gpus": (replace(GPU, memory_used_bytes=None),)},
            True,
            ["p: readings of the GPU of rank 0"],
        ),
        ({"model_flop_utilisation": 1.2}, True, ["p: model FLOP utilisation"]),
    ],
)
def test_a_snapshot_of_a_preset_is_judged(change, on_gpu, wrong) -> None:
    assert off(judge_training("p", replace(RUN, **change), on_gpu=on_gpu)) == wrong


@pytest.mark.parametrize(
    ("losses", "right"),
    [
        ([2.0, 1.5, 1.0], [True, True]),
        ([2.0] * 10 + [1.9] * 10, [True, False]),
        ([2.0, None, 1.0], [False, True]),
        ([2.0, math.inf, 1.0], [False, True]),
        ([], [False, False]),
    ],
)
def test_a_loss_must_be_finite_and_fall(losses, right) -> None:
    assert [c.ok for c in judge_loss("p", losses, falls=True)] == right
    assert [c.ok for c in judge_loss("p", losses, falls=False)] == [right[0], None]


@pytest.mark.parametrize("free", [0, 100 << 30])
@pytest.mark.parametrize("rehearsal", [True, False])
@pytest.mark.parametrize("ffcv", [True, False])
def test_the_settings_are_accepted(monkeypatch, tmp_path, free, rehearsal, ffcv) -> None:
    for section in (preset_runs, loaders):
        monkeypatch.setattr(section, "free_device_bytes", lambda: free)
    monkeypatch.setattr(loaders, "has_ffcv", lambda: ffcv)
    conditions = _conditions(tmp_path, rehearsal)
    chosen = [*trials(tmp_path, size_for(conditions)).items()] if ffcv else []
    for network in loaders.networks(conditions):
        chosen.append(loaders.training(conditions, network, tmp_path, "DataLoader", 3))
    for preset, settings in chosen:
        preset_spec(preset, Machine(gpus=1, cores=16), words(settings)[1::2])


# -- loaders ---------------------------------------------------------------------------------------


def test_a_run_of_a_loader_is_judged() -> None:
    def wrong(*seen: RunSnapshot, on_gpu: bool = True) -> list[str]:
        return off(judge("x", seen, on_gpu=on_gpu))

    blind = snapshots(5, 15, gpu=replace(GPU, utilisation_percent=None))
    first, second = snapshots(5, 15)
    assert wrong(first, second) == []
    assert wrong(*blind, on_gpu=False) == []
    assert wrong(*blind) == ["x: the GPU of rank 0 is read"]
    assert wrong(*snapshots(5, 5)) == ["x: trains"]
    assert wrong(first, replace(second, state=RunState.FAILED)) == ["x: trains"]
    strange = replace(second, throughput=Throughput(data_wait_share=1.5))
    assert wrong(first, strange) == ["x: the share of waiting is known"]


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


def test_a_run_that_does_not_start_stops_nothing_else(monkeypatch, tmp_path) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("no such preset")

    size = Size(images=1, copies=1, batch_size=1, resolution=1, warm_up_s=0, measured_s=0, rounds=1)
    network = Network(name="x", preset="p", architecture="a", side=1, size=size)
    monkeypatch.setattr(loaders, "start_preset", refuse)
    monkeypatch.setattr(loaders, "has_ffcv", lambda: True)
    ltui, conditions = Ltui(tmp_path, tmp_path), _conditions(tmp_path)
    found = off(loaders.in_training(conditions, ltui, network, tmp_path, {}, reserve_s=0.0))
    assert found == ["x, FFCV: trains", "x, DataLoader: trains"]


def test_images_are_like_photographs_and_a_class_is_a_colour(tmp_path) -> None:
    folder = image_folder(tmp_path / "images", 20, 380, copies=2)
    assert len(list(folder.rglob("*.jpg"))) == 40
    assert sorted(path.name for path in folder.iterdir()) == sorted(map(str, range(CLASSES)))
    assert 0.45 < bytes_per_pixel(folder) < 0.8
    means = [photograph(number, 32, 32).resize((1, 1)).getpixel((0, 0)) for number in (3, 13, 4)]
    assert means[0] == pytest.approx(means[1], abs=3)
    assert means[0] != pytest.approx(means[2], abs=10)


# -- pictures --------------------------------------------------------------------------------------

NAMES = {"turing": "your-host", "alan": "you"}
NBSP = "&#160;"


def test_a_picture_keeps_nothing_of_the_machine() -> None:
    shown = f"/srv/lab/x.py:3{NBSP}by{NBSP}alan{NBSP}on{NBSP}turing,{NBSP}9{NBSP}samples/s{NBSP}a/b"
    uuid = "9ee21c6d-0000-4000-8000-00000000000b"
    svg = f'<text class="turing">{shown}</text><text>&lt;alan&gt;</text><text>GPU-{uuid}</text>'
    assert private_words(svg, NAMES) == ["/srv/lab/x.py:3", uuid, "alan", "turing"]
    clean = impersonal(svg, NAMES)
    assert private_words(clean, NAMES) == []
    assert '<text class="turing">/home/you/x.py:3&#160;by&#160;you&#160;on&#160;your-host' in clean
    assert "<text>&lt;you&gt;&#160;</text>" in clean
    long, cut = (part.partition("</text>")[0].partition(">")[2] for part in (svg, clean))
    assert len(long.replace(NBSP, " ")) == len(cut.replace(NBSP, " "))


def test_the_number_of_a_user_without_a_name_and_parts_of_words_stay(monkeypatch) -> None:
    monkeypatch.setattr("psutil.Process.username", lambda _: "0")
    assert list(pictures.machine_names().values()) == ["your-host"]
    svg = "<text>alanine</text><text>samples/s,&#160;a/b/c&#160;~/a/b&#160;3&#160;/&#160;4</text>"
    assert impersonal(svg, NAMES) == svg
    assert private_words(svg, NAMES) == []
