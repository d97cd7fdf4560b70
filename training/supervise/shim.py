"""The shim: starts the engine, waits for it, kills its remaining processes, restarts a supervisor.

It runs as a script (``shim.py RUN_DIR ATTEMPT STARTER``) and uses the standard library only, so
that it stays small and survives failures of other processes. ``engine/<attempt>.start.json``
contains the command to start. How the engine ended is written to ``engine/<attempt>.json``. Until
the shim has written ``keeper.json``, it exits with its starter, because no other process could
find it.

It is a child subreaper: orphaned processes of a dead rank become its children, and it kills them.
A supervisor that it restarted, or the program of the run, may have started the dispatcher of the
run queue or other runs. They become its descendants, too, but do not end with this run.
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

_POLL_S = 0.4
"""Seconds between two checks that the supervisor is alive."""
_GRACE_S = 1.0
"""Seconds between SIGTERM and SIGKILL for the processes that the engine left running."""
_STOP_GRACE_S = 30.0
"""Grace period in seconds if a stop signal ended the engine: ranks then save and exit."""
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
_KILL_TIMEOUT_S = 15.0
"""Seconds to wait after SIGKILL. A process that still exists is blocked in the kernel."""
_MAX_RESTARTS = 5
"""Maximum number of supervisor restarts in a row."""
_STABLE_S = 60.0
"""Seconds after which a restarted supervisor counts as stable, so the counter is reset."""
_RESERVED_BYTES = 4096
"""Bytes reserved on disk for the end of the engine, so that it can be recorded on a full disk."""
_INDEPENDENT = {
    *(b"ltui.training.supervise.main", b"ltui.app.launch.queue_dispatcher"),
    os.fsencode(os.path.abspath(__file__)),
}
"""Words of the command lines of supervisors, the dispatcher and shims."""


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _stat(pid: int) -> tuple[str, int, int] | None:
    """Return (state, parent pid, start ticks) of a process, or None if it does not exist."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return fields[0].decode(), int(fields[1]), int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def _is_independent(pid: int) -> bool:
    """Return True for the dispatcher of the run queue, and for any run's supervisor or shim."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
    except OSError:
        return False
    return not _INDEPENDENT.isdisjoint(words[:4])  # python's own options, and what it runs


def _write(path: str, document: dict[str, Any]) -> None:
    """Replace ``path`` atomically."""
    part = f"{path}.part"
    with open(part, "w", opener=lambda p, flags: os.open(p, flags, 0o600)) as file:
        json.dump(document, file)
    os.replace(part, path)


class Shim:
    """The engine of one attempt, and the processes around it."""

    def __init__(self, run_dir: str, attempt: int) -> None:
        self.run_dir = run_dir
        # The folder itself, wherever it is moved to. It is never a path of a program, as that of
        # the current folder would be.
        self.folder = f"/proc/self/fd/{os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)}"
        self.attempt = attempt
        self.engine_pid: int | None = None
        self.engine_status: int | None = None
        self.supervisor_pid: int | None = None
        self.restarts = 0
        self.restarted_at = 0.0
        start_path = self._path("engine", f"{attempt}.start.json")
        with open(start_path, encoding="utf-8") as file:
            self.start: dict[str, Any] = json.load(file)
        self.exit_path = self._path("engine", f"{attempt}.json")
        self._reserve()

    def _path(self, *parts: str) -> str:
        return os.path.join(self.folder, *parts)

    def removed(self) -> bool:
        """Return True if the run directory was removed. Then nobody could find the run."""
        try:
            os.stat(self._path("engine", f"{self.attempt}.start.json"))
        except FileNotFoundError:
            return True
        except OSError:  # a file system that does not answer at the moment
            pass
        return False

    # -- the engine ----------------------------------------------------------------------------

    def start_engine(self) -> str | None:
        """Start the engine. Return a sentence with the reason if it cannot be started."""
        merged = {**os.environ, **self.start["env"]}
        environment = {name: value for name, value in merged.items() if value is not None}
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
                umask=int(os.environ.get("LTUI_RUN_UMASK", "77"), 8),
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
        """Send SIGTERM to the engine."""
        if self.engine_pid is not None and self.engine_status is None:
            _kill(self.engine_pid, signal.SIGTERM)

    def write_identity(self) -> None:
        """Write the identities of the shim and the engine to ``keeper.json``."""
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
        """Return when the engine has ended. Restart the supervisor meanwhile if it dies."""
        while self.engine_status is None:
            signal.sigtimedwait({signal.SIGCHLD}, _POLL_S)
            self._reap()
            if self.removed():
                if self.engine_pid is not None and self.engine_status is None:
                    _kill(self.engine_pid, signal.SIGKILL)
                return
            self._restart_supervisor()

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

    # -- remaining processes -------------------------------------------------------------------

    def kill_descendants(self) -> list[int]:
        """Terminate, then kill, all descendants that belong to the run. Return their pids."""
        begun = time.monotonic()
        signalled: dict[int, int] = {}
        status = self.engine_status
        stopped = status is not None and -os.waitstatus_to_exitcode(status) in (
            *_STOP_SIGNALS,
            signal.SIGHUP,
        )
        grace_s = _STOP_GRACE_S if stopped else _GRACE_S
        while time.monotonic() - begun < grace_s + _KILL_TIMEOUT_S:
            self._reap()
            remaining = self._descendants()
            if not remaining:
                break
            number = signal.SIGTERM if time.monotonic() - begun < grace_s else signal.SIGKILL
            for pid in remaining:
                if signalled.get(pid) != number:
                    signalled[pid] = number
                    _kill(pid, number)
                    _kill(pid, signal.SIGCONT)
            time.sleep(0.05)
        return sorted(signalled)

    def _descendants(self) -> list[int]:
        children: dict[int, list[int]] = {}
        for name in os.listdir("/proc"):
            if name.isdigit() and (stat := _stat(int(name))) and stat[0] not in "ZX":
                children.setdefault(stat[1], []).append(int(name))
        descendants: list[int] = []
        pending = [os.getpid()]
        while pending:
            for child in children.get(pending.pop(), []):
                if not _is_independent(child):
                    descendants.append(child)
                    pending.append(child)
        return descendants

    # -- how it ended --------------------------------------------------------------------------

    def _reserve(self) -> None:
        with open(f"{self.exit_path}.part", "wb") as file:
            file.write(b" " * _RESERVED_BYTES)

    def record_end(self, document: dict[str, Any]) -> None:
        """Overwrite the reserved bytes and rename the file. This needs no free disk space."""
        text = json.dumps({**document, "ended_at": time.time()}).encode()
        part = f"{self.exit_path}.part"
        for _ in range(600):
            try:
                descriptor = os.open(part, os.O_WRONLY | os.O_CREAT, 0o600)
                os.pwrite(descriptor, text.ljust(_RESERVED_BYTES), 0)
                os.fsync(descriptor)
                os.close(descriptor)
                os.replace(part, self.exit_path)
            except OSError:
                time.sleep(1.0)
            else:
                return

    # -- the supervisor ------------------------------------------------------------------------

    def _supervisor(self) -> int | None:
        """Return the pid of the supervisor that holds the run lock, or None if it is dead."""
        try:
            with open(self._path("supervisor.lock"), encoding="ascii") as file:
                pid, ticks = (int(line) for line in file.read().split("\n")[:2])
        except (OSError, ValueError):
            return None
        stat = _stat(pid)
        return pid if stat and stat[0] not in "ZX" and stat[2] == ticks else None

    def _supervised(self) -> bool:
        """Return True if there is a supervisor. One that was started may not have the lock yet."""
        if self._supervisor() is not None:
            return True
        return self.supervisor_pid is not None and _alive(self.supervisor_pid)

    def _restart_supervisor(self) -> None:
        """Start another supervisor if the last one is dead. The delay doubles each time."""
        if self._supervised() or self.end_recorded():
            return
        now = time.monotonic()
        if now - self.restarted_at > _STABLE_S:
            self.restarts = 0
        delay_s = 0.5 * 2**self.restarts - 0.5
        if self.restarts >= _MAX_RESTARTS or now - self.restarted_at < delay_s:
            return
        self.restarts += 1
        self.restarted_at = now
        self.supervisor_pid = self._start_supervisor()

    def _start_supervisor(self) -> int | None:
        try:
            with open(self._path("logs", "supervisor.log"), "ab") as log:
                # A folder of that path may have been made again by a rank that saves there.
                stays = os.path.exists(os.path.join(self.run_dir, "spec.yaml"))
                here = self.run_dir if stays else os.readlink(self.folder)
                child = subprocess.Popen(
                    [here if word == self.run_dir else word for word in self.start["supervisor"]],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, []),
                )
        except OSError:
            return None
        self._restarted_supervisor = child
        return child.pid

    def end_recorded(self) -> bool:
        """Return True if the final state of the attempt is in the store."""
        return os.path.exists(self._path("engine", f"{self.attempt}.final"))

    def wait_until_recorded(self) -> None:
        """Return when a supervisor has recorded the end of the run, or if none can be started."""
        while not self.end_recorded() and not self.removed():
            self._restart_supervisor()
            if self.restarts >= _MAX_RESTARTS and not self._supervised():
                return
            signal.sigtimedwait({signal.SIGCHLD}, 0.2)
            self._reap()


def _alive(pid: int) -> bool:
    stat = _stat(pid)
    return stat is not None and stat[0] not in "ZX"


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, number)


def main(run_dir: str, attempt: int, starter: int) -> None:
    """Run one attempt from the start of its engine until its end is recorded."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != starter:
        return
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    shim = Shim(run_dir, attempt)
    # If a user sends a signal to the shim, terminate the engine. The rest is a regular end.
    for number in _STOP_SIGNALS:
        signal.signal(number, lambda *_: shim.terminate_engine())
    error = shim.start_engine()
    shim.write_identity()
    _prctl(_PR_SET_PDEATHSIG, 0)
    if error is None:
        shim.wait_for_engine()
    killed = shim.kill_descendants()
    if shim.removed():
        return
    code = 127 if error else None
    if shim.engine_status is not None:
        code = os.waitstatus_to_exitcode(shim.engine_status)  # negative for a signal
    shim.record_end(
        {
            "exit_code": code if code is not None and code >= 0 else None,
            "signal": -code if code is not None and code < 0 else None,
            "killed": killed,
            "error": error,
        }
    )
    shim.wait_until_recorded()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
