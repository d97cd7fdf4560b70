"""Which checkpoint ``RUN`` and ``RUN:STEP`` name, when it is looked for at once and thoroughly."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from ltui.training.config.run_spec import RunSpec
from ltui.training.lifecycle.resume_run import find_start_checkpoint
from ltui.training.problem import ProblemError
from ltui.training.shared.checkpoint_files import (
    checkpoint_name,
    partial_path,
    publish_checkpoint,
    rank_file,
)
from ltui.training.store.run_checkpoints import choose_checkpoint, furthest_checkpoint
from ltui.training.store.run_directory import RunDir


@pytest.fixture
def source(tmp_path: Path) -> RunDir:
    """A run with checkpoints of steps 10 and 20, the later one damaged."""
    run_dir = RunDir(tmp_path / "runs" / "brave-owl-3f2a")
    run_dir.checkpoints_dir.mkdir(parents=True)
    run_dir.write_spec(
        RunSpec(id=run_dir.id, name="brave-owl", created_at=time.time(), cwd="/", python="python3")
    )
    for step in (10, 20):
        path = run_dir.checkpoints_dir / checkpoint_name(step, "request")
        partial_path(path).write_bytes(b"weights" * step)
        partial_path(rank_file(path, 0)).write_bytes(b"rank")
        publish_checkpoint(
            partial_path(path),
            path,
            1,
            global_step=step,
            epoch=0,
            reason="request",
            attempt=1,
            fit=1,
        )
    path.write_bytes(b"WEIGHTS" * 20)
    return run_dir


def test_at_once_what_is_there_and_thoroughly_what_is_whole(source: RunDir) -> None:
    home = source.home
    for text in ("brave-owl", "last", "brave-owl-3f2a:20"):
        run_dir, info = find_start_checkpoint(home, text, verified=False)
        assert (run_dir, info.global_step) == (source, 20)
    assert find_start_checkpoint(home, "brave-owl")[1].global_step == 10
    assert find_start_checkpoint(home, "brave-owl:10")[1].global_step == 10
    with pytest.raises(ProblemError, match=r"no complete checkpoint of step 20"):
        find_start_checkpoint(home, "brave-owl:20")


def test_a_checkpoint_after_the_first_nan_is_never_chosen(tmp_path: Path) -> None:
    def saved(step: int, **facts: Any) -> None:
        path = tmp_path / checkpoint_name(step, "periodic")
        partial_path(path).write_bytes(b"weights")
        publish_checkpoint(partial_path(path), path, 0, global_step=step, attempt=1, fit=1, **facts)

    saved(10)
    saved(20, weights="finite")
    saved(30, weights="finite")
    saved(40, weights="NaN")
    saved(50, weights="inf")
    for since, step in ((None, 30), (30, 30), (29, 20), (20, 20), (19, 10), (11, 10)):
        taken = choose_checkpoint(tmp_path, since).taken
        assert taken is not None
        assert taken.global_step == step
        assert furthest_checkpoint(tmp_path, since) == replace(taken, ok=None)
    none = choose_checkpoint(tmp_path, 10)
    assert none.taken is None
    assert none.why_none() == (
        "there is no checkpoint before the NaN (step-00000050-periodic.ckpt has inf weights; "
        "step-00000040-periodic.ckpt has NaN weights; step-00000030-periodic.ckpt is from after "
        "the first NaN loss (step 10); and 2 more)"
    )


@pytest.mark.parametrize("verified", [False, True])
def test_what_is_not_there_is_said(source: RunDir, verified: bool) -> None:
    find = partial(find_start_checkpoint, verified=verified)
    with pytest.raises(ProblemError, match=r"of step 7\. There are checkpoints of steps 10, 20"):
        find(source.home, "brave-owl:7")
    with pytest.raises(ProblemError, match="Did you mean brave-owl-3f2a"):
        find(source.home, "brave-howl")
    for path in source.checkpoints_dir.iterdir():
        path.unlink()
    with pytest.raises(ProblemError, match="no complete checkpoint"):
        find(source.home, "brave-owl")
