"""What the form of a resume, lists of checkpoints and JSON say about an older step."""

from __future__ import annotations

from pathlib import Path

import pytest

from ltui.app.launch.past_run import NEWEST, RESUME, Choice, PastRun, _as_preset, check_choice
from ltui.app.presentation.run_report import checkpoint_rows, show_lines
from ltui.app.presentation.snapshot_text import newest_checkpoint_text
from ltui.app.runs.run_entry import run_document
from ltui.app.screens.resume_or_rerun import _checkpoint_options
from ltui.training.config.device_selection import Machine
from ltui.training.config.run_spec import RunSpec
from ltui.training.state.run_snapshot import CheckpointInfo, RunState
from ltui.training.store.run_directory import RunDir
from tests.app.frames import NOW, rank, snapshot

CHECKPOINTS = (
    CheckpointInfo(path="/c/step-50.ckpt", global_step=50, attempt=1, fit=1),
    CheckpointInfo(path="/c/step-92.ckpt", global_step=92, attempt=2, fit=1),
    CheckpointInfo(
        path="/c/step-242.ckpt", global_step=242, attempt=1, fit=1, superseded=True, saved_at=9e9
    ),
)


def past_run(folder: Path) -> PastRun:
    spec = RunSpec(
        id="a", name="a", created_at=1.0, cwd="/", python="python3", nproc=1, command=("train",)
    )
    older, newest, left = CHECKPOINTS
    return PastRun(
        run_dir=RunDir(folder),
        spec=spec,
        preset=_as_preset(spec),
        checkpoints=(newest, left, older),
        replaced={older.path: "Steps 51 to 92 are gone."},
        state=RunState.STOPPED,
        attempt=2,
    )


@pytest.mark.parametrize(("checkpoint", "sentence"), [(NEWEST, False), ("step-50.ckpt", True)])
def test_the_form_names_the_steps_that_a_resume_replaces(
    tmp_path: Path, checkpoint: str, sentence: bool
) -> None:
    choice = Choice(mode=RESUME, checkpoint=checkpoint, texts={})
    words = check_choice(past_run(tmp_path), choice, Machine()).words
    assert words.endswith(". Steps 51 to 92 are gone.") == sentence


def test_the_form_marks_a_checkpoint_that_the_run_has_left(tmp_path: Path) -> None:
    newest, *others = _checkpoint_options(past_run(tmp_path))
    assert newest == ("newest: step 92", NEWEST)
    assert [text for text, _ in others] == ["step 242 (no longer part of the run)", "step 50"]


def test_every_text_names_the_checkpoint_that_a_resume_takes() -> None:
    stopped = snapshot(state=RunState.STOPPED, checkpoints=CHECKPOINTS)
    assert newest_checkpoint_text(stopped).startswith("newest checkpoint: step 92,")
    assert checkpoint_rows(stopped)[0][1].startswith("step 92,")
    (left,) = (line for line in show_lines(stopped, NOW) if "step 242," in line)
    assert "no longer part of the run" in left


def test_epochs_of_ranks_count_from_1_in_json() -> None:
    document = run_document(snapshot(epoch=2, ranks=(rank(0, epoch=2), rank(1, epoch=None))))
    assert document["epoch"] == 3
    assert [r["epoch"] for r in document["ranks"]] == [3, None]
