"""``ltui wait`` and ``ltui events``: why a wait ends, its exit code, the cursor of the events."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from ltui.app.actions import wait_for_runs as module
from ltui.app.actions.wait_for_runs import EXIT_CODES, Outcome, outcome, parse_condition
from ltui.app.cli import main
from ltui.training.problem import ProblemError
from ltui.training.state.run_snapshot import (
    CheckpointInfo,
    Event,
    MetricValue,
    RunSnapshot,
    RunState,
    Verdict,
)
from ltui.training.store.history_writer import Batch, StoreWriter
from tests.cli.conftest import Ltui
from tests.stored_runs import stored_run

RUNNING = RunSnapshot(id="calm-fox-0001", name="calm-fox", state=RunState.RUNNING, taken_at=1000.0)
FINISHED = {"state": RunState.FINISHED, "detail": "finished at step 160"}
STUCK = {
    "state": RunState.QUEUED,
    "detail": "never starts: run a had to finish before, and it is stopped",
}
STALL = Verdict(kind="stopped", level="stalled", cause="rank 1 is stopped (SIGSTOP)", began=990.0)
YOUNG_DEATH = Verdict(kind="died", level="dead", cause="rank 1 was killed by SIGKILL", began=990.0)
DEATH = replace(YOUNG_DEATH, began=900.0)
NAN = Verdict(kind="nan_loss", level="warning", cause="NaN", evidence={"step": 41}, began=900.0)
LOSS = {"val/loss": MetricValue(last=0.3, step=80, best_min=0.19, best_max=float("nan"))}


def snapshot(**changes: Any) -> RunSnapshot:
    return replace(RUNNING, **changes)


@pytest.mark.parametrize(
    ("until", "changes", "reason", "words"),
    [
        ("ended", FINISHED, "finished", "finished at step 160"),
        ("ended", {"state": RunState.STOPPED, "detail": "stopped at step 9"}, "stopped", "step 9"),
        ("ended", {"state": RunState.FAILED, "detail": "rank 0 raised"}, "failed", "rank 0 raised"),
        ("ended", {"state": RunState.CRASHED}, "failed", "crashed"),
        ("ended", {"state": RunState.LOST}, "lost", "lost"),
        ("ended", {"verdicts": (DEATH,)}, "stalled", "rank 1 was killed"),
        ("ended", {"verdicts": (STALL,)}, "stalled", "rank 1 is stopped"),
        ("stalled", {"verdicts": (STALL,)}, "met", "STALLED: rank 1 is stopped"),
        ("resolved", {}, "met", "no rank is stalled"),
        ("nan", {"verdicts": (NAN,)}, "met", "NaN since step 41"),
        ("step>=80", {"global_step": 80}, "met", "at step 80 (>= 80)"),
        ("step>=80", {"global_step": 79, **FINISHED}, "not met", "not met: step>=80"),
        ("epoch>=3", {"epoch": 2}, "met", "at epoch 3 (>= 3)"),
        ("epoch>=3", {"epoch": 1, **FINISHED}, "not met", "not met: epoch>=3"),
        ("ended", STUCK, "never starts", "run a had to finish before, and it is stopped"),
        ("step>=1", STUCK, "never starts", "never starts"),
        ("val/loss<0.2", {"metrics": LOSS}, "met", "val/loss was 0.19 (< 0.2)"),
        ("val/loss<0.31", {"metrics": LOSS}, "met", "val/loss was 0.3 (< 0.31) at step 80"),
        ("val/loss>1", {"metrics": LOSS, **FINISHED}, "not met", "not met: val/loss>1"),
        ("stalled", FINISHED, "not met", "not met: stalled"),
    ],
)
def test_why_a_wait_ends(until: str, changes: dict[str, Any], reason: str, words: str) -> None:
    result = outcome([parse_condition(until)], snapshot(**changes))
    assert result is not None
    assert (result.reason, words in result.sentence) == (reason, True), result


@pytest.mark.parametrize(
    ("until", "changes"),
    [
        ("ended", {}),
        ("ended", {"verdicts": (YOUNG_DEATH,)}),
        (
            "ended",
            {"state": RunState.QUEUED, "detail": "restart 3 of 3 in 8 s", "verdicts": (DEATH,)},
        ),
        ("ended", {"state": RunState.PAUSED}),
        ("ended", {"state": RunState.QUEUED, "detail": "held"}),
        ("resolved", {"verdicts": (STALL,)}),
        ("stalled", {"verdicts": (Verdict(kind="s", level="stalled", cause="c", began=999.0),)}),
        ("val/loss<0.1", {"metrics": LOSS}),
        ("acc>0", {"metrics": LOSS}),
        ("step>=1", {}),
        ("event:paused", {}),
    ],
)
def test_what_a_wait_goes_on_for(until: str, changes: dict[str, Any]) -> None:
    assert outcome([parse_condition(until)], snapshot(**changes)) is None


def test_any_of_several_conditions_is_enough() -> None:
    conditions = [parse_condition(text) for text in ("ended", "step>=5")]
    result = outcome(conditions, snapshot(global_step=5))
    assert result == Outcome(reason="met", sentence="at step 5 (>= 5)")
    assert outcome(conditions, snapshot(**FINISHED)) == Outcome(
        reason="finished", sentence="finished at step 160"
    )


@pytest.mark.parametrize("text", ["", "end", "event:", "step>=many", "val/loss", "step>=nan"])
def test_a_condition_that_is_none(text: str) -> None:
    with pytest.raises(ProblemError, match="invalid condition"):
        parse_condition(text)


ENDED: dict[str, dict[str, Any]] = {
    "calm-fox-0001": {},
    "dry-hare-0002": {"state": RunState.STOPPED, "detail": "stopped at step 9"},
    "easy-elk-0003": {"state": RunState.FAILED, "detail": "rank 0 raised"},
    "fast-owl-0004": {"state": RunState.LOST},
}


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["calm-fox"], 0),
        (["dry-hare"], 3),
        (["easy-elk"], 1),
        (["fast-owl"], 6),
        (["calm-fox", "dry-hare"], 3),
        (["dry-hare", "easy-elk", "calm-fox"], 1),
        (["dry-hare", "easy-elk", "calm-fox", "--any"], 0),
        (["calm-fox", "--until", "nan"], 1),
        (["no-such-run"], 2),
        (["calm-fox", "--until", "soon"], 2),
        (["calm-fox", "--for-at-most", "soon"], 2),
    ],
)
def test_the_exit_codes_of_ended_runs(
    private_home: Path, words: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    for run_id, changes in ENDED.items():
        stored_run(private_home, run_id, **changes)
    try:
        ended = main(["wait", *words])
    except SystemExit as exit_of_parser:
        ended = int(exit_of_parser.code or 0)
    assert ended == code
    shown = capsys.readouterr()
    lines = (shown.err if code == 2 else shown.out).splitlines()
    named = sum(f"{word}-" in " ".join(ENDED) for word in words)
    assert len(lines) == (1 if code == 2 else named)


def test_the_json_of_a_wait_names_what_is_next(
    private_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored_run(private_home, "calm-fox-0001", metrics={"loss": float("nan")})
    saved = CheckpointInfo(path="/c/a.ckpt", global_step=9, ok=True)
    stored_run(private_home, "dry-hare-0002", **ENDED["dry-hare-0002"], checkpoints=(saved,))
    assert main(["wait", "calm-fox", "dry-hare", "--json"]) == 3
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["ok"]) == (1, True)
    assert document["next"] == ["ltui resume dry-hare-0002"]
    first, second = document["data"]["runs"]
    assert (first["reason"], first["metrics"]["loss"]["last"]) == ("finished", "NaN")
    assert (second["reason"], second["state"], document["data"]["exit_code"]) == (
        "stopped",
        "stopped",
        3,
    )


def test_every_reason_has_a_code_and_the_help_names_each(ltui: Ltui) -> None:
    shown = ltui("wait", "--help").stdout
    assert {f"\n  {code}  " in shown for code in {*EXIT_CODES.values(), 2}} == {True}


def test_a_wait_for_a_live_run_ends_by_time_by_event_and_by_its_end(
    private_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The snapshot is that of a live run; the history and its events are real."""
    run_dir = stored_run(private_home, "calm-fox-0001")
    live = snapshot(global_step=7, metrics={"loss": MetricValue(last=1.0, step=7)})
    monkeypatch.setattr(module, "current_snapshot", lambda _: live)
    monkeypatch.setattr(module, "POLL_INTERVAL_S", 0.01)
    assert main(["wait", "last", "--for-at-most", "0.05s", "--until", "acc>1"]) == 4
    shown = capsys.readouterr()
    unlogged = "`acc` has not been logged yet. Logged metrics: loss\n"
    assert shown.out.startswith("calm-fox-0001: still running at step 7 after")
    assert shown.out.endswith(f"; {unlogged}")
    assert shown.err == f"calm-fox-0001: {unlogged}", "named once, and while it waits"

    codes: list[int] = []
    waiting = threading.Event()

    def sleep(seconds: float) -> None:
        waiting.set()
        threading.Event().wait(seconds)

    monkeypatch.setattr("time.sleep", sleep)
    thread = threading.Thread(
        target=lambda: codes.append(main(["wait", "last", "--until", "event:paused"]))
    )
    thread.start()
    assert waiting.wait(60)
    writer = StoreWriter(run_dir.db_path)
    writer.commit(1, Batch(events=[Event(5.0, "paused", "Paused at step 7.")]))
    writer.close()
    thread.join(60)
    assert codes == [0]
    assert capsys.readouterr().out == "calm-fox-0001: Paused at step 7.\n"


