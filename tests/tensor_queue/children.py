"""Forked children for tests: run to their end, or killed by SIGKILL at a chosen line."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any


def fork(act: Callable[[], object]) -> int:
    """Return the process id of a child that does ``act``. The caller waits for its end."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            act()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def exit_code(pid: int) -> int:
    """Wait for a child. Return its exit code, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run_child(act: Callable[[], object]) -> None:
    """Do ``act`` in a child, and fail if it fails."""
    assert exit_code(fork(act)) == 0


def killed_at_every_line(
    tmp_path: Path, file: str, prepare: Callable[[Path], Callable[[], object]]
) -> Iterator[Path]:
    """Run a child again and again, killed one line later each time, until it lives to its end.

    ``prepare`` gets a path and returns what writes there; of that, the lines in ``file`` of the
    queue count. Each path is handed out.
    """
    for line in range(500):
        path = tmp_path / f"killed-{line}"

        def act(path: Path = path, line: int = line) -> None:
            write = prepare(path)
            _die_at(file, line)
            write()

        code = exit_code(fork(act))
        yield path
        if code == 0:
            assert line > 5, "nothing was killed"
            return
        assert code == -signal.SIGKILL
    raise AssertionError("the child never came to its end")


def _die_at(file: str, line: int) -> None:
    """SIGKILL this process at the n-th line that it runs in a file of the queue."""
    left = line

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith(f"tensor_queue/{file}"):
            return None
        if event == "line":
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
