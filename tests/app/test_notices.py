"""Sentences about what happened, and about what can't be done now."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from ltui.app.keys.run_keys import run_hints
from ltui.app.presentation.notifications import CONTROLS, farewell, refusal, toasts_for
from ltui.app.screens.run_commands import kill_question, question_for_several, stop_question
from ltui.training.state.run_snapshot import LIVE, CheckpointInfo, NodeSnapshot, RunState
from tests.app.frames import snapshot


def sentences(before: object, now: object) -> list[str]:
    return [text.replace("\u2009", " ") for text, _ in toasts_for(before, now)]  # type: ignore[arg-type]


def test_nothing_is_said_of_the_first_look_or_of_no_change() -> None:
    assert sentences(None, snapshot()) == []
    assert sentences(snapshot(), snapshot()) == []


def test_changes_are_said_with_their_step() -> None:
    run = snapshot()
    paused = replace(run, state=RunState.PAUSED)
    assert sentences(run, paused) == ["paused at step 1204"]
    assert sentences(paused, replace(run, global_step=1220)) == ["continued at step 1204"]
    stopped = replace(run, state=RunState.STOPPED, detail=None)
    assert sentences(run, stopped) == ["stopped at step 1204"]
    assert sentences(run, replace(stopped, detail="stopped at step 7, checkpoint verified")) == [
        "stopped at step 7, checkpoint verified"
    ]
    assert sentences(stopped, replace(run, attempt=3)) == ["attempt 3 started from step 1204"]


def test_a_failure_is_said_as_an_error() -> None:
    (said,) = toasts_for(snapshot(), snapshot(state=RunState.CRASHED, detail="rank 1 was killed"))
    assert said == ("rank 1 was killed", "error")


def test_only_a_checkpoint_that_was_asked_for_is_said() -> None:
    asked = CheckpointInfo(path="/c/9", global_step=1204, ok=True, reason="request")
    periodic = CheckpointInfo(path="/c/8", global_step=1200, ok=True, reason="periodic")
    run = snapshot()
    now = replace(run, checkpoints=(*run.checkpoints, periodic, asked))
    assert sentences(run, now) == ["checkpoint saved: step 1204, weights not checked, checksum ok"]


@pytest.mark.parametrize("state", list(RunState))
def test_every_control_is_either_offered_or_refused_with_a_sentence(state: RunState) -> None:
    run = snapshot(state=state)
    for action in CONTROLS:
        why = refusal(run, action, readonly=False)
        offered = any(h.action == f"screen.{action}" for h in run_hints(run, readonly=False))
        assert offered == (why is None)
        assert refusal(run, action, readonly=True) is not None
    assert (refusal(run, "resume", readonly=False) is None) == (state not in LIVE)
    assert refusal(run, "rerun", readonly=False) is None


def test_several_machines_are_not_profiled() -> None:
    run = snapshot(nodes=(NodeSnapshot(node=0, name="a"), NodeSnapshot(node=1, name="b")))
    why = refusal(run, "profile", readonly=False)
    assert why == "brave-owl runs on several machines: a profile of it is not possible yet"


def test_without_a_good_checkpoint_there_is_nothing_to_resume() -> None:
    bad = CheckpointInfo(path="/c/1", global_step=1, ok=False)
    for checkpoints in ((), (bad,)):
        run = snapshot(state=RunState.CRASHED, checkpoints=checkpoints)
        assert "no good checkpoint" in str(refusal(run, "resume", readonly=False))


def test_a_kill_names_what_is_lost() -> None:
    assert "204 steps will be lost" in kill_question(snapshot())
    assert "All its progress will be lost" in kill_question(snapshot(checkpoints=()))
    assert kill_question(snapshot()).endswith("with a checkpoint instead, press Esc, then s.")


def test_leaving_a_live_run_names_the_way_back() -> None:
    assert "ltui attach brave-owl-3f2a" in farewell(snapshot())
    assert farewell(snapshot(state=RunState.STOPPED, detail="stopped")) == "brave-owl: stopped"


def test_what_ranks_that_start_cannot_do_is_not_offered() -> None:
    starting = snapshot(state=RunState.STARTING)
    for action in ("pause", "checkpoint"):
        why = refusal(starting, action, readonly=False)
        assert why is not None
        assert "not started" in why
    assert refusal(starting, "stop", readonly=False) is None
    assert refusal(starting, "kill", readonly=False) is None


def test_a_stop_that_could_not_save_is_said_as_an_error() -> None:
    stopping = snapshot(state=RunState.STOPPING)
    on = snapshot(state=RunState.RUNNING, detail="not stopped: the disk is full")
    assert toasts_for(stopping, on) == [("not stopped: the disk is full", "error")]


def test_no_checkpoint_is_promised_of_a_program_without_lightning() -> None:
    lightning = snapshot(state=RunState.RUNNING)
    plain = replace(lightning, program="PyTorch DDP", saves_checkpoints=False)
    assert "saves a checkpoint" in stop_question(lightning)
    assert "Only what it saves itself is kept" in stop_question(plain)
    assert "with a checkpoint" in kill_question(lightning)
    assert "with a checkpoint" not in kill_question(plain)
    assert "SIGTERM" not in question_for_several("2 runs", [lightning, lightning])
    mixed = question_for_several("2 runs", [lightning, plain])
    assert "cannot do that for 1 of them: these end by a signal" in mixed
    assert "a checkpoint" not in question_for_several("2 runs", [plain, plain])
    assert refusal(lightning, "checkpoint", readonly=False) is None
    assert "has not told ltui how to save" in str(refusal(plain, "checkpoint", readonly=False))
    assert refusal(plain, "pause", readonly=False) is None
