"""The time cursor: a run as it was at a moment of its past, by keys, by ``--at`` and as frames."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from textual.pilot import Pilot

from ltui.app.keys.footer import KeyFooter
from ltui.app.live.curve_arithmetic import CurveRequest, LatestCurveRequest
from ltui.app.live.frame import Frame, MarkKind
from ltui.app.live.past_frames import PastFrames
from ltui.app.live.run_poller import RunPoller
from ltui.app.presentation.run_view import note_lines
from ltui.app.screens.past_moments import OF_THE_PAST
from ltui.app.screens.run import RunScreen
from ltui.app.textual_app import LtuiApp
from ltui.training.problem import ProblemError
from ltui.training.state.asked_moment import AskedMoment, parse_moment
from ltui.training.state.run_snapshot import (
    Event,
    MetricValue,
    RankSnapshot,
    RankState,
    RunSnapshot,
    RunState,
    Verdict,
)
from ltui.training.store.history_writer import Batch, Cursor, StoreWriter
from ltui.training.store.past.snapshots import document_of, past_folder
from ltui.training.store.past.writer import PastWriter
from ltui.training.store.run_directory import RunDir
from tests.app.one_run import notices, text_of_screen, until
from tests.runs.hostile_runs import output_of
from tests.store.histories import StepRow, step_row
from tests.stored_runs import LAUNCHED, stored_run

BEGAN = LAUNCHED
SECOND = BEGAN + 200.0
"""Begin of the second attempt, which goes on after step 50."""
ENDED = BEGAN + 240.0
STALL = Verdict(
    kind="collective_hang", level="stalled", culprits=(0,), cause="rank 0 sleeps", began=BEGAN + 60
)
STALL_S = 10


def step_at(second: int) -> int:
    """Return the step of the first attempt: one a second, but for the stall."""
    return min(second, 60) + max(0, second - 60 - STALL_S)


def line_of(attempt: int, step: int) -> str:
    return f"attempt {attempt} trained step {step}\n"


def snapshot_at(run_dir: RunDir, attempt: int, at: float, step: int) -> RunSnapshot:
    stalled = attempt == 1 and 60 <= at - BEGAN < 60 + STALL_S
    phase = "backward" if stalled else "forward"
    rank = RankSnapshot(rank=0, state=RankState.OK, phase=phase, epoch=0, global_step=step)
    return RunSnapshot(
        id=run_dir.id,
        name="brave-owl",
        preset="quickstart",
        state=RunState.RUNNING,
        created_at=BEGAN,
        started_at=BEGAN,
        taken_at=at,
        attempt=attempt,
        world_size=1,
        global_step=step,
        max_steps=1000,
        metrics={"train/loss": MetricValue(last=1.0 / step, step=step)},
        verdicts=(STALL,) if stalled else (),
        ranks=(rank,),
    )


def attempt_of(run_dir: RunDir, store: StoreWriter, attempt: int, first: int, last: int) -> None:
    """Write what a supervisor writes during an attempt that begins after step ``first - 1``."""
    began = BEGAN if attempt == 1 else SECOND
    store.begin_attempt(
        attempt, started_at=began, boot_id="b", resumed_path=None,
        resumed_step=None if attempt == 1 else first - 1,
    )  # fmt: skip
    log = run_dir.logs_dir(attempt) / "rank-00000.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    record, written, rows = PastWriter(past_folder(run_dir)), 0, list[StepRow]()
    with log.open("w") as file:
        for second in range(1, 200 if attempt == 1 else 40):
            step = step_at(second) if attempt == 1 else first - 1 + second
            if step > last:
                break
            if step > written:
                file.write(line_of(attempt, step))
                rows.append((0, step, step_row(step, 1.0 / step, began + second - 0.2)))
                written = step
            file.flush()
            shown = snapshot_at(run_dir, attempt, began + second, step)
            record.append(began + second, document_of(shown, {log.name: log.stat().st_size}))
    record.close()
    events = []
    if attempt == 1:
        store.write_verdict(1, replace(STALL, ended=STALL.began + STALL_S))  # type: ignore[operator]
        paused = {"global_step": 30}
        events = [Event(BEGAN + 30, "paused", "Paused at step 30.", paused, rank=0, seq=1)]
    store.commit(attempt, Batch(steps=rows, events=events, cursors={0: Cursor(len(rows) + 1)}))


@pytest.fixture
def run_dir(private_home: Path) -> RunDir:
    """A run of two attempts that has ended: a pause, a stall, and a resume at step 50."""
    run_dir = stored_run(
        private_home, "brave-owl-3f2a", attempt=2, ended_at=ENDED, elapsed_s=240.0, global_step=89
    )
    with closing(StoreWriter(run_dir.db_path)) as store:
        attempt_of(run_dir, store, 1, 1, 120)
        attempt_of(run_dir, store, 2, 51, 89)
    return run_dir


@pytest.fixture
def frame_at(run_dir: RunDir) -> Callable[[float], Frame]:
    """Return the frame of a moment, each by a new reader."""

    def read(at: float) -> Frame:
        requests = LatestCurveRequest()
        requests.request = CurveRequest(names=frozenset({"train/loss"}))
        present = RunPoller(run_dir).poll(time.time(), 0)
        return PastFrames(run_dir, requests).frame(at, present)

    return read


MOMENTS = [(1, 1), (1, 29), (1, 45), (1, 65), (1, 75), (1, 130), (2, 1), (2, 39)]


@pytest.mark.parametrize(("attempt", "second"), MOMENTS)
def test_a_moment_is_what_was_shown_then_and_nothing_later(
    run_dir: RunDir, frame_at: Callable[[float], Frame], attempt: int, second: int
) -> None:
    at = (BEGAN if attempt == 1 else SECOND) + second
    step = step_at(second) if attempt == 1 else 50 + second
    frame = frame_at(at + 0.4)
    assert frame.snapshot == snapshot_at(run_dir, attempt, at, step)
    assert frame.log[-1].text == line_of(attempt, step).strip()
    assert not [mark for mark in frame.marks if mark.at is not None and mark.at > at]
    kinds = {mark.kind for mark in frame.marks}
    assert (MarkKind.PAUSE in kinds) == (attempt == 2 or second >= 30)
    assert (MarkKind.STALL in kinds) == (attempt == 2 or second >= 60)
    assert (MarkKind.ATTEMPT in kinds) == (attempt == 2)
    # An attempt replaces the steps of the one before, after its checkpoint.
    curve = frame.curves["train/loss"]
    assert curve.steps.tolist() == list(range(1, step + 1))
    assert note_lines(frame)[0].startswith("◀ ")


def test_playing_on_equals_reading_each_moment_anew(
    run_dir: RunDir, frame_at: Callable[[float], Frame]
) -> None:
    requests = LatestCurveRequest()
    requests.request = CurveRequest(names=frozenset({"train/loss"}))
    present = RunPoller(run_dir).poll(time.time(), 0)
    frames = PastFrames(run_dir, requests)
    for at in (BEGAN + 20, BEGAN + 31, BEGAN + 62, BEGAN + 80, SECOND + 3, SECOND + 9, BEGAN + 40):
        played, alone = frames.frame(at, present), frame_at(at)
        assert played.snapshot == alone.snapshot
        assert played.log[-1].text == alone.log[-1].text
        assert played.marks == alone.marks
        curves = [frame.curves["train/loss"].steps.tolist() for frame in (played, alone)]
        assert curves[0] == curves[1]


def test_a_gap_is_said_and_passed_over(run_dir: RunDir, frame_at: Callable[[float], Frame]) -> None:
    frame = frame_at(BEGAN + 170)
    assert frame.is_unknown
    assert frame.snapshot.global_step is None
    assert "nothing was recorded at" in note_lines(frame)[1]
    present = RunPoller(run_dir).poll(time.time(), 0)
    played = PastFrames(run_dir, LatestCurveRequest()).frame(BEGAN + 170, present, playing=True)
    assert played.snapshot.attempt == 2


def test_a_run_without_a_record_says_so(private_home: Path) -> None:
    run_dir = stored_run(private_home, "old-run-1a2b")
    present = RunPoller(run_dir).poll(time.time(), 0)
    frame = PastFrames(run_dir, LatestCurveRequest()).frame(LAUNCHED + 30, present)
    assert "the run has no record of past snapshots" in note_lines(frame)[1]


def test_a_damaged_record_is_read_as_far_as_it_goes(
    run_dir: RunDir, frame_at: Callable[[float], Frame]
) -> None:
    first = min(past_folder(run_dir).iterdir())
    data = bytearray(first.read_bytes())
    data[len(data) // 2] ^= 0xFF
    first.write_bytes(data)
    assert frame_at(BEGAN + 5).snapshot.global_step == 5
    late = frame_at(BEGAN + 125)
    assert late.is_unknown
    assert "damaged in part" in (late.error or "")


# -- the screen ------------------------------------------------------------------------------------


@asynccontextmanager
async def opened(
    run_dir: RunDir, size: tuple[int, int] = (160, 50), at: str | None = None
) -> AsyncIterator[tuple[Pilot[Any], RunScreen]]:
    app = LtuiApp(run_dir.home, run=run_dir, at=at)
    async with app.run_test(size=size, notifications=True) as pilot:
        screen = app.screen
        assert isinstance(screen, RunScreen)
        await until(pilot, lambda: screen.frame is not None)
        yield pilot, screen


async def at_moment(pilot: Pilot[Any], screen: RunScreen, second: float) -> str:
    """Wait until the moment is shown, and return the text of the screen."""

    def is_shown() -> bool:
        moment = None if screen.frame is None else screen.frame.moment
        return moment is not None and abs(moment.at - BEGAN - second) < 1e-6

    await until(pilot, is_shown)
    await pilot.pause(0.1)
    return text_of_screen(pilot.app)


@pytest.mark.parametrize("size", [(160, 50), (80, 24)])
async def test_the_marks_and_the_way_back(run_dir: RunDir, size: tuple[int, int]) -> None:
    async with opened(run_dir, size) as (pilot, screen):
        await pilot.press("comma")
        text = await at_moment(pilot, screen, 200)
        assert "attempt 2 from step 50" in text
        await pilot.press("comma")
        text = await at_moment(pilot, screen, 60)
        assert "3 m 00 s before the end" in text
        assert "60/1000" in text
        await pilot.press("comma")
        assert "paused at step 30" in await at_moment(pilot, screen, 30)
        await pilot.press("comma")
        assert "the first moment" in await at_moment(pilot, screen, 1)
        await pilot.press("full_stop")
        await at_moment(pilot, screen, 30)
        await pilot.press("escape")
        await until(pilot, lambda: screen.frame is not None and screen.frame.moment is None)
        assert "finished" in text_of_screen(pilot.app)


async def test_a_moment_is_asked_for_and_no_key_acts_on_the_run_there(run_dir: RunDir) -> None:
    async with opened(run_dir) as (pilot, screen):
        await pilot.press("b", *"step", "space", *"45", "enter")
        await at_moment(pilot, screen, 45)
        keys = [hint.key for hint in screen.query_one(KeyFooter)._hints]
        assert "esc" in keys
        assert "r" not in keys
        await pilot.press("r", "P")
        await until(pilot, lambda: OF_THE_PAST in notices(pilot.app))
        await until(pilot, lambda: any("profile is about the" in t for t in notices(pilot.app)))
        assert pilot.app.screen is screen


async def test_it_plays_to_the_end(run_dir: RunDir) -> None:
    async with opened(run_dir, at="-30s") as (pilot, screen):
        await at_moment(pilot, screen, 210)
        screen.show_moment(AskedMoment(at=BEGAN + 210), "paused at step 71")
        await until(pilot, lambda: "paused at step 71" in text_of_screen(pilot.app))
        await pilot.press("space", *["plus"] * 5)
        await until(pilot, lambda: not screen.plays)
        text = await at_moment(pilot, screen, 240)
        assert "89/1000" in text
        assert "paused at step 71" not in text


async def test_a_moment_that_is_none_is_said_and_the_present_stays(run_dir: RunDir) -> None:
    async with opened(run_dir, at="step 4000") as (pilot, screen):
        await until(pilot, lambda: any("has not trained it" in text for text in notices(pilot.app)))
        assert screen.frame is not None
        assert screen.frame.moment is None


# -- words -----------------------------------------------------------------------------------------


def test_moments_as_people_write_them() -> None:
    noon = time.mktime((2026, 11, 26, 12, 0, 0, 0, 0, -1))
    assert parse_moment("-12m", noon) == AskedMoment(at=noon - 720)
    assert parse_moment(" - 1.5 h ", noon) == AskedMoment(at=noon - 5400)
    assert parse_moment("step 4_000", noon) == AskedMoment(step=4000)
    assert parse_moment("03:12", noon) == AskedMoment(at=noon - 8 * 3600 - 48 * 60)
    # The last such time.
    assert parse_moment("13:00:30", noon) == AskedMoment(at=noon - 23 * 3600 + 30)
    assert parse_moment("2026-11-26T03:12", noon) == parse_moment("03:12", noon)


@pytest.mark.parametrize(
    "text",
    ["", "x", "12:99", "-12", "step", "step -3", "-5y", "2026-13-01", "2099-01-01", "9" * 30],
)
def test_what_is_no_moment_is_refused_in_one_sentence(run_dir: RunDir, text: str) -> None:
    with pytest.raises(ProblemError) as raised:
        parse_moment(text, time.time(), "here")
    assert len(raised.value.problems) == 1
    if text:
        code, printed = output_of(("attach", run_dir.id, "--at", text))
        assert (code, printed.count("\n")) == (2, 1)
        assert f"--at {text}" in printed
