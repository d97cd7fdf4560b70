"""Run directories that anybody may have written: one bad run harms no other, and no terminal."""

from __future__ import annotations

import io
import os
import shlex
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from ltui.app.cli import main
from ltui.training.store.run_directory import RunDir
from tests.ltui_command import LTUI
from tests.runs.fuzz import fuzz
from tests.runs.hostile_runs import check_commands, make_home, output_of

DEEP = "[" * 100_000
ESCAPES = "\x1b]52;c;aGFja2Vk\x07\x1b]0;PWNED\x07\x1b[2J\x9b31m\u202eevil\r\nINJECTED"
"""Clipboard, title, clear screen, a C1 sequence, text from right to left, and a line of its own."""


@pytest.fixture
def evil(private_home: Path) -> RunDir:
    return make_home(private_home)


def text(name: str, content: str) -> Callable[[RunDir], None]:
    def damage(run_dir: RunDir) -> None:
        (run_dir.path / name).write_text(content)

    return damage


def pipe(name: str) -> Callable[[RunDir], None]:
    def damage(run_dir: RunDir) -> None:
        (run_dir.path / name).unlink(missing_ok=True)
        os.mkfifo(run_dir.path / name)

    return damage


def endless(name: str) -> Callable[[RunDir], None]:
    def damage(run_dir: RunDir) -> None:
        (run_dir.path / name).unlink(missing_ok=True)
        (run_dir.path / name).symlink_to("/dev/zero")

    return damage


def sql(script: str, *parameters: object) -> Callable[[RunDir], None]:
    def damage(run_dir: RunDir) -> None:
        with closing(sqlite3.connect(run_dir.db_path, isolation_level=None)) as db:
            if parameters:
                db.execute(script, parameters)
            else:
                db.executescript(script)

    return damage


def view(table: str, columns: str) -> Callable[[RunDir], None]:
    return sql(
        f"DROP TABLE {table}; CREATE VIEW {table} AS WITH RECURSIVE r(n) AS "
        f"(SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT {columns} FROM r"
    )


