"""A program on the terminal of the benches, which answers the queries of programs."""

from __future__ import annotations

import os
import re
import select
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

from tests.bench.row import cpu_s
from tests.bench.terminal_process import on_terminal

ANSWERS = (
    (b"\x1b[c", b"\x1b[?62;22c"),
    (b"\x1b[6n", b"\x1b[1;1R"),
    (b"\x1b]11;?", b"\x1b]11;rgb:0000/0000/0000\x1b\\"),
    (b"\x1b]10;?", b"\x1b]10;rgb:ffff/ffff/ffff\x1b\\"),
)
_ESCAPES = re.compile(rb"\x1b\[[0-9;?<>=]*[A-Za-z]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")


@dataclass
class Terminal:
    """The process and the terminal's other end."""

    process: subprocess.Popen[bytes]
    master: int
    started: float

    def wait_for(self, text: str, seconds: float) -> float | None:
        """Seconds from the start until ``text`` was drawn, or None if it was not."""
        seen, until = b"", time.monotonic() + seconds
        wanted = text.encode()
        while (left := until - time.monotonic()) > 0:
            if not select.select([self.master], [], [], left)[0]:
                break
            try:
                chunk = os.read(self.master, 65536)
            except OSError:
                return None
            for query, answer in ANSWERS:
                if query in chunk:
                    os.write(self.master, answer)
            seen = (seen + chunk)[-400_000:]
            if wanted in _ESCAPES.sub(b"", seen):
                return time.monotonic() - self.started
        return None

    def drain(self, seconds: float) -> None:
        """Read what the program draws for ``seconds``."""
        self.wait_for("\0never drawn", seconds)

    def usage(self, seconds: float) -> tuple[float, float]:
        """Processor time in per cent of a core over ``seconds``, and resident memory in MB.

        The program's children count, what they start included.
        """
        before_s, began = sum(map(cpu_s, self._tree())), time.monotonic()
        self.drain(seconds)
        spent_s = sum(map(cpu_s, self._tree())) - before_s
        memory = sum(process.memory_info().rss for process in self._tree())
        return spent_s / (time.monotonic() - began) * 100, memory / 1e6

    def _tree(self) -> list[psutil.Process]:
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]


@contextmanager
def terminal(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[Terminal]:
    """Start ``command`` on a terminal; kill it and what it started at the end."""
    started = time.monotonic()
    with on_terminal(command, environment) as (process, master):
        try:
            yield Terminal(process, master, started)
        finally:
            for child in psutil.Process(process.pid).children(recursive=True):
                if child.is_running():
                    child.kill()
