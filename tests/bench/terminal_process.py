"""A process on a pseudo-terminal, and what it paints there."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from tests.bench.terminal_screen import TerminalScreen

COLUMNS, LINES = 160, 50
COLOURS = {"TERM": "xterm-256color", "COLORTERM": "truecolor"}


@contextmanager
def on_terminal(
    command: Sequence[str], environment: Mapping[str, str]
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run ``command`` on a terminal of 160 by 50 cells; yield the process and the terminal."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    process = subprocess.Popen(
        command,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, **environment, **COLOURS},
        start_new_session=True,
    )
    os.close(slave)
    try:
        yield process, master
    finally:
        process.kill()
        process.wait()
        os.close(master)


def read_painted(
    master: int,
    seconds: float,
    screen: TerminalScreen,
    done: Callable[[TerminalScreen], object] = lambda _: False,
) -> bool:
    """Read what is painted for so long, or until ``done``."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if select.select([master], [], [], left)[0]:
            screen.feed(os.read(master, 65536))
            if done(screen):
                return True
    return False
