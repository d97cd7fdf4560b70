"""What SLURM says of a job in words, whether it is started again, and where the run is."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ltui.training.json_codec import from_json, to_json
from ltui.training.process.identity import boot_id
from ltui.training.slurm.batch_script import JobOptions
from ltui.training.slurm.job_record import Head, JobRecord, Life, refusal, with_unfinished_closed
from ltui.training.slurm.run_place import (
    Place,
    SlurmJob,
    clock_words,
    place_of,
    queued_detail,
    reason_words,
    state_words,
)
from ltui.training.state.run_snapshot import RunState

NOW = time.mktime((2026, 5, 3, 12, 0, 0, 0, 0, -1))
STATES = """PENDING CONFIGURING RUNNING COMPLETING SUSPENDED COMPLETED CANCELLED FAILED TIMEOUT
DEADLINE OUT_OF_MEMORY NODE_FAIL PREEMPTED BOOT_FAIL REQUEUED REQUEUE_HOLD SPECIAL_EXIT""".split()  # noqa: SIM905 - a list of words reads better so


@pytest.mark.parametrize("state", STATES)
def test_every_state_has_words(state: str) -> None:
    words = state_words(state)
    assert words == words.strip()
    assert "_" not in words
    assert not words.isupper()


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Priority", "waits for priority"),
        ("(Resources)", "waits for free nodes"),
        ("BeginTime", "waits for its start time"),
        ("ReqNodeNotAvail, UnavailableNodes:n7", "waits for a node that is reserved or down"),
        (
            "QOSMaxGRESPerUser",
            "waits: a limit of the account or QOS is reached (QOSMaxGRESPerUser)",
        ),
        ("SomethingNew", "waits (SomethingNew)"),
        ("None", "waits for the scheduler"),
        (None, "waits for the scheduler"),
        ("", "waits for the scheduler"),
    ],
)
def test_a_reason(reason: str | None, words: str) -> None:
    assert reason_words(reason) == words


def test_a_waiting_job() -> None:
    job = SlurmJob(job_id="12", state="PENDING", reason="Priority", start_at=NOW + 2.5 * 3600)
    said = "queued in SLURM: waits for priority, expected start 14:30"
    assert queued_detail(job, "12", NOW) == said
    past = replace(job, start_at=NOW - 60)
    assert queued_detail(past, "12", NOW) == "queued in SLURM: waits for priority"
    assert queued_detail(None, "12", NOW) == "queued in SLURM (job 12)"
    assert clock_words(NOW + 86400, NOW) == "4 May 12:00"


def life(start: int, end: int | None, **changes: object) -> Life:
    values: dict[str, object] = {"job_id": "12", "started_at": 1.0, "ended_at": 2.0, **changes}
    return Life(start_step=start, end_step=end, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lives", "refused"),
    [
        ([], False),
        ([life(0, None)] * 2, False),
        ([life(0, None)] * 3, True),
        ([life(0, 0)] * 3, True),
        ([life(0, 10), life(10, 10), life(10, 10)], False),
        ([life(0, 10), life(10, 10), life(10, 10), life(10, 10)], True),
        ([life(10, 10), life(10, 10), life(10, 12)], False),
        ([life(10, 10), life(10, 5), life(5, 5)], True),
    ],
)
def test_a_run_without_progress_is_not_started_again(lives: list[Life], refused: bool) -> None:
    why = refusal(lives)
    assert (why is not None) == refused
    if why is not None:
        assert why.startswith("no progress in 3 starts of its job (")


@given(st.lists(st.integers(0, 50), max_size=30))
def test_a_run_that_makes_progress_in_one_of_three_lives_goes_on(steps: Sequence[int]) -> None:
    """Every life begins with the best checkpoint so far, and some save a later one."""
    lives: list[Life] = []
    best = idle = 0
    for step in steps:
        after = max(best, step)
        lives.append(life(best, after))
        idle = 0 if after > best else idle + 1
        best = after
        assert (refusal(lives) is not None) == (idle >= 3)


def test_a_killed_life_ends_with_the_last_checkpoint() -> None:
    (closed,) = with_unfinished_closed([life(3, None, ended_at=None)], 7, 50.0)
    assert (closed.end_step, closed.ended_at, closed.outcome) == (7, 50.0, "lost")
    assert closed.made_progress
    assert from_json(Life, to_json(closed)) == closed


RECORD = JobRecord(token="t", submitted_at=1.0, options=JobOptions(), first_job_id="12")
RUNNING = life(0, None, ended_at=None)
HERE = Head(job_id="12", host="n1", boot_id=boot_id())
THERE = Head(job_id="12", host="n1", boot_id="another boot")


def job(state: str, **changes: object) -> SlurmJob:
    return SlurmJob(job_id="12", state=state, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("record", "seen", "place", "state"),
    [
        (RECORD, None, Place.QUEUE, RunState.QUEUED),
        (RECORD, job("PENDING"), Place.QUEUE, RunState.QUEUED),
        (RECORD, job("RUNNING", nodes="n1"), Place.ELSEWHERE, RunState.RUNNING),
        (RECORD, job("RUNNING", start_at=NOW - 5), Place.ELSEWHERE, RunState.STARTING),
        (RECORD, job("RUNNING", start_at=NOW - 300), Place.ELSEWHERE, RunState.RUNNING),
        (RECORD, job("CANCELLED"), Place.ENDED, RunState.STOPPED),
        (RECORD, job("TIMEOUT"), Place.ENDED, RunState.FAILED),
        (RECORD, job("COMPLETED"), Place.ENDED, RunState.FINISHED),
        (RECORD, job("FAILED", exit_code=3), Place.ENDED, RunState.STOPPED),
        (RECORD, job("FORGOTTEN"), Place.ENDED, RunState.LOST),
        (replace(RECORD, first_job_id=None), None, Place.ENDED, RunState.FAILED),
        (replace(RECORD, cancelled_at=5.0), None, Place.ENDED, RunState.STOPPED),
        (replace(RECORD, lives=(RUNNING,), head=HERE), job("PENDING"), Place.HERE, None),
        (replace(RECORD, lives=(RUNNING,), head=THERE), None, Place.ELSEWHERE, RunState.RUNNING),
        (replace(RECORD, lives=(RUNNING,), head=THERE), job("NODE_FAIL"), Place.HERE, None),
        (
            replace(RECORD, lives=(life(0, 5, requeued=True),), head=THERE),
            job("PENDING", reason="BeginTime"),
            Place.QUEUE,
            RunState.QUEUED,
        ),
        (
            replace(RECORD, lives=(life(0, 5, requeued=True),), head=THERE),
            job("COMPLETING"),
            Place.QUEUE,
            RunState.QUEUED,
        ),
        (
            replace(RECORD, lives=(life(0, 5, requeued=True),), cancelled_at=9.0),
            job("CANCELLED"),
            Place.HERE,
            None,
        ),
        (replace(RECORD, lives=(life(0, 5),), head=THERE), job("COMPLETED"), Place.HERE, None),
    ],
)
def test_where_a_run_is(
    record: JobRecord, seen: SlurmJob | None, place: Place, state: RunState | None
) -> None:
    found = place_of(record, seen, NOW)
    assert (found.place, found.state) == (place, state)
    assert (found.detail is None) == (state is None)


def test_the_job_that_continues_a_run() -> None:
    assert RECORD.job_id == "12"
    assert replace(RECORD, lives=(life(0, 1, job_id="15"),)).job_id == "15"
    chained = replace(RECORD, lives=(life(0, 1, requeued=True),), next_job_id="16")
    assert chained.job_id == "16"
    assert chained.waits
