"""Stacks of other processes, written by themselves on a signal or read by py-spy.

The signals need no rights. They are sent only to a process that has handlers for them and has the
file open that the handlers write to.

The first signal is handled by Python, between two instructions of the main thread. If there is no
answer, the thread is in a C call, or it gets no CPU time. In a C call its frames do not change, so
the second signal, which faulthandler handles in C, is safe. A thread that runs Python must not get
that one: its frames may be incomplete while faulthandler reads them, which kills the process.
Each thread writes only its own stack, for the same reason.

py-spy is used if it is installed and permitted, for processes that the signals cannot read: stopped
processes, processes without ltui's handlers, and those that get no CPU time.
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
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ltui.training.diagnosis.evidence import Frame, ThreadStack
from ltui.training.process.proc_files import entry_of, processor_times, read_text, threads_of
from ltui.training.process.process_activity import (
    context_switches,
    handles_signal,
    open_stack_file,
    thread_state,
)
from ltui.training.tensor_queue.heartbeat_table import INTERPRETER_STACK_SIGNAL, STACK_SIGNAL

_HEAD = re.compile(r"(Stack|(?:Current thread|Thread) 0x[0-9a-f]+)(?: \[(?P<name>[^\]]*)\])?.*:")
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)')
_C_CALL_CPU_S, _C_CALL_WAIT_S = 0.03, 0.06
"""Seconds of CPU time, or of waiting, without an answer after which a thread is in a C call."""
_INTERPRETER_TIMEOUT_S = 0.4
"""Seconds to wait for either."""
_MAIN_TIMEOUT_S = 0.4
"""Seconds to wait for the stack of the main thread."""
_MAX_OTHER_THREADS, _OTHER_TIMEOUT_S = 3, 0.1
"""Number of other running threads to request stacks from, and seconds to wait for each."""
_POLL_S = 0.004
_QUIET_S = 0.015
"""Seconds without new output after which a dump is complete."""
_SETTLE_TIMEOUT_S = 0.1
"""Seconds to wait for the process to return from the signal handler."""
_PY_SPY_TIMEOUT_S = 4.0
_MAX_DUMP_BYTES = 1 << 18
_LIBC = ctypes.CDLL(None, use_errno=True)


def parse_stacks(text: str) -> tuple[ThreadStack, ...]:
    """Parse a dump of faulthandler; its current thread is the one that received the signal."""
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


def dump_by_signal(
    pid: int, folder: Path, *, ours: bool = True, python_stands: bool = False
) -> tuple[ThreadStack, ...] | str:
    """Return the stacks, or the reason why there are none.

    ``ours`` is False if the handlers are known to be another library's. ``python_stands`` is True
    if no thread of the process can run Python, as when its heartbeat thread does not run. Only then
    the stacks of other running threads than the main thread are read.
    """
    entry = entry_of(pid)
    if entry is None or entry.state in "ZX":
        return "the process is gone"
    if entry.state in "Tt":
        return "a stopped process answers no signal"
    path = open_stack_file(pid, str(folder))
    if not ours or path is None or not handles_signal(pid, STACK_SIGNAL):
        return "it has no handler for the stack signal"
    try:
        if handles_signal(pid, INTERPRETER_STACK_SIGNAL):
            stacks, in_c_call = _ask_interpreter(pid, path)
        else:
            stacks, in_c_call = [], python_stands or thread_state(pid, pid) == "S"
        if not stacks:
            if not in_c_call:
                return "it reads from disk or gets no CPU time, and a signal could harm it"
            stacks = _dump_thread(pid, pid, path, _MAIN_TIMEOUT_S)
            others = [t for t in threads_of(pid) if t != pid and thread_state(pid, t) == "R"]
            for thread in others[:_MAX_OTHER_THREADS] if python_stands else ():
                stacks += _dump_thread(pid, thread, path, _OTHER_TIMEOUT_S)
    except OSError as error:
        return f"the stack signal cannot be sent: {error.strerror}"
    _wait_until_settled(pid)
    return tuple(stacks) or "the stack signal had no effect"


def request_samples(pid: int, folder: Path) -> str | None:
    """Let a forked worker of a rank sample its stacks. Return the reason if it cannot be asked.

    The request itself is the file ``sample-PID`` in ``folder``. The signal would end a process that
    has no handler for it.
    """
    entry = entry_of(pid)
    if entry is None or entry.state in "ZX":
        return "the process is gone"
    if open_stack_file(pid, str(folder)) is None or not handles_signal(
        pid, INTERPRETER_STACK_SIGNAL
    ):
        return "it has no handler for the stack signal, which only forked workers have"
    try:
        _send(pid, pid, INTERPRETER_STACK_SIGNAL)
    except OSError as error:
        return f"the stack signal cannot be sent: {error.strerror}"
    return None


def _ask_interpreter(pid: int, path: str) -> tuple[list[ThreadStack], bool]:
    """Request the stack that Python writes between two instructions of the main thread.

    Return the stack, if it answers, and whether it is in a C call. Raise ``OSError``.
    """
    size, cpu_s, start_s = os.path.getsize(path), _cpu_s(pid), time.monotonic()
    _send(pid, pid, INTERPRETER_STACK_SIGNAL)
    while (elapsed_s := time.monotonic() - start_s) < _INTERPRETER_TIMEOUT_S:
        if os.path.getsize(path) > size:
            return _stack_of(pid, _read_appended(path, size, _MAIN_TIMEOUT_S), main=True), False
        waits = elapsed_s > _C_CALL_WAIT_S and thread_state(pid, pid) == "S"
        if waits or _cpu_s(pid) - cpu_s > _C_CALL_CPU_S:
            return [], True
        time.sleep(_POLL_S)
    return [], False


def _cpu_s(pid: int) -> float:
    """Return the seconds of CPU time of the main thread."""
    times = processor_times(pid, pid)
    return times[0] / 1e9 if times is not None else 0.0


def _dump_thread(pid: int, thread: int, path: str, limit_s: float) -> list[ThreadStack]:
    """Return the stack that faulthandler writes; empty if it is not a Python thread.

    Raise ``OSError``.
    """
    size = os.path.getsize(path)
    _send(pid, thread, STACK_SIGNAL)
    return _stack_of(thread, _read_appended(path, size, limit_s), main=thread == pid)


def _stack_of(thread: int, dump: str, *, main: bool) -> list[ThreadStack]:
    name = "main" if main else "thread"
    return [
        replace(stack, name=name, main=main, native_id=thread) for stack in parse_stacks(dump)[:1]
    ]


def _send(pid: int, thread: int, number: int) -> None:
    if _LIBC.tgkill(pid, thread, number):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def _read_appended(path: str, start: int, limit_s: float) -> str:
    """Return what is appended after ``start``, once the file has grown and is not written to."""
    deadline = time.monotonic() + limit_s
    size, unchanged_since = start, time.monotonic()
    while (now := time.monotonic()) < deadline:
        grown = os.path.getsize(path)
        if grown != size:
            size, unchanged_since = grown, now
        elif size > start and now - unchanged_since >= _QUIET_S:
            break
        time.sleep(_POLL_S)
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(_MAX_DUMP_BYTES).decode(errors="replace")


def _wait_until_settled(pid: int) -> None:
    """Wait until the process has returned from the signal handler.

    Otherwise a later sample of its activity would include the return from the handler.
    """
    deadline = time.monotonic() + _SETTLE_TIMEOUT_S
    switches = context_switches(pid)
    while time.monotonic() < deadline:
        time.sleep(_QUIET_S)
        if (now := context_switches(pid)) == switches and thread_state(pid, pid) != "R":
            break
        switches = now


class PySpy:
    """py-spy, if it is installed. ``note`` says why it is missing or was not permitted."""

    def __init__(self) -> None:
        installed = Path(sys.executable).with_name("py-spy")
        self._path = shutil.which("py-spy") or (str(installed) if installed.exists() else None)
        self.note: str | None = None
        if self._path is None:
            self.note = (
                "py-spy is not installed: no stacks of stopped processes (pip install py-spy)"
            )

    def stacks(self, pid: int) -> tuple[ThreadStack, ...] | str:
        """Return the Python stacks of a process, even of a stopped one, or why there are none."""
        if self._path is None:
            return "py-spy is not installed"
        try:
            done = subprocess.run(
                [self._path, "dump", "--pid", str(pid), "--json", "--nonblocking"],
                capture_output=True,
                timeout=_PY_SPY_TIMEOUT_S,
                check=False,
                stdin=subprocess.DEVNULL,
            )
            if done.returncode:
                errors = done.stderr.decode(errors="replace").strip()
                return self._refusal(pid, errors.splitlines()[-1] if errors else "")
            return tuple(_py_spy_stack(thread, pid) for thread in json.loads(done.stdout))
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            return self._refusal(pid, f"{type(error).__name__}")

    def _refusal(self, pid: int, reason: str) -> str:
        text = f"py-spy cannot read process {pid}: {reason or 'no reason given'}"
        if "ermission" in reason:
            self.note = f"no permission to ptrace ({reason}): {_ptrace_advice()}"
        return text


def _ptrace_advice() -> str:
    if read_text("/proc/sys/kernel/yama/ptrace_scope").strip() not in ("", "0"):
        return "allow it with: sudo sysctl kernel.yama.ptrace_scope=0"
    return "in a container add the capability SYS_PTRACE"


def _py_spy_stack(thread: dict[str, Any], pid: int) -> ThreadStack:
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
                function=str(f.get("name")).rpartition(".")[2],  # new versions qualify it
            )
            for f in thread.get("frames") or ()
        ),
    )
