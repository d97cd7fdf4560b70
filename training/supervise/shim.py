"""The keeper: starts the engine, waits for it, cleans up after it, revives a dead supervisor.

Run as a script by its path, with the standard library only, so that it stays small and outlives
whatever happens to the rest: ``shim.py RUN_DIR ATTEMPT STARTER``. What to start stands in
``engine/<attempt>.start.json``; how it ended is written to ``engine/<attempt>.json``. Until it has
said in ``keeper.json`` that it stands, it dies with its starter: nobody else knows of it.

It is a child subreaper: what a dead rank leaves behind becomes its child, and is ended here.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_LOOK_S = 0.4
_GRACE_S = 1.0
"""What the engine left behind gets this long between TERM and KILL."""
_STOP_GRACE_S = 30.0
"""So long where a signal that asks to stop ended the engine: its ranks then save and leave."""
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_GIVE_UP_S = 15.0
"""A process that SIGKILL does not end by then sits in the kernel; nothing more can be done."""
_REVIVALS = 5
_STEADY_S = 60.0
"""A supervisor that lived this long earns all its revivals back."""
_RESERVED_BYTES = 4096
"""Set aside for how the engine ended, so that a full disk can't hide it."""


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _stat(pid: int) -> tuple[str, int, int] | None:
    """(state, parent, start ticks) of a process, or None."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return fields[0].decode(), int(fields[1]), int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def _write(path: str, document: dict[str, Any]) -> None:
    """Replace ``path`` at one stroke."""
    part = f"{path}.part"
    with open(part, "w", opener=lambda p, flags: os.open(p, flags, 0o600)) as file:
        json.dump(document, file)
    os.replace(part, path)


class Shim:
    """One engine of one attempt."""

    def __init__(self, run_dir: str, attempt: int) -> None:
        self.run_dir = run_dir
        self.attempt = attempt
        self.engine_pid: int | None = None
        self.engine_status: int | None = None
        self.supervisor_pid: int | None = None
        self.revivals = 0
        self.revived_at = 0.0
        start_path = self._path("engine", f"{attempt}.start.json")
        with open(start_path, encoding="utf-8") as file:
            self.start: dict[str, Any] = json.load(file)
        self.exit_path = self._path("engine", f"{attempt}.json")
        self._reserve()

    def _path(self, *parts: str) -> str:
        return os.path.join(self.run_dir, *parts)

    # -- the engine ----------------------------------------------------------------------------

    def start_engine(self) -> str | None:
        """Start it; the sentence that says why not, if it can't be."""
        environment = dict(os.environ)
        for name, value in self.start["env"].items():
            if value is None:
                environment.pop(name, None)
            else:
                environment[name] = value
        log = os.open(self.start["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        shim_pid = os.getpid()

        def before_exec() -> None:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            if os.getppid() != shim_pid:
                os._exit(1)

        try:
            self._engine = subprocess.Popen(
                self.start["argv"],
                cwd=self.start["cwd"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=before_exec,
            )
        except (OSError, subprocess.SubprocessError) as error:
            os.write(log, f"{error}\n".encode())
            return f"{self.start['argv'][0]} could not be started: {error}"
        finally:
            os.close(log)
        self.engine_pid = self._engine.pid
        return None

    def terminate_engine(self) -> None:
        """Ask the engine to end."""
        if self.engine_pid is not None and self.engine_status is None:
            _kill(self.engine_pid, signal.SIGTERM)

    def write_identity(self) -> None:
        """Say who keeps the run and what its engine is."""
        me = _stat(os.getpid())
        engine = _stat(self.engine_pid) if self.engine_pid else None
        _write(
            self._path("keeper.json"),
            {
                "pid": os.getpid(),
                "start_ticks": me[2] if me else 0,
                "attempt": self.attempt,
                "engine_pid": self.engine_pid,
                "engine_start_ticks": engine[2] if engine else 0,
                "boot_id": self.start.get("boot_id"),
            },
        )

    def wait_for_engine(self) -> None:
        """Until the engine ended."""
        while self.engine_status is None:
            signal.sigtimedwait({signal.SIGCHLD}, _LOOK_S)
            self._reap()
            self._revive()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.engine_pid:
                self.engine_status = status

    # -- what is left --------------------------------------------------------------------------

    def kill_descendants(self) -> list[int]:
        """Terminate, then kill, every descendant but the supervisor; the pids that had to go."""
        met: set[int] = set()
        begun = time.monotonic()
        signalled: dict[int, int] = {}
        status = self.engine_status
        asked = status is not None and os.WIFSIGNALED(status)
        asked = asked and os.WTERMSIG(status or 0) in _STOP_SIGNALS
        grace_s = _STOP_GRACE_S if asked else _GRACE_S
        while time.monotonic() - begun < grace_s + _GIVE_UP_S:
            self._reap()
            left = self._descendants()
            if not left:
                break
            number = signal.SIGTERM if time.monotonic() - begun < grace_s else signal.SIGKILL
            for pid in left:
                met.add(pid)
                if signalled.get(pid) != number:
                    signalled[pid] = number
                    _kill(pid, number)
                    _kill(pid, signal.SIGCONT)
            time.sleep(0.05)
        return sorted(met)

    def _descendants(self) -> list[int]:
        children: dict[int, list[int]] = {}
        for name in os.listdir("/proc"):
            if name.isdigit() and (found := _stat(int(name))) and found[0] not in "ZX":
                children.setdefault(found[1], []).append(int(name))
        spared = self._supervisor()
        found_pids: list[int] = []
        pending = [os.getpid()]
        while pending:
            for child in children.get(pending.pop(), []):
                if child != spared and child != self.supervisor_pid:
                    found_pids.append(child)
                    pending.append(child)
        return found_pids

    # -- how it ended --------------------------------------------------------------------------

    def _reserve(self) -> None:
        with open(f"{self.exit_path}.part", "wb") as file:
            file.write(b" " * _RESERVED_BYTES)

    def record_end(self, document: dict[str, Any]) -> None:
        """Write over the reserved bytes and name them: needs no room on the disk."""
        text = json.dumps({**document, "ended_at": time.time()}).encode()
        part = f"{self.exit_path}.part"
        for _ in range(600):
            try:
                handle = os.open(part, os.O_WRONLY | os.O_CREAT, 0o600)
                os.pwrite(handle, text.ljust(_RESERVED_BYTES), 0)
                os.fsync(handle)
                os.close(handle)
                os.replace(part, self.exit_path)
            except OSError:
                time.sleep(1.0)
            else:
                return

    # -- the supervisor ------------------------------------------------------------------------

    def _supervisor(self) -> int | None:
        """Its pid while it lives."""
        try:
            with open(self._path("supervisor.lock"), encoding="ascii") as file:
                pid, ticks = (int(line) for line in file.read().split("\n")[:2])
        except (OSError, ValueError):
            return None
        found = _stat(pid)
        return pid if found and found[0] not in "ZX" and found[2] == ticks else None

    def _revive(self) -> None:
        if self._supervisor() is not None or self.end_recorded():
            return
        now = time.monotonic()
        if self.supervisor_pid is not None and _alive(self.supervisor_pid):
            return  # it has not taken the lock yet
        if now - self.revived_at > _STEADY_S:
            self.revivals = 0
        if self.revivals >= _REVIVALS or now - self.revived_at < 0.5 * 2**self.revivals - 0.5:
            return
        self.revivals += 1
        self.revived_at = now
        self.supervisor_pid = self._start_supervisor()

    def _start_supervisor(self) -> int | None:
        try:
            with open(self._path("logs", "supervisor.log"), "ab") as log:
                child = subprocess.Popen(
                    self.start["supervisor"],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, []),
                )
        except OSError:
            return None
        self._revived = child
        return child.pid

    def end_recorded(self) -> bool:
        """Whether the attempt's final state is in the store."""
        return os.path.exists(self._path("engine", f"{self.attempt}.final"))

    def wait_until_recorded(self) -> None:
        """Stay until a supervisor has written how the run ended, or none can be had."""
        while not self.end_recorded():
            self._revive()
            lost = self._supervisor() is None and not (
                self.supervisor_pid and _alive(self.supervisor_pid)
            )
            if lost and self.revivals >= _REVIVALS:
                return
            signal.sigtimedwait({signal.SIGCHLD}, 0.2)
            self._reap()


def _alive(pid: int) -> bool:
    found = _stat(pid)
    return found is not None and found[0] not in "ZX"


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, number)


def main(run_dir: str, attempt: int, starter: int) -> None:
    """Keep one attempt from its start to its recorded end."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != starter:
        return
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    shim = Shim(run_dir, attempt)
    # A person's `kill KEEPER` asks the engine to end; what follows is the ordinary end.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda *_: shim.terminate_engine())
    error = shim.start_engine()
    shim.write_identity()
    _prctl(_PR_SET_PDEATHSIG, 0)
    if error is None:
        shim.wait_for_engine()
    killed = shim.kill_descendants()
    status = shim.engine_status
    shim.record_end(
        {
            "exit_code": os.WEXITSTATUS(status)
            if status is not None and os.WIFEXITED(status)
            else (127 if error else None),
            "signal": os.WTERMSIG(status)
            if status is not None and os.WIFSIGNALED(status)
            else None,
            "killed": killed,
            "error": error,
        }
    )
    shim.wait_until_recorded()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
