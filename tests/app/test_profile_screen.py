"""The dialog of a profile: the last result, progress, and one that is requested by a key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from textual.widgets import Static

from ltui.app.live import run_requests
from ltui.app.presentation.profile_text import profile_lines
from ltui.app.screens.profile import ProfileScreen
from ltui.training.diagnosis.profile_summary import Profile, ProfileState
from ltui.training.diagnosis.trace_times import NamedTime, RankProfile, StepSplit
from ltui.training.state.run_snapshot import RunState
from ltui.training.store.profile_files import profile_folder, write_profile
from tests.app.frames import frame, snapshot
from tests.app.one_run import OneRunAt, Script, one_run, reached, until

HOSTILE = "aten::mm\x1b]0;owned\x07[red]x[/red]"


def done(**changes: Any) -> Profile:
    split = StepSplit(
        step_s=0.1, computing_s=0.06, exposed_s=0.02, copies_s=0.0, data_s=0.01, host_s=0.01,
        overlapped_s=0.0,
    )  # fmt: skip
    top = (NamedTime(name=HOSTILE, seconds=0.05, share=0.5, calls=3.0),)
    rank = RankProfile(rank=0, steps=5, split=split, on_device=False, top=top)
    values: dict[str, Any] = {
        "number": 1, "attempt": 1, "state": ProfileState.DONE, "ranks": (0,), "first": 5, "last": 9,
        "profiles": (rank,), "sentence": "the rank computes 60 ms.", "remedy": "Use bf16.",
        "step_s_before": 0.1, "step_s_after": 0.2, **changes,
    }  # fmt: skip
    return Profile(**values)


def test_the_lines_are_clean_and_fit() -> None:
    lines = list(profile_lines(done()))
    assert all(line.isprintable() for line in lines)
    assert max(map(len, lines[:-1])) <= 78
    assert any("slower since the profile" in line for line in lines)
    (failed,) = profile_lines(done(state=ProfileState.FAILED, reason="rank 1: no\nreason"))
    assert failed == "Profile 1: no profile: rank 1: no reason."


@pytest.mark.parametrize("size", [(160, 50), (80, 24)])
async def test_the_key_shows_the_last_profile_and_begins_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(run_requests, "send_request", lambda _, request: sent.append(request))
    app = OneRunAt(tmp_path, Script(frame(snapshot=snapshot(state=RunState.RUNNING))))
    profile_folder(app.run_dir, 1).mkdir(parents=True)
    async with one_run(app, size) as (pilot, _, _):
        await pilot.press("P")
        screen = await reached(pilot, ProfileScreen)

        def text() -> str:
            return str(screen.query_one("#profile", Static).render())

        await until(pilot, lambda: "no profile of this run" in text())
        await pilot.press("enter")
        await until(pilot, lambda: sent == [{"cmd": "profile", "memory": False}])
        write_profile(app.run_dir, done(state=ProfileState.WAITING))
        await until(pilot, lambda: "profiles steps 5 to 9" in text())
        await pilot.press("m")
        write_profile(app.run_dir, done())
        await until(pilot, lambda: "the rank computes 60 ms." in text())
        assert len(sent) == 1
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(app.screen, ProfileScreen))


async def test_a_run_that_has_ended_shows_its_profile_only(tmp_path: Path) -> None:
    app = OneRunAt(tmp_path, Script(frame(snapshot=snapshot(state=RunState.FINISHED))))
    async with one_run(app) as (pilot, _, _):
        await pilot.press("P")
        screen = await reached(pilot, ProfileScreen)
        assert "has ended" in str(screen.query_one(".about", Static).render())
        assert "profile" not in str(screen.query_one("#answers", Static).render())