def test_files_that_stay_unreadable_end_the_wait(
    private_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stored_run(private_home, "calm-fox-0001")

    def gone(_: object) -> RunSnapshot:
        raise ProblemError.of(where="calm-fox-0001", what="the run directory is gone.")

    monkeypatch.setattr(module, "current_snapshot", gone)
    monkeypatch.setattr(module, "UNREADABLE_S", 0.0)
    monkeypatch.setattr(module, "POLL_INTERVAL_S", 0.01)
    assert main(["wait", "last"]) == 6
    assert "the run directory is gone" in capsys.readouterr().out


def test_events_are_lines_whose_cursor_continues(
    private_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = stored_run(private_home, "calm-fox-0001")
    writer = StoreWriter(run_dir.db_path)
    first = Event(5.0, "paused", "Paused at step 7.", {"loss": float("nan")}, rank=0)
    writer.commit(1, Batch(events=[first, Event(6.0, "continued", "Continued.")]))
    writer.close()
    assert main(["events", "last"]) == 0
    paused, continued = map(json.loads, capsys.readouterr().out.splitlines())
    cursor = paused.pop("cursor")
    assert paused == {
        "attempt": 1,
        "rank": 0,
        "t": 5.0,
        "kind": "paused",
        "text": "Paused at step 7.",
        "data": {"loss": "NaN"},
    }
    assert main(["events", "last", "--since", str(cursor), "--follow"]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [continued]
    assert continued["rank"] is None
