"""A program on a terminal of its own: what it drew, and keys for it."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Mapping
from pathlib import Path


class Terminal:
    """Runs ``argv`` with a pseudo-terminal as its controlling one, so that keys become signals."""

    def __init__(
        self, argv: list[str], cwd: Path, env: Mapping[str, str], *, columns: int = 100
    ) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
        self.process = subprocess.Popen(
            argv,
            cwd=cwd,
            env={**env, "TERM": "xterm-256color"},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        self.drawn = ""

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    @property
    def echoes(self) -> bool:
        """Whether the terminal shows what is typed and gives it to programs by lines."""
        modes = termios.ECHO | termios.ICANON
        return bool(termios.tcgetattr(self._master)[3] & modes == modes)

    def hang_up(self) -> None:
        """Closes the terminal, as a lost connection does."""
        os.close(self._master)
        self._master, other = pty.openpty()
        os.close(other)

    def read(self, seconds: float) -> None:
        """Takes what is drawn meanwhile."""
        ready, _, _ = select.select([self._master], [], [], seconds)
        if not ready:
            return
        try:
            self.drawn += os.read(self._master, 65536).decode("utf-8", "replace")
        except OSError:
            # Nobody has the terminal open any more.
            time.sleep(min(seconds, 0.05))

    def wait_for(self, text: str, seconds: float = 200) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.drawn:
            assert self.process.poll() is None or text in self._rest(), self.drawn[-3000:]
            assert time.monotonic() < deadline, f"never drawn: {text}\n{self.drawn[-3000:]}"
            self.read(0.2)

    def _rest(self) -> str:
        for _ in range(20):
            self.read(0.05)
        return self.drawn

    def wait(self, seconds: float = 200) -> int:
        """The exit code."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"never ended\n{self.drawn[-3000:]}"
            self.read(0.1)
        self._rest()
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        os.close(self._master)
