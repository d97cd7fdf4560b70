"""The section ``preset_runs``: what it makes of snapshots, losses and pictures."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from ltui.training.config.device_selection import Machine
from ltui.training.state.run_snapshot import GpuSnapshot, RunSnapshot, RunState, Throughput
from tests.gpu.hardware import pictures, preset_runs
from tests.gpu.hardware.conditions import Conditions
from tests.gpu.hardware.pictures import impersonal, private_words
from tests.gpu.hardware.preset_run import words
from tests.gpu.hardware.preset_runs import judge_loss, judge_training, size_for, trials
from tests.presets.preset_spec import preset_spec

GPU = GpuSnapshot(
    index=0, ranks=(0,), utilisation_percent=97.0, memory_used_bytes=1, sm_activity=0.8
)
RUN = RunSnapshot(
    id="i",
    name="n",
    state=RunState.RUNNING,
    throughput=Throughput(samples_per_s=9.0),
    gpus=(GPU,),
    model_flop_utilisation=0.4,
)


def off(snapshot: RunSnapshot, *, on_gpu: bool = True) -> list[str]:
    return [c.what for c in judge_training("p", snapshot, on_gpu=on_gpu) if c.ok is False]


def test_a_right_snapshot() -> None:
    assert off(RUN) == []
    assert off(replace(RUN, model_flop_utilisation=None)) == []
    assert off(replace(RUN, gpus=()), on_gpu=False) == []


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"state": RunState.FAILED}, "p: trains"),
        ({"gpus": ()}, "p: readings of the GPU of rank 0"),
        ({"gpus": (replace(GPU, ranks=()),)}, "p: readings of the GPU of rank 0"),
        ({"gpus": (replace(GPU, memory_used_bytes=None),)}, "p: readings of the GPU of rank 0"),
        ({"model_flop_utilisation": 1.2}, "p: model FLOP utilisation"),
    ],
)
def test_a_wrong_snapshot_is_off(change, what) -> None:
    assert off(replace(RUN, **change)) == [what]


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
def test_the_settings_of_every_trial_are_accepted(monkeypatch, tmp_path, free, rehearsal) -> None:
    monkeypatch.setattr(preset_runs, "free_device_bytes", lambda: free)
    conditions = Conditions(folder=tmp_path, home=tmp_path, rehearsal=rehearsal, deadline=0.0)
    for preset, settings in trials(tmp_path, size_for(conditions)).items():
        preset_spec(preset, Machine(gpus=1, cores=16), words(settings)[1::2])


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


def test_the_number_of_a_user_without_a_name_stays(monkeypatch) -> None:
    monkeypatch.setattr("psutil.Process.username", lambda _: "0")
    assert list(pictures.machine_names().values()) == ["your-host"]


def test_parts_of_words_stay() -> None:
    svg = "<text>alanine</text><text>samples/s,&#160;a/b/c&#160;~/a/b&#160;3&#160;/&#160;4</text>"
    assert impersonal(svg, NAMES) == svg
    assert private_words(svg, NAMES) == []
