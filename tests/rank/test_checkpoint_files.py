"""A checkpoint on disk is the previous or the new one, whenever its writer dies."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ltui.training.shared.checkpoint_files import (
    checkpoint_name,
    partial_path,
    prune_periodic,
    publish_checkpoint,
    rank_file,
)
from ltui.training.store.run_checkpoints import checkpoint_to_resume, list_checkpoints, verify

WRITER = """
import os, sys
from pathlib import Path
from ltui.training.shared.checkpoint_files import (
    checkpoint_name, partial_path, publish_checkpoint, rank_file,
)
path = Path(sys.argv[1]) / checkpoint_name(100, "stop")
print("ready", flush=True)
while True:
    partial_path(path).write_bytes(os.urandom(200_000))
    for rank in range(2):
        partial_path(rank_file(path, rank)).write_bytes(os.urandom(1000))
    publish_checkpoint(
        partial_path(path), path, 2, global_step=100, attempt=1, fit=1, reason="stop"
    )
    print("saved", flush=True)
"""


def _save(folder: Path, step: int, reason: str = "periodic", attempt: int = 1) -> Path:
    path = folder / checkpoint_name(step, reason)
    partial_path(path).write_bytes(b"weights of %d" % step)
    partial_path(rank_file(path, 0)).write_bytes(b"random state")
    return publish_checkpoint(
        partial_path(path), path, 1, global_step=step, attempt=attempt, fit=1
    )[0]


@pytest.mark.parametrize("turn", range(4))
def test_a_killed_writer_leaves_a_complete_checkpoint(tmp_path: Path, turn: int) -> None:
    """Saving the same step again and again, as a run does that is stopped as soon as it resumed."""
    rng = random.Random(turn)
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    for _ in range(2 + rng.randrange(6)):
        writer.stdout.readline()
    signal.sigtimedwait(set(), rng.random() * 0.02)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    checkpoint = checkpoint_to_resume(tmp_path)
    assert checkpoint is not None
    assert checkpoint.global_step == 100


class Died(BaseException):
    """The end of the process: no code of it handles this."""


@pytest.mark.parametrize("renames", range(3))
def test_a_writer_that_dies_before_a_rename_leaves_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    """The files of the rank, the checkpoint and the manifest get their names in this order."""
    _save(tmp_path, 5)
    rename, remaining = os.rename, iter(range(renames))

    def rename_or_die(source: Path, target: Path) -> None:
        if next(remaining, None) is None:
            raise Died
        rename(source, target)

    monkeypatch.setattr(os, "rename", rename_or_die)
    with pytest.raises(Died):
        _save(tmp_path, 6)
    (only,) = list_checkpoints(tmp_path)
    assert (only.global_step, verify(only).ok) == (5, True)


def test_an_existing_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    first = _save(tmp_path, 5)
    second = _save(tmp_path, 5, attempt=2)
    third = _save(tmp_path, 5, attempt=3)
    assert [first.name, second.name] == [
        "step-00000005-periodic.ckpt",
        "step-00000005-periodic-2.ckpt",
    ]
    assert third.name == first.name, "the name became free again"
    (only,) = list_checkpoints(tmp_path)
    assert verify(only).ok
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        third.name, f"{third.name}.json", f"{third.name}.rank-00000",
    ]  # fmt: skip


def test_the_newest_are_kept_independently_of_the_clock(tmp_path: Path) -> None:
    for attempt, step in ((1, 10), (1, 20), (2, 15), (2, 25)):
        path = _save(tmp_path, step, attempt=attempt)
        # The clock runs backwards all the while.
        os.utime(f"{path}.json", (1e9 - 100 * attempt - step,) * 2)
    prune_periodic(tmp_path, 2)
    remaining = [json.loads(p.read_text()) for p in tmp_path.glob("*.json")]
    assert sorted((m["attempt"], m["global_step"]) for m in remaining) == [(2, 15), (2, 25)]


def test_a_failed_publication_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / checkpoint_name(7, "request")
    partial_path(path).write_bytes(b"weights")
    with pytest.raises(FileNotFoundError):  # rank 1 wrote nothing
        publish_checkpoint(partial_path(path), path, 2, global_step=7)
    assert list_checkpoints(tmp_path) == []
    assert not path.exists()
