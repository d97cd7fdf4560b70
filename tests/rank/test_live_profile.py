"""A profile within one rank: which steps, what is left out, and what ends it without harm."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ltui.training.rank import live_profile as live_profile_module
from ltui.training.rank.channel import Channel
from ltui.training.rank.live_profile import LiveProfile
from ltui.training.shared.profile_request import (
    ProfileRequest,
    report_path,
    trace_path,
    write_request,
)
from ltui.training.shared.rank_environment import RankEnvironment
from ltui.training.supervise.speed.summarise_profile import summarise
from tests.waiting import wait_for


class Rank:
    """One rank that trains when it is told to, and whose profile is requested."""

    def __init__(self, folder: Path) -> None:
        environment = RankEnvironment(run_dir=folder, run_id="x", attempt=1)
        self.channel = Channel(environment, 0)
        self.profile = LiveProfile(self.channel)
        self.folder = folder / "profiles" / "1"
        self.folder.mkdir(parents=True)
        self.step = 0

    def request(self, **changes: Any) -> None:
        values: dict[str, Any] = {"number": 1, "ranks": (0,), "first": 3, "steps": 2, **changes}
        write_request(self.channel.environment.queue_dir, ProfileRequest(**values))
        self.profile.word[0] = values["number"]

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            torch.ones(8, 8).mm(torch.ones(8, 8))
            self.step += 1
            if self.profile.word[0] != self.profile.seen:
                self.profile.step_ended(self.step)

    def report(self) -> dict[str, Any]:
        path = report_path(self.folder, 0)
        wait_for(path.exists, seconds=60)
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return document


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    # torch's profiler sets it where the compiler is loaded already.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")  # a profile sets it, too
    made = Rank(tmp_path)
    yield made
    assert not torch.autograd.profiler._is_profiler_enabled
    made.channel.close()


def test_the_steps_are_measured_and_what_is_no_part_of_them_is_left_out(rank: Rank) -> None:
    rank.request()
    rank.train(3)
    began = time.monotonic_ns()
    time.sleep(0.3)
    rank.profile.exclude(began, time.monotonic_ns())
    rank.train(4)
    report = rank.report()
    assert [step for step, _, _ in report["steps"]] == [4, 5]
    assert {path.stat().st_mode & 0o777 for path in rank.folder.iterdir()} == {0o600}
    (summary,) = summarise(rank.folder)
    assert summary.steps == 2
    assert summary.split.step_s < 0.1
    assert "aten::mm" in {each.name for each in summary.top}
    assert sorted(path.name for path in rank.folder.iterdir()) == [
        "rank-00000.json", "rank-00000.trace.json.gz",
    ]  # fmt: skip
    assert {path.stat().st_mode & 0o777 for path in rank.folder.iterdir()} == {0o600}
    json.loads(gzip.decompress(trace_path(rank.folder, 0).read_bytes()))


def test_another_request_follows(rank: Rank) -> None:
    rank.request()
    rank.train(6)
    rank.report()
    rank.request(ranks=(1,), first=10)
    rank.train()
    assert rank.profile.word[0] == rank.profile.seen
    rank.folder = rank.folder.parent / "2"
    rank.folder.mkdir()
    rank.request(number=2, first=12, memory=True)
    rank.train(10)
    assert [step for step, _, _ in rank.report()["steps"]] == [13, 14]


def test_a_request_that_comes_too_late_is_refused(rank: Rank) -> None:
    rank.train(3)
    rank.request()
    rank.train(3)
    assert "was over before" in rank.report()["error"]


@pytest.mark.parametrize("begins_after", [0, 2, 3])
def test_a_program_that_profiles_itself_is_left_alone(rank: Rank, begins_after: int) -> None:
    rank.request()
    rank.train(begins_after)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
        rank.train(6)
    assert any(each.key == "aten::mm" for each in own.key_averages())
    assert "profile" in rank.report()["error"]
    assert not trace_path(rank.folder, 0).exists()


def test_a_full_disk_harms_nothing(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    def export(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", export)
    rank.request()
    rank.train(6)
    assert "No space left" in rank.report()["error"]
    assert [path.name for path in rank.folder.iterdir()] == ["rank-00000.json"]


def test_a_large_trace_is_refused_and_recording_ends_early(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_profile_module, "MOST_SECONDS", 0.0)
    monkeypatch.setattr(live_profile_module, "MOST_TRACE_BYTES", 100)
    rank.request(steps=40)
    rank.train(4)
    assert "Take fewer steps" in rank.report()["error"]
    assert [path.name for path in rank.folder.iterdir()] == ["rank-00000.json"]