MANY = "WITH RECURSIVE r(n) AS (SELECT 9 UNION ALL SELECT n + 1 FROM r WHERE n < {}) "
LIVE = "UPDATE snapshot SET document = json_set(document, '$.state', 'running')"
FILES = ("labels.json", "keeper.json", "history.json", "spec.yaml", "run.db", "supervisor.lock")
OTHERS = ("logs/1/rank-00000.log", "evidence/1/001.json", "code/1.json", "code/1.diff")
DAMAGES: dict[str, Callable[[RunDir], None]] = {
    **{f"deep {name}": text(name, DEEP) for name in (*FILES[:4], *OTHERS[1:3])},
    **{f"pipe {name}": pipe(name) for name in (*FILES, *OTHERS, "run.db-wal")},
    **{f"endless {name}": endless(name) for name in (*FILES, *OTHERS)},
    "types of history.json": text("history.json", '{"host": [1], "folder": {"a": 1}}'),
    "a number of 5,000 digits": text("labels.json", '{"colour": %s}' % ("1" * 4000)),
    "types of spec.yaml": text(
        "spec.yaml", "version: 1\nid: x\nname: x\ncreated_at: x\ncwd: /\npython: x\nconfig: {}\n"
    ),
    "types of a manifest": text(
        "checkpoints/step-00000002-end.ckpt.json", '{"global_step": [], "epoch": [1], "files": 7}'
    ),
    "a manifest without a step": text(
        "checkpoints/step-00000002-end.ckpt.json",
        '{"global_step": null, "size_bytes": 7, "sha256": "0"}',
    ),
    "a diagnosis without a time": text(
        "evidence/1/001.json", '{"run": "x", "attempt": 1, "taken_at": null, "headline": "x"}'
    ),
    "deep snapshot": sql("UPDATE snapshot SET document = ?", DEEP),
    "snapshot of numbers": sql("UPDATE snapshot SET document = 7"),
    "types of snapshot": sql(
        "UPDATE snapshot SET document = json_set(document, '$.started_at', 'x', '$.ranks', 7)"
    ),
    "names that are no text": sql(
        "INSERT INTO names VALUES (9, CAST(? AS TEXT))", b"\xff" + ESCAPES.encode()
    ),
    "endless samples": view("samples", "1 attempt, 0 rank, 1 name_id, n seq, n step, 0 epoch, "
                            "0 t, 0 value"),
    "endless attempts": view("attempts", "n attempt, 0 started_at, 0 ended_at, 0 resumed_step, "
                             "'[]' changes"),
    "200,000 attempts": sql(MANY.format(200_000) + "INSERT INTO attempts (attempt, started_at) "
                            "SELECT n, n FROM r"),
    "attempts of bytes": sql("UPDATE attempts SET started_at = x'ff', ended_at = x'ff'"),
    "changes that are no JSON": sql("UPDATE attempts SET changes = 'x'"),
    "escapes in texts": sql(
        "UPDATE snapshot SET document = json_set(document, '$.detail', ?1, '$.name', ?1, "
        "'$.preset', ?1, '$.history_note', ?1, '$.log_dir', ?1)", ESCAPES,
    ),
    "escapes in events": sql(
        "UPDATE events SET text = ?1, data = json_object('type', ?1)", ESCAPES
    ),
    "escapes in verdicts": sql(
        "UPDATE verdicts SET document = json_set(document, '$.cause', ?1, '$.remedy', ?1)", ESCAPES
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_hostile_run_harms_no_command(evil: RunDir, damage: str) -> None:
    DAMAGES[damage](evil)
    assert check_commands(damage) == []


def test_a_pipe_in_place_of_a_queue_keeps_nobody_waiting(evil: RunDir) -> None:
    sql(LIVE)(evil)
    evil.queue_dir(1).mkdir(parents=True)
    pipe("queue/1/rank-00000.queue")(evil)
    assert check_commands("queue") == []


def test_a_log_that_fails_while_it_is_read_is_named_once(evil: RunDir) -> None:
    (evil.logs_dir(1) / "engine.log").unlink()
    (evil.logs_dir(1) / "engine.log").symlink_to("/proc/self/mem")
    code, text = output_of(("logs", "evil-0001"))
    assert code == 0
    assert text.count("engine.log: it cannot be read") == 1
    assert "ValueError: x" in text


def test_a_run_damaged_at_random_harms_no_command(private_home: Path) -> None:
    """``python -m tests.runs.fuzz`` does it more often."""
    assert fuzz(private_home, first=0, count=60, seed=7) == []


def test_a_low_limit_for_files_is_refused_before_a_run_starts(private_home: Path) -> None:
    # A file of compiled Python would be cut.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    shell = f"ulimit -f 8; exec {shlex.join((*LTUI, 'exec', '--plain', '--', 'true'))}"
    done = subprocess.run(
        ["sh", "-c", shell], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("ulimit -f: ")
    assert done.stderr.count("\n") == 1


def test_a_run_that_cannot_be_read_is_listed_as_damaged_and_named(evil: RunDir) -> None:
    text("spec.yaml", DEEP)(evil)
    evil.db_path.write_bytes(b"no database")
    (line,) = [line for line in output_of(("runs",))[1].splitlines() if "evil-0001" in line]
    assert "damaged" in line
    assert "nested more than" in line
    code, error = output_of(("show", "evil-0001"))
    assert (code, error.count("\n")) == (2, 1)
    assert "nested more than" in error


def test_a_name_with_escapes_is_listed_without_them_and_taken_by_no_command(evil: RunDir) -> None:
    evil.path.rename(evil.path.with_name("evil\x1b[31m\u202e-0001"))
    assert check_commands("name", (("runs",), ("runs", "--json"))) == []
    (line,) = [line for line in output_of(("runs",))[1].splitlines() if "evil" in line]
    assert "damaged" in line
    code, error = output_of(("show", "evil"))
    assert code == 2
    assert "there is no such run" in error


def test_an_event_is_one_line(evil: RunDir) -> None:
    DAMAGES["escapes in texts"](evil)
    DAMAGES["escapes in events"](evil)
    DAMAGES["escapes in verdicts"](evil)
    for words in (("show", "evil-0001"), ("diagnose", "evil-0001"), ("runs",)):
        assert not [line for line in output_of(words)[1].splitlines() if line == "INJECTED"]


def test_names_with_escapes_are_exported_to_a_pipe_alone(
    evil: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    sql("UPDATE names SET name = ?", "m\x1b[31m")(evil)
    for is_terminal in (False, True):
        stream = io.StringIO()
        monkeypatch.setattr(stream, "isatty", lambda is_terminal=is_terminal: is_terminal)
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(["export", "evil-0001"]) == 0
        assert ("\x1b" in stream.getvalue()) is not is_terminal
        assert "m" in stream.getvalue()


def test_a_schema_that_is_no_text_is_damage(evil: RunDir) -> None:
    data = evil.db_path.read_bytes()
    evil.db_path.write_bytes(data.replace(b"CREATE TABLE snapshot", b"CREATE \x9d\xe5BLE snapshot"))
    code, text = output_of(("export", "evil-0001"))
    assert code == 2
    assert "history is damaged" in text


def test_an_unexpected_error_is_one_sentence_that_names_the_log(
    evil: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError("\x1b[31mby zero")

    monkeypatch.setattr("ltui.app.commands.runs.list_all", fails)
    assert main(["runs"]) == 1
    error = capsys.readouterr().err
    log = evil.home / "crash.log"
    assert error == f"ltui failed unexpectedly: ZeroDivisionError: by zero. Details are in {log}.\n"
    assert "Traceback" in log.read_text()


def test_a_device_is_written_and_not_replaced(evil: RunDir, tmp_path: Path) -> None:
    device = tmp_path / "pipe"
    os.mkfifo(device)
    reader = os.open(device, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert main(["export", "evil-0001", "-o", str(device)]) == 0
        assert b"val/loss" in os.read(reader, 1 << 16)
    finally:
        os.close(reader)
    assert device.is_fifo()


def test_fifty_thousand_metrics_are_exported(evil: RunDir, tmp_path: Path) -> None:
    sql(MANY.format(50_000) + "INSERT INTO names SELECT n, 'm' || n FROM r")(evil)
    sql(
        MANY.format(50_000)
        + "INSERT INTO samples (attempt, rank, name_id, seq, step, epoch, t, value) "
        "SELECT 1, 0, n, n, 1, 0, 2.0, n FROM r"
    )(evil)
    assert main(["export", "evil-0001", "-o", str(tmp_path / "x.csv")]) == 0
    assert len((tmp_path / "x.csv").read_text().splitlines()) > 50_000 - 9
