"""What happened to a run, read from a real store as marks for its charts."""

from __future__ import annotations

from pathlib import Path

from ltui.app.live.frame import MarkKind, RunMark, checkpoint_marks, stored_marks
from ltui.training.state.run_snapshot import CheckpointInfo, Verdict
from ltui.training.store.history_reader import RunStore
from ltui.training.store.history_writer import StoreWriter
from tests.store.histories import begin, run_dir


def test_attempts_and_changed_settings_are_marks_at_the_step_of_the_resume(tmp_path: Path) -> None:
    run = run_dir(tmp_path)
    writer = StoreWriter(run.db_path)
    begin(writer)
    writer.begin_attempt(
        2, started_at=50.0, boot_id="b", resumed_path="/c", resumed_step=300,
        changes=["model.lr=1e-4", "data.batch_size=64"],
    )  # fmt: skip
    begin(writer, 3)
    writer.close()
    with RunStore(run) as store:
        assert stored_marks(store) == [
            RunMark(MarkKind.ATTEMPT, "attempt 2 from step 300", 300, 50.0),
            RunMark(MarkKind.CHANGE, "changed model.lr=1e-4, data.batch_size=64", 300, 50.0),
            RunMark(MarkKind.ATTEMPT, "attempt 3 from the start", 0, 1.0),
        ]


def test_only_verdicts_that_stop_the_run_are_marks_at_their_time(tmp_path: Path) -> None:
    run = run_dir(tmp_path)
    writer = StoreWriter(run.db_path)
    begin(writer)
    for verdict in (
        Verdict(kind="a", level="stalled", cause="rank 1 waits", began=10.0, ended=22.4),
        Verdict(kind="b", level="dead", cause="rank 0 was killed", began=30.0),
        Verdict(kind="c", level="slow", cause="rank 1 is slow", began=11.0),
        Verdict(kind="d", level="warning", cause="memory", began=12.0),
        Verdict(kind="e", level="of a later version", cause="?", began=13.0),
        Verdict(kind="f", level="stalled", cause="never began"),
    ):
        writer.write_verdict(1, verdict)
    writer.close()
    with RunStore(run) as store:
        assert stored_marks(store) == [
            RunMark(MarkKind.STALL, "stalled for 12 s: rank 1 waits", None, 10.0),
            RunMark(MarkKind.STALL, "dead: rank 0 was killed", None, 30.0),
        ]


def test_each_checkpoint_is_a_mark_at_its_step() -> None:
    info = CheckpointInfo(path="/c", global_step=7, epoch=0, ok=True, saved_at=9.0)
    best = CheckpointInfo(path="/d", global_step=9, epoch=0, ok=True, reason="best")
    assert checkpoint_marks([info, best]) == [
        RunMark(MarkKind.CHECKPOINT, "checkpoint of step 7", 7.0, 9.0),
        RunMark(MarkKind.CHECKPOINT, "checkpoint of step 9, best", 9.0, None),
    ]
