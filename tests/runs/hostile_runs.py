"""A small run with every kind of file that a run directory has, and commands that read it."""

from __future__ import annotations

import contextlib
import io
import json
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn
from unittest import mock

from ltui.app.cli import main
from ltui.training.state.run_snapshot import RunSnapshot, RunState
from ltui.training.store.database_schema import open_for_writing
from ltui.training.store.past.snapshots import document_of, past_folder
from ltui.training.store.past.writer import PastWriter
from ltui.training.store.run_directory import RunDir
from tests.stored_runs import stored_run

CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters that must not reach a terminal."""
HANG_S = 60.0
"""Seconds within which each command has to end."""
COMMANDS = (
    ("runs",),
    ("runs", "--json"),
    ("runs", "--columns", "state,detail,config.lr,size,val/loss", "--sort", "created"),
    ("show", "evil-0001"),
    ("show", "evil-0001", "--json"),
    ("show", "evil-0001", "--code"),
    ("logs", "evil-0001"),
    ("diagnose", "evil-0001"),
    ("compare", "evil-0001", "good-0001"),
    ("export", "evil-0001"),
    ("prune", "--dry-run", "--filter", "evil"),
)
"""Commands that read a run and change nothing."""


def make_home(home: Path) -> RunDir:
    """Make a good run and ``evil-0001``, which is to be damaged."""
    full_run(home, "good-0001")
    return full_run(home, "evil-0001")


def full_run(home: Path, run_id: str) -> RunDir:
    """Make a run that has ended, with a file of each kind."""
    run_dir = stored_run(
        home,
        run_id,
        state=RunState.FAILED,
        detail="rank 1 failed",
        metrics={"val/loss": 0.5, "train/loss": 0.25},
        config={"trainer": {"max_epochs": 3}, "model": {"init_args": {"lr": 0.1}}},
    )
    db = open_for_writing(run_dir.db_path)
    db.executescript(
        """
        INSERT INTO attempts (attempt, started_at, ended_at, state, detail, changes)
            VALUES (1, 1.0, 61.0, 'failed', 'x', '[]');
        INSERT INTO cursors (attempt, rank, next_seq, base, inode) VALUES (1, 0, 9, 0, 0);
        INSERT INTO names VALUES (1, 'val/loss');
        INSERT INTO samples (attempt, rank, name_id, seq, step, epoch, t, value)
            VALUES (1, 0, 1, 1, 1, 0, 2.0, 0.5), (1, 0, 1, 2, 2, 0, 3.0, 0.4);
        INSERT INTO steps (attempt, rank, seq, step, epoch, samples, loss, lr, step_s, wall_s)
            VALUES (1, 0, 1, 1, 0, 32, 0.5, 0.1, 0.01, 2.0);
        INSERT INTO events (id, attempt, rank, seq, t, kind, text, data) VALUES
            (1, 1, 0, 1, 2.0, 'exception', 'ValueError: x', '{"type": "x"}'),
            (2, 1, 0, 2, 2.0, 'hello', '', '{"hyperparameters": {"lr": 1}}');
        INSERT INTO verdicts (id, attempt, began, ended, kind, level, cause, document)
            VALUES (1, 1, 1.0, 2.0, 'dead_rank', 'dead', 'x',
            '{"kind": "dead_rank", "level": "dead", "cause": "rank 1 died", "began": 1.0}');
        INSERT INTO gpu_samples (gpu, t, utilisation_percent) VALUES (0, 1.0, 50.0);
        PRAGMA wal_checkpoint(TRUNCATE);
        PRAGMA journal_mode = DELETE;
        """
    )
    db.close()
    checkpoint = "step-00000002-end.ckpt"
    texts = {
        "labels.json": json.dumps({"tags": ["a"], "group": "", "note": "n", "star": False}),
        "keeper.json": json.dumps({"pid": 1 << 22, "start_ticks": 1, "attempt": 1}),
        "history.json": json.dumps({"host": "elsewhere", "folder": None}),
        "restarts.json": json.dumps({"done": 0, "failed_at": [], "wanted": None, "waiting": None}),
        "orders.json": json.dumps({"boot": None, "conditions": [], "attempt": 1, "ladder": None}),
        "supervisor.lock": "",
        "engine/1.start.json": json.dumps({"command": ["x"]}),
        "engine/1.json": json.dumps({"exit_code": 1, "killed": [], "ended_at": 61.0}),
        "logs/1/rank-00000.log": "Traceback (most recent call last):\nValueError: x\n",
        "logs/1/engine.log": "engine\n",
        "logs/supervisor.log": "supervisor\n",
        "evidence/1/001.json": json.dumps(
            {"run": run_id, "attempt": 1, "taken_at": 60.0, "headline": "rank 1 died"}
        ),
        "code/1.json": json.dumps(
            {"attempt": 1, "recorded_at": 1.0, "command": ["x"], "host": "h", "user": "u"}
        ),
        "code/1.diff": "--- a\n+++ b\n",
        f"checkpoints/{checkpoint}": "weights",
        f"checkpoints/{checkpoint}.json": json.dumps(
            {"global_step": 2, "epoch": 0, "size_bytes": 7, "sha256": "0", "attempt": 1}
        ),
    }
    for name, text in texts.items():
        path = run_dir.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    writer = PastWriter(past_folder(run_dir))
    for at in (1.0, 2.0):
        snapshot = RunSnapshot(id=run_id, name=run_id, state=RunState.RUNNING, taken_at=at)
        writer.append(at, document_of(snapshot, {"engine.log": 7}))
    writer.close()
    return run_dir


class HangError(BaseException):
    """A command did not end in time. No handler of ordinary errors catches it."""


@contextlib.contextmanager
def watchdog(seconds: float = HANG_S) -> Iterator[None]:
    """Raise ``HangError`` if the block takes longer."""

    def ring(signum: int, frame: FrameType | None) -> NoReturn:
        raise HangError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def output_of(words: tuple[str, ...], seconds: float = HANG_S) -> tuple[int, str]:
    """Return the exit code and the output of a command that is run in this process.

    An error that no command expects is raised.
    """

    def crash(error: Exception) -> NoReturn:
        raise error

    out, errors = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with (
        mock.patch("ltui.app.cli._report_crash", crash),
        mock.patch.object(sys, "stdout", out),
        mock.patch.object(sys, "stderr", errors),
        watchdog(seconds),
    ):
        try:
            code = main(words)
        except SystemExit as end:
            code = int(end.code or 0)
    texts = (stream.buffer.getvalue().decode("utf-8", "replace") for stream in (out, errors))
    return code, "".join(texts)


def check_commands(
    damage: str,
    commands: tuple[tuple[str, ...], ...] = COMMANDS,
    read: Callable[..., tuple[int, str]] = output_of,
) -> list[str]:
    """Run the commands and return what was wrong with any."""
    wrong = []
    for words in commands:
        place = f"{damage}: ltui {' '.join(words)}"
        try:
            code, text = read(words)
        except (HangError, Exception) as error:
            wrong.append(f"{place}: {type(error).__name__}: {error}")
            continue
        if code not in (0, 1, 2):
            wrong.append(f"{place}: exit code {code}")
        # A log or a name of a metric that is printed into a pipe is printed as it is.
        if words[0] not in ("logs", "export") and (match := CONTROLS.search(text)) is not None:
            wrong.append(
                f"{place}: prints {match[0]!r}: {text[max(0, match.start() - 40) :][:80]!r}"
            )
        if words[0] == "runs" and "good-0001" not in text:
            wrong.append(f"{place}: does not list the other run: {text[:200]!r}")
    return wrong
