"""``ltui logs``: the logs of a run. Safe text on a terminal, unchanged bytes into a pipe."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from pathlib import Path

from ltui.app.commands.arguments import EXIT_DONE
from ltui.app.logtail import rank_of_log
from ltui.training.problem import Problem, ProblemError
from ltui.training.run.snapshot import LIVE
from ltui.training.store.home import RunDir, find_run, ltui_home
from ltui.training.store.truth import true_snapshot
from ltui.widgets.sanitise import clean_line

LOOK_EVERY_S = 0.25
CHUNK_BYTES = 1 << 20
LINE_BYTES = 1 << 20
"""A longer line is printed in parts."""


def print_logs(options: Namespace) -> int:
    """``ltui logs RUN``."""
    run_dir = find_run(ltui_home(to_write=False), options.run)
    attempt = _attempt(run_dir, options.attempt)
    folder = run_dir.logs_dir(attempt)
    if not options.follow:
        _require_rank(folder, options.rank)
    printer = _Printer(folder, options.rank)
    while True:
        # The state is read before the files: what was written until then is then printed.
        live = options.follow and _goes_on(run_dir, attempt)
        printed = printer.print_new(last=not live)
        if not live:
            break
        if not printed:
            time.sleep(LOOK_EVERY_S)
    return EXIT_DONE


def _attempt(run_dir: RunDir, wanted: int | None) -> int:
    logs = run_dir.path / "logs"
    known = (
        sorted(int(p.name) for p in logs.iterdir() if p.name.isdecimal()) if logs.is_dir() else []
    )
    if wanted is None and known:
        return known[-1]
    if wanted in known:
        return wanted
    which = f"--attempt {wanted}" if wanted is not None else run_dir.id
    there = (
        f"Known attempts: {', '.join(map(str, known))}." if known else "Nothing was started yet."
    )
    raise ProblemError(
        Problem(where=which, what="there are no logs of this attempt.", remedy=there)
    )


def _require_rank(folder: Path, rank: int | None) -> None:
    ranks = sorted(r for p in folder.glob("*.log") if (r := rank_of_log(p.name)) is not None)
    if rank is None or rank in ranks:
        return
    there = (
        f"Known ranks: {', '.join(map(str, ranks))}."
        if ranks
        else "The run has no logs per rank: omit --rank."
    )
    raise ProblemError(
        Problem(where=f"--rank {rank}", what="there is no log of this rank.", remedy=there)
    )


def _goes_on(run_dir: RunDir, attempt: int) -> bool:
    snapshot = true_snapshot(run_dir)
    return snapshot.state in LIVE and snapshot.attempt <= attempt


class _Printer:
    """Prints what is new in an attempt's files; ranks' lines begin with the rank."""

    def __init__(self, folder: Path, rank: int | None) -> None:
        self._folder = folder
        self._rank = rank
        self._done: dict[str, int] = {}
        self._rest: dict[str, bytes] = {}
        self._safe = sys.stdout.isatty()

    def print_new(self, *, last: bool) -> bool:
        """True where something was printed. ``last``: also lines without an end."""
        printed = False
        for path in self._files():
            printed |= self._print_file(path, last=last)
        sys.stdout.buffer.flush()
        return printed

    def _files(self) -> list[Path]:
        found = sorted(
            self._folder.glob("*.log"), key=lambda p: (rank_of_log(p.name) is None, p.name)
        )
        if self._rank is not None:
            return [p for p in found if rank_of_log(p.name) == self._rank]
        return found

    def _print_file(self, path: Path, *, last: bool) -> bool:
        printed = False
        sign = self._sign(path)
        with path.open("rb") as file:
            file.seek(self._done.get(path.name, 0))
            while data := file.read(CHUNK_BYTES):
                *lines, rest = (self._rest.pop(path.name, b"") + data).split(b"\n")
                if len(rest) > LINE_BYTES:
                    lines, rest = [*lines, rest], b""
                self._rest[path.name] = rest
                self._write(sign, lines)
                printed = printed or bool(lines)
            self._done[path.name] = file.tell()
        if last and self._rest.get(path.name):
            self._write(sign, [self._rest.pop(path.name)])
            printed = True
        return printed

    def _sign(self, path: Path) -> bytes:
        if self._rank is not None:
            return b""
        rank = rank_of_log(path.name)
        return b"" if rank is None else f"{rank}: ".encode()

    def _write(self, sign: bytes, lines: list[bytes]) -> None:
        out = sys.stdout.buffer
        for line in lines:
            if self._safe:
                line = clean_line(line.decode("utf-8", "replace")).encode()
            out.write(sign + line + b"\n")
