"""Damage the files of a run in random ways, and run the commands that read it.

``python -m tests.runs.fuzz 10000 [--seed 1] [--run DIRECTORY]`` damages a run so many times, by
default one that is made for it. A command may not crash, take more than two seconds, print a
control character or hide the other run. The quick tests damage a run some hundred times.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import resource
import shutil
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from ltui.training.json_codec import WRONG_CONTENT
from ltui.training.problem import ProblemError
from ltui.training.store.incident_file import Incident, PackedFile, packed_files, write_incident
from ltui.training.store.redaction import Redactor
from ltui.training.store.run_directory import RunDir
from tests.runs.hostile_runs import COMMANDS, HANG_S, check_commands, full_run, make_home, output_of

LIMIT_S = 2.0
"""Maximum seconds of a command on a machine that does nothing else."""
ESCAPES = "\x1b]52;c;aGFja2Vk\x07\x1b[2J\x9b31m\u202eevil\r\nINJECTED\x00\x7f"
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 10**9, 10**30, -(10**18), 1e308, -1e300, float("nan"), 0.5),
    *(
        "",
        "x",
        "1",
        ESCAPES,
        "\ud800",
        "a\0b",
        "../../etc/passwd",
        "x" * 10_000,
        "running",
        "é" * 99,
    ),
    *([], {}, [1], {"a": 1}, [[1, 2], "x"], [None] * 50, {ESCAPES: ESCAPES}),
)
"""Values in place of those of a JSON or YAML document or of a column."""
STATES = ("running", "queued", "starting", "stopping", "paused", "lost", "failed", "finished")


def damage(run_dir: RunDir, chance: random.Random) -> str:
    """Damage one to three files of a run, and return how."""
    done = []
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        # What was replaced before by a pipe or a link is left.
        files = sorted(p for p in run_dir.path.rglob("*") if p.is_file() and not p.is_symlink())
        path = chance.choice(files)
        ways: list[Callable[[Path, random.Random], str | None]] = [
            *(_cut, _flip, _insert, _replace, _link, _grow),
            *([_edit_document] * 12 if path.suffix in (".json", ".yaml") else []),
            *([_edit_database] * 24 if path.name == "run.db" else []),
        ]
        way = chance.choice(ways)
        with suppress(OSError, sqlite3.Error, yaml.YAMLError, *WRONG_CONTENT):
            name = path.relative_to(run_dir.path)
            done.append(f"{way.__name__} {name} {way(path, chance) or ''}")
    return ", ".join(done)


def _write(path: Path, data: bytes) -> None:
    # The file may be linked to that of the run which is damaged again and again.
    path.unlink()
    path.write_bytes(data)


def _cut(path: Path, chance: random.Random) -> None:
    data = path.read_bytes()
    _write(path, data[: chance.randrange(len(data) + 1)])


def _flip(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(chance.choice((1, 10, 100))):
        data[chance.randrange(len(data))] = chance.randrange(256)
    _write(path, bytes(data))


def _insert(path: Path, chance: random.Random) -> None:
    data, at = path.read_bytes(), 0
    at = chance.randrange(len(data) + 1)
    texts = (b"\xff\xfe\x00", ESCAPES.encode(), b"[" * 5000, b'{"a":' * 5000, b"\n" * 999)
    _write(path, data[:at] + chance.choice(texts) + data[at:])


def _replace(path: Path, chance: random.Random) -> str:
    kind = chance.choice(("nothing", "empty", "pipe", "folder", "deep", "aliases"))
    path.unlink()
    if kind == "empty":
        path.touch()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "deep":
        path.write_bytes(b"[" * 200_000)
    elif kind == "aliases":
        lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
        lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)]
        path.write_text("\n".join(lines))
    return kind


def _link(path: Path, chance: random.Random) -> str:
    target = chance.choice(
        (
            "/dev/zero",
            "/dev/full",
            "/dev/tty",
            "/etc/passwd",
            "/proc/self/mem",
            path.name,
            "gone",
            "/",
        )
    )
    path.unlink()
    path.symlink_to(target)
    return target


def _grow(path: Path, chance: random.Random) -> None:
    data = path.read_bytes()
    path.unlink()
    with path.open("wb") as file:
        file.write(data)
        # A hole takes no space on the disk.
        # A log is printed as a whole.
        sizes = (1 << 12, 1 << 20, 1 << 20 if path.suffix == ".log" else 1 << 28)
        file.truncate(len(data) + chance.choice(sizes))


def _edit_document(path: Path, chance: random.Random) -> str:
    text = path.read_text()
    document = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    how = _edit(document, chance)
    text = json.dumps(document) if path.suffix == ".json" else yaml.safe_dump(document)
    _write(path, text.encode(errors="surrogatepass"))
    return how


def _edit(document: Any, chance: random.Random) -> str:
    """Change one value of a document in place."""
    places: list[tuple[Any, Any]] = []
    level = [document]
    while level:
        outer = level.pop()
        keys = list(outer) if isinstance(outer, dict) else range(len(outer))
        places += [(outer, key) for key in keys]
        level += [outer[key] for key in keys if isinstance(outer[key], (dict, list))]
    outer, key = chance.choice(places)
    if chance.random() < 0.1:
        del outer[key]
        return f"without {key!r}"
    outer[key] = value = chance.choice(VALUES)
    return f"{key!r} = {value!r:.40}"


def _edit_database(path: Path, chance: random.Random) -> str:
    # SQLite writes in place, and also to its log.
    for file in path.parent.glob("run.db*"):
        if file.is_file() and not file.is_symlink():
            _write(file, file.read_bytes())
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        tables = [row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type='table'")]
        table = chance.choice([name for name in tables if not name.startswith("sqlite")])
        columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
        column = chance.choice(columns)
        kind = chance.choice(("value",) * 6 + ("snapshot",) * 6 + ("state", "drop", "view", "many"))
        if kind == "value":
            value = chance.choice((*VALUES, b"\xff\x00", 1 << 62))
            value = json.dumps(value) if isinstance(value, (dict, list)) else value
            if isinstance(value, int):
                value = max(-(1 << 63), min(value, (1 << 63) - 1))
            if value == "\ud800":
                value = "\x1b"
            db.execute(f"UPDATE OR IGNORE {table} SET {column} = ?", (value,))
            return f"{table}.{column} = {value!r:.40}"
        if kind in ("snapshot", "state"):
            document = json.loads(db.execute("SELECT document FROM snapshot").fetchone()[0])
            how = _edit(document, chance)
            if kind == "state":
                document["state"] = how = chance.choice(STATES)
            db.execute("UPDATE snapshot SET document = ?", (json.dumps(document),))
            return f"snapshot {how}"
        if kind == "many":
            db.execute("PRAGMA ignore_check_constraints = ON")
            query = (
                "WITH RECURSIVE r(n) AS (SELECT 2 UNION ALL SELECT n + 1 FROM r WHERE n < 20000) "
                f"INSERT OR IGNORE INTO {table} SELECT {', '.join('n' for _ in columns)} FROM r"
            )
            db.execute(query)
            return f"{kind} {table}"
        db.execute(f"DROP TABLE {table}")
        if kind == "view":
            names = ", ".join(f"n AS {name}" for name in columns)
            db.execute(
                f"CREATE VIEW {table} AS WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 "
                f"FROM r) SELECT {names} FROM r"
            )
        return f"{kind} {table}"


def fuzz(
    home: Path,
    first: int,
    count: int,
    seed: int,
    source: Path | None = None,
    seconds: float = HANG_S,
) -> list[str]:
    """Damage a run ``count`` times, and return what was wrong.

    A command may take so many ``seconds``.
    """
    evil = make_home(home)
    for words in COMMANDS:
        # The first one also imports modules.
        output_of(words)
    if source is not None:
        shutil.rmtree(evil.path)
        shutil.copytree(source, evil.path, symlinks=True)
    whole = home / "whole"
    evil.path.rename(whole)
    wrong: list[str] = []
    refused = mock.Mock(side_effect=ProblemError.of(where="fuzz", what="no supervisor is started."))
    with mock.patch("ltui.training.lifecycle.run_status.restart_supervisor", refused):
        for number in range(first, first + count):
            chance = random.Random(f"{seed} {number}")
            shutil.copytree(whole, evil.path, symlinks=True, copy_function=os.link)
            text = f"{number}: {damage(evil, chance)}"
            commands = (*chance.sample(COMMANDS[1:], 2), COMMANDS[0])
            wrong += check_commands(text, commands, partial(output_of, seconds=seconds))
            shutil.rmtree(evil.path)
    return wrong


def fuzz_incident(
    folder: Path, first: int, count: int, seed: int, seconds: float = HANG_S
) -> list[str]:
    """Write an incident file of a run with damaged files ``count`` times, damage every second one,
    and return what was wrong when it was opened."""
    folder.mkdir(exist_ok=True)
    written, home = folder / "whole.ltui", folder / "home"
    run_dir = full_run(home, "evil-0001")
    what = Incident(run="evil-0001", begin=0.0, end=100.0, about="x", host="h")
    files = packed_files(run_dir, what, Redactor({}, {}), folder)
    shutil.rmtree(run_dir.path)
    whole = RunDir(folder / "whole")
    for file in files:
        path = whole.path / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.data)
    wrong: list[str] = []
    for number in range(first, first + count):
        chance = random.Random(f"{seed} {number}")
        shutil.copytree(whole.path, run_dir.path, copy_function=os.link)
        text = f"{number}: {damage(run_dir, chance)}"
        left = [PackedFile(f.name, _content(run_dir.path / f.name)) for f in files]
        write_incident(left, written)
        if number % 2:
            way = chance.choice((_cut, _flip, _insert))
            if chance.random() < 0.5:
                written.write_bytes(gzip.decompress(written.read_bytes()))
                way(written, chance)
                written.write_bytes(gzip.compress(written.read_bytes()))
            else:
                way(written, chance)
            text += f", {way.__name__} the file"
        commands = (("open", str(written), "--plain"),)
        wrong += check_commands(text, commands, partial(output_of, seconds=seconds))
        shutil.rmtree(run_dir.path)
    return wrong


def _content(path: Path) -> bytes:
    whole = path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 26
    return path.read_bytes() if whole else b""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--incident", action="store_true", help="damage incident files")
    options = parser.parse_args()
    # An endless file must not take the memory of the machine.
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    began, wrong = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        last = options.first + options.count
        for first in range(options.first, last, 100):
            home = Path(folder, str(first))
            os.environ["LTUI_HOME"] = str(home)
            count = min(100, last - first)
            if options.incident:
                found = fuzz_incident(home, first, count, options.seed, LIMIT_S)
            else:
                found = fuzz(home, first, count, options.seed, options.run, LIMIT_S)
            print("\n".join(found), end="\n" if found else "")
            wrong += found
            shutil.rmtree(home)
            print(
                f"{first + 100} damaged, {len(wrong)} wrong, {time.monotonic() - began:.0f} s",
                flush=True,
            )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
