"""Stacks of other processes: by the signal on which faulthandler writes them, or by py-spy.

The signal needs no rights and works while the GIL is held; it is sent only to a process that is
seen to catch it and to hold the file that it would write to. Each thread is sent one of its own and
writes its own stack: faulthandler does not ask for the GIL, and one thread that walks the frames of
another which runs Python meanwhile reads what is no frame, which kills the process. py-spy is used
where it is installed and permitted, for what the signal can't read (a stopped process, one without
ltui's handler).
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from ltui.training.diagnosis.evidence import Frame, ThreadStack
from ltui.training.process.process_activity import (
    context_switches,
    entry_of,
    handles_signal,
    open_stack_file,
    thread_state,
    threads_of,
)
from ltui.training.tensor_queue.heartbeat_table import STACK_SIGNAL

_HEAD = re.compile(r"(Stack|(?:Current thread|Thread) 0x[0-9a-f]+)(?: \[(?P<name>[^\]]*)\])?.*:")
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)')
_MAIN_S = 0.4
_OTHERS, _OTHER_S = 3, 0.1
"""Threads beside the main one that are asked, where they run, and what each gets to answer."""
_QUIET_S = 0.015
_SETTLES_S = 0.1
_SPY_S = 4.0
_READ_BYTES = 1 << 18
_LIBC = ctypes.CDLL(None, use_errno=True)


def parse_stacks(text: str) -> tuple[ThreadStack, ...]:
    """One dump as faulthandler writes it: the current thread is the one that took the signal."""
    threads: list[tuple[str, bool, list[Frame]]] = []
    for line in text.splitlines():
        if head := _HEAD.match(line):
            current = not head[1].startswith("Thread")
            threads.append((head["name"] or ("main" if current else "thread"), current, []))
        elif (frame := _FRAME.match(line)) and threads:
            number = int(frame["line"]) if frame["line"].isdigit() else 0
            threads[-1][2].append(
                Frame(file=frame["file"], line=number, function=frame["function"])
            )
    return tuple(
        ThreadStack(name=name, main=main, frames=tuple(frames), source="signal")
        for name, main, frames in threads
    )


def dump_by_signal(pid: int, folder: Path, *, ours: bool = True) -> tuple[ThreadStack, ...] | str:
    """The stacks, or why there are none. ``ours``: the handler is not known to be another's."""
    entry = entry_of(pid)
    if entry is None or entry.state in "ZX":
        return "the process is gone"
    if entry.state in "Tt":
        return "a stopped process answers no signal"
    path = open_stack_file(pid, str(folder))
    if not ours or path is None or not handles_signal(pid, STACK_SIGNAL):
        return "it has no handler for the stack signal"
    others = [t for t in threads_of(pid) if t != pid and thread_state(pid, t) == "R"]
    stacks = []
    try:
        for thread in (pid, *others[:_OTHERS]):
            main = thread == pid
            dump = parse_stacks(_dumped(pid, thread, path, _MAIN_S if main else _OTHER_S))
            name = "main" if main else "thread"
            stacks += [replace(s, name=name, main=main, native_id=thread) for s in dump[:1]]
    except OSError as error:
        return f"the stack signal cannot be sent: {error.strerror}"
    _let_settle(pid)
    return tuple(stacks) or "the stack signal had no effect"


def _dumped(pid: int, thread: int, path: str, limit_s: float) -> str:
    """What one thread writes; nothing where it is none of Python's. Raises ``OSError``."""
    before = os.path.getsize(path)
    if _LIBC.tgkill(pid, thread, STACK_SIGNAL):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return _written(path, before, limit_s)


def _written(path: str, start: int, limit_s: float) -> str:
    """What was appended from ``start`` on, once it has grown and been quiet for a moment."""
    deadline = time.monotonic() + limit_s
    size, since = start, time.monotonic()
    while (now := time.monotonic()) < deadline:
        grown = os.path.getsize(path)
        if grown != size:
            size, since = grown, now
        elif size > start and now - since >= _QUIET_S:
            break
        time.sleep(0.004)
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(_READ_BYTES).decode(errors="replace")


def _let_settle(pid: int) -> None:
    """Until the process has gone back to where it was, so that whoever watches it from now on does
    not see it return from the dump."""
    deadline = time.monotonic() + _SETTLES_S
    switches = context_switches(pid)
    while time.monotonic() < deadline:
        time.sleep(_QUIET_S)
        if (now := context_switches(pid)) == switches and thread_state(pid, pid) != "R":
            break
        switches = now


class PySpy:
    """py-spy, where there is one. ``note`` says why there is none, or why it was refused."""

    def __init__(self) -> None:
        beside = Path(sys.executable).with_name("py-spy")
        self._path = shutil.which("py-spy") or (str(beside) if beside.exists() else None)
        self.note: str | None = None
        if self._path is None:
            self.note = (
                "py-spy is not installed: no stacks of stopped processes "
                "(pip install 'ltui-train[stacks]')"
            )

    def stacks(self, pid: int) -> tuple[ThreadStack, ...] | str:
        """Python stacks of a process, also of a stopped one; or why there are none."""
        if self._path is None:
            return "py-spy is not installed"
        try:
            done = subprocess.run(
                [self._path, "dump", "--pid", str(pid), "--json", "--nonblocking"],
                capture_output=True,
                timeout=_SPY_S,
                check=False,
                stdin=subprocess.DEVNULL,
            )
            if done.returncode:
                said = done.stderr.decode(errors="replace").strip()
                return self._refused(pid, said.splitlines()[-1] if said else "")
            return tuple(_spied(thread, pid) for thread in json.loads(done.stdout))
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            return self._refused(pid, f"{type(error).__name__}")

    def _refused(self, pid: int, why: str) -> str:
        reason = f"py-spy cannot read process {pid}: {why or 'no reason given'}"
        if "ermission" in why:
            self.note = f"no permission to ptrace ({why}): {_how_to_allow()}"
        return reason


def _how_to_allow() -> str:
    try:
        scope = Path("/proc/sys/kernel/yama/ptrace_scope").read_text().strip()
    except OSError:
        scope = "0"
    if scope != "0":
        return "allow it with: sudo sysctl kernel.yama.ptrace_scope=0"
    return "in a container add the capability SYS_PTRACE"


def _spied(thread: dict[str, Any], pid: int) -> ThreadStack:
    native = thread.get("os_thread_id")
    return ThreadStack(
        name=str(thread.get("thread_name") or "thread"),
        main=native == pid or thread.get("thread_name") == "MainThread",
        native_id=native,
        source="py-spy",
        frames=tuple(
            Frame(
                file=str(f.get("filename") or f.get("short_filename")),
                line=int(f.get("line") or 0),
                function=str(f.get("name")),
            )
            for f in thread.get("frames") or ()
        ),
    )
