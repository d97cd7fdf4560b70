"""The supervisor's side of a profile: which ranks, what is refused, what counts as no result."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ltui.app.actions import profile_run
from ltui.training.diagnosis.limits import RankLoad, slowest_first
from ltui.training.diagnosis.profile_summary import ProfileState
from ltui.training.lifecycle import supervisor_client
from ltui.training.problem import ProblemError
from ltui.training.shared.profile_request import read_request, report_path
from ltui.training.shared.record_types import Phase
from ltui.training.state.record_fold import FoldState, RankFold, RunningTotals, fold
from ltui.training.state.run_snapshot import RunState
from ltui.training.store.profile_files import profile_folder, read_profile
from ltui.training.store.run_directory import RunDir
from ltui.training.supervise.speed.profile_watch import ProfileWatch, choose_ranks
from ltui.training.tensor_queue.control_block import ControlFile
from tests.required import required
from tests.state.records import pulse, step

TOTALS = RunningTotals(1, 100.0, 100.0, *(0.0,) * 7)


def ranks(count: int = 3, **changes: Any) -> FoldState:
    values = {"totals": TOTALS, "recent_step_s": (0.1,) * 9, "global_step": 100, **changes}
    return FoldState(ranks={rank: RankFold(rank=rank, **values) for rank in range(count)})


def load(rank: int, **changes: Any) -> RankLoad:
    values: dict[str, Any] = {"steps": 10, "seconds": 1.0, "beats": 40, **changes}
    return RankLoad(rank=rank, **values)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "runs" / "x")
    made.queue_dir(1).mkdir(parents=True)
    return made


def start(watch: ProfileWatch, state: FoldState | None = None, **wish: Any) -> Any:
    options: Mapping[str, Any] = {"furthest": 100, "max_steps": None}
    known = state or ranks()
    return watch.start(wish, known, sorted(known.ranks), **options)


def test_the_slowest_is_the_rank_that_works_most_or_waits_least() -> None:
    own = [load(0, own_s=0.2), load(1, own_s=0.9), load(2, own_s=0.4)]
    order = slowest_first(own, [0, 1, 2])
    assert choose_ranks("slowest,median,0", order) == (1, 2, 0)
    waits = [load(0, waiting=30), load(1, waiting=20), load(2, waiting=1)]
    assert choose_ranks("0, slowest,2", slowest_first(waits, [0, 1, 2])) == (0, 2)
    assert slowest_first([], [0, 1]) == [0, 1]
    assert slowest_first(own, [0, 1, 2], 2) == [2, 1, 0]  # what the screen names as the limit
    for wrong in ("5", "-1", "", "all", "0,,1", "0" * 5000, "²"):
        with pytest.raises(ValueError, match="there is no rank"):
            choose_ranks(wrong, order)
    with pytest.raises(ValueError, match="at most 8"):
        choose_ranks(",".join(map(str, range(9))), range(9))


def test_a_request_reaches_the_ranks_before_its_steps(run_dir: RunDir) -> None:
    watch = ProfileWatch(run_dir, 1)
    profile = start(watch)
    request = required(read_request(run_dir.queue_dir(1)))
    assert request.first >= 100 + 15
    assert (profile.first, profile.last) == (request.first + 1, request.first + 5)
    assert ControlFile.open(run_dir.queue_dir(1) / "control.bin").profile_word[0] == 1
    assert watch.unmeasured == (request.first - 1, request.last + 1)
    assert required(ProfileWatch(run_dir, 1).active).number == 1


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        ({"steps": 0}, "from 1 to 50"),
        ({"steps": 51}, "from 1 to 50"),
        ({"steps": True}, "from 1 to 50"),
        ({"steps": "5"}, "from 1 to 50"),
        ({"ranks": ["0"]}, "there is no rank"),
        ({"ranks": "3"}, "there is no rank"),
        ({"ranks": ""}, "there is no rank ''"),
    ],
)
def test_a_bad_wish_is_refused(run_dir: RunDir, wish: dict[str, Any], reason: str) -> None:
    watch = ProfileWatch(run_dir, 1)
    with pytest.raises(ValueError, match=reason):
        start(watch, **wish)
    assert watch.active is None
    with pytest.raises(ValueError, match="ends at step 103"):
        watch.start({}, ranks(), (0, 1, 2), furthest=100, max_steps=103)
    with pytest.raises(ValueError, match="not made a step"):
        start(watch, FoldState())


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"rank": 0, "error": "the program profiles itself"}', "rank 0: the program profiles"),
        ('{"rank": 0', "cannot be read"),
        ('{"rank": "0"}', "cannot be read"),
        (json.dumps({"rank": 0, "anchor_ns": 1, "steps": [[5, 1, 2]]}), "No such file"),
    ],
)
def test_a_bad_report_is_no_success(run_dir: RunDir, content: str, reason: str) -> None:
    watch = ProfileWatch(run_dir, 1)
    start(watch, ranks="0")
    report_path(profile_folder(run_dir, 1), 0).write_text(content, encoding="utf-8")
    watch.update(RunState.RUNNING, {}, ranks())
    watch.close()
    found = required(read_profile(run_dir))
    assert found.state is ProfileState.FAILED
    assert reason in required(found.reason)
    assert start(watch).number == 2


def test_a_profile_of_an_attempt_that_ended_has_failed(run_dir: RunDir) -> None:
    start(ProfileWatch(run_dir, 1))
    run_dir.queue_dir(2).mkdir()
    later = ProfileWatch(run_dir, 2)
    assert later.active is None
    assert "attempt 1 ended" in required(required(read_profile(run_dir)).reason)
    later = ProfileWatch(run_dir, 2)
    start(later)
    later.close()
    assert required(read_profile(run_dir)).state is ProfileState.FAILED


def test_a_damaged_profile_hides_no_older_one_and_no_number_is_too_large(run_dir: RunDir) -> None:
    for number in (1, 2):
        watch = ProfileWatch(run_dir, 1)
        assert start(watch).number == number
        watch.close()
    (profile_folder(run_dir, 2) / "profile.json").write_text("{")
    profile_folder(run_dir, 10**21).mkdir()
    assert required(read_profile(run_dir)).number == 1
    assert start(ProfileWatch(run_dir, 1)).number == 3


def test_a_profile_that_the_ranks_never_heard_of_has_failed(run_dir: RunDir) -> None:
    start(ProfileWatch(run_dir, 1))
    control = ControlFile.open(run_dir.queue_dir(1) / "control.bin")
    control.profile_word[0] = 0
    control.close()
    assert ProfileWatch(run_dir, 1).active is None
    assert "before the ranks had the request" in required(required(read_profile(run_dir)).reason)


def test_a_rank_that_makes_no_progress_ends_a_profile_unless_the_run_is_paused(
    run_dir: RunDir,
) -> None:
    watch = ProfileWatch(run_dir, 1)
    start(watch, ranks="0,1,2")
    now_s = time.monotonic()

    def update(state: RunState, *idle_s: float, at: int = 100) -> str | None:
        pulses = {
            rank: pulse(rank, Phase.FORWARD, now_s - s, global_step=at)
            for rank, s in enumerate(idle_s)
        }
        watch.update(state, pulses, ranks())
        return required(read_profile(run_dir)).reason

    assert update(RunState.RUNNING, 1, 50, 1) is None
    assert update(RunState.PAUSED, 90, 90, 90) is None
    assert update(RunState.RUNNING, 1, 150, 150, at=118) is None  # it may write its trace
    assert "ranks 1, 2 made no progress" in required(update(RunState.RUNNING, 1, 90, 90))


@pytest.mark.parametrize("begun", [True, False])
def test_who_gets_no_answer_waits_for_the_profile_that_was_begun(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    start(ProfileWatch(run_dir, 1))

    def refuse(_: RunDir, request: dict[str, Any], _timeout_s: float) -> None:
        ProfileWatch(run_dir, 2)
        if begun:
            assert start(ProfileWatch(run_dir, 1), **request).number == 2
        raise ProblemError.of(where="x", what="profile 2 is running.")

    monkeypatch.setattr(profile_run, "require_live", lambda _: None)
    monkeypatch.setattr(profile_run, "send_request", refuse)
    if begun:
        assert profile_run.begin(run_dir) == 2
    else:
        with pytest.raises(ProblemError, match="is running"):
            profile_run.begin(run_dir)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_supervisor_that_another_process_starts_meanwhile_is_used(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    holders = iter((None, object() if is_there else None))

    def refuse(*_: object) -> None:
        raise ProblemError.of(where="x", what="another supervisor already has this run.")

    for name, value in (
        ("lock_holder", lambda _: next(holders)),
        ("lock_left_by_us", lambda _: True),
        ("start_supervisor", refuse),
    ):
        monkeypatch.setattr(supervisor_client, name, value)
    if is_there:
        supervisor_client.restart_supervisor(run_dir)
    else:
        with pytest.raises(ProblemError, match="another supervisor"):
            supervisor_client.restart_supervisor(run_dir)


def test_profiled_steps_count_for_no_rate_and_no_step_time() -> None:
    rows = [step(n, n * 0.1, step_s=5.0 if 3 <= n <= 6 else 0.1, samples=4.0) for n in range(1, 30)]
    plain = fold(FoldState(), 0, rows).ranks[0]
    found = fold(FoldState(unmeasured=(3, 6)), 0, rows).ranks[0]
    assert set(plain.recent_step_s) == {0.1, 5.0}
    assert set(found.recent_step_s) == {0.1}
    assert required(found.totals).timed_s == pytest.approx(2.5)
    assert found.samples_per_s == pytest.approx(40.0)
    assert found.global_step == 29
