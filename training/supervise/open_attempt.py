"""Open an attempt: acquire the run lock, open the store, and start the shim of a new attempt.

``open_attempt`` returns a supervisor that is ready, or raises ``ProblemError`` and leaves the run
as it was. Users wait for the first training step, so the engine of a new attempt is started before
the modules of the supervisor are imported, and this module must not import anything heavy.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ltui.training.config.run_spec import RunSpec
from ltui.training.lifecycle.run_processes import (
    engine_exit,
    kill_run_processes,
    latest_attempt,
    shim_identity,
)
from ltui.training.lifecycle.supervisor_client import AttemptPlan, save_environment, supervisor_argv
from ltui.training.problem import ProblemError
from ltui.training.process.identity import (
    any_process_has,
    boot_id,
    lock_holder,
    lock_was_copied,
    release_lock,
    write_lock_text,
)
from ltui.training.state.run_snapshot import Event, RunState
from ltui.training.store.database_schema import damaged_error
from ltui.training.store.history_writer import Batch, StoreWriter
from ltui.training.store.open_history import open_history
from ltui.training.store.queue_files import check_asked, remove_entry
from ltui.training.store.recorded_environment import record_environment
from ltui.training.store.redaction import secret_digests
from ltui.training.store.run_checkpoints import remove_unfinished, saved_by
from ltui.training.store.run_directory import (
    RunDir,
    is_hard_linked,
    make_private_folders,
    open_private_log,
    remove_links,
    separate,
    write_json,
)
from ltui.training.supervise.engine_command import engine_start, write_rank_config

if TYPE_CHECKING:
    from ltui.training.supervise.live_attempt import LiveAttempt
    from ltui.training.supervise.node_agent import NodeAgent
    from ltui.training.supervise.supervisor import Supervisor

SHIM_PATH = str(Path(__file__).with_name("shim.py"))
_LOCK_TIMEOUT_S = 2.0
"""Seconds to wait for the lock, because the previous supervisor may still be exiting."""
_SHIM_START_S = 15.0
"""Seconds within which a shim must report that it has started."""


def open_attempt(
    run_dir: RunDir, plan: AttemptPlan, lock: int | None = None
) -> Supervisor | NodeAgent:
    """Open the attempt that ``plan`` describes. Return its supervisor when the engine is started.

    ``lock`` is the run lock, if this process already holds it from the previous attempt.
    """
    with contextlib.ExitStack() as on_error:
        is_new = lock is None and not plan.recover
        lock = _acquire_lock(run_dir, recovers=plan.recover) if lock is None else lock
        # What was not started leaves nothing. What was, is recovered by the next command.
        on_error.callback(release_lock if is_new else os.close, lock)
        if plan.queued_attempt is not None:
            check_asked(run_dir, plan.queued_attempt)
        if not plan.recover and plan.restarted_because is None:
            run_dir.restarts_path.unlink(missing_ok=True)
            run_dir.requests_path.unlink(missing_ok=True)
        spec = _install_spec(run_dir, plan)
        run_dir.bound_socket_path()  # Raises an error if a socket cannot be created.
        store, missing = open_history(run_dir)
        on_error.callback(store.close)
        shim: subprocess.Popen[bytes] | None = None
        try:
            attempt = _record_attempt(run_dir, plan, store, missing)
            if not plan.recover and not _waits_before_start(spec):
                shim = _start_shim(run_dir, spec, attempt, plan.resume_from, plan.changes)
                on_error.callback(_kill_shim, run_dir, shim)
            # These imports take longer than everything above, so the engine is started before.
            from ltui.training.supervise.live_attempt import LiveAttempt

            supervisor_class = _supervisor_class(spec)
            live = LiveAttempt(run_dir, spec, store, attempt, plan, lock)
            on_error.callback(live.close)
            supervisor = supervisor_class(live)
        except sqlite3.Error as error:
            raise damaged_error(run_dir.db_path, error) from error
        # From here on the supervisor closes the store and the lock.
        on_error.pop_all()
        on_error.callback(supervisor.abort)
        # Imported after the engine was started, as the supervisor.
        from ltui.training.lifecycle.record_code import start_recording

        if shim is not None:
            live.shim.child = shim
            _wait_for_shim(run_dir, attempt, shim)
        else:
            _start_engine_if_due(live, restart_waits=supervisor.restart_waits)
        # The shim of the previous attempt waits for this file.
        if attempt > 1 and engine_exit(run_dir, attempt - 1) is not None:
            run_dir.engine_final_path(attempt - 1).touch()
        if not plan.recover and (spec.nodes is None or spec.nodes.rank == 0):
            start_recording(run_dir, spec, attempt)
        with contextlib.suppress(OSError):
            remove_entry(run_dir)
        on_error.pop_all()
        return supervisor


def _waits_before_start(spec: RunSpec) -> bool:
    """Return True if the engine must not start at once: the run waits for GPUs or for other nodes.

    The ranks of a preset wait for each other, so their engine can start before all nodes have
    joined. A command of the user may not wait, and so could end before.
    """
    is_head = spec.nodes is not None and spec.nodes.rank == 0
    return spec.gpus is not None or (is_head and spec.command is not None)


def _supervisor_class(spec: RunSpec) -> type[Supervisor | NodeAgent]:
    """Return what supervises the engine on this machine: an agent on any node but the first."""
    # Each is imported here, because it is slow and the engine is started before (``open_attempt``).
    if spec.nodes is not None and spec.nodes.rank > 0:
        from ltui.training.supervise.node_agent import NodeAgent

        return NodeAgent
    from ltui.training.supervise.supervisor import Supervisor

    return Supervisor


def _record_attempt(
    run_dir: RunDir, plan: AttemptPlan, store: StoreWriter, missing: str | None
) -> int:
    """Create the directories of the attempt and its row in the store. Return its number.

    ``missing`` says what was lost from the history until now.
    """
    in_store, in_files = store.last_attempt(), latest_attempt(run_dir) or 0
    last = max(in_store, in_files)
    if plan.recover and not last:
        raise ProblemError.of(where=run_dir.id, what="it was never started.")
    attempt = last if plan.recover else plan.number or last + 1
    if plan.queued_attempt is not None and in_store <= plan.queued_attempt:
        attempt = plan.queued_attempt  # perhaps recorded already, but its engine was never started
    _make_attempt_dirs(run_dir, attempt)
    if not plan.recover:
        remove_unfinished(run_dir.checkpoints_dir)
    store.begin_attempt(
        attempt,
        started_at=time.time(),
        boot_id=boot_id(),
        resumed_path=str(plan.resume_from) if plan.resume_from else None,
        resumed_step=plan.resume_step,
        changes=plan.changes,
        reason=plan.restarted_because,
        parent=None if plan.resume_from is None else saved_by(plan.resume_from),
    )
    if missing is not None:
        store.record_missing_part(attempt, missing)
    elif in_store < in_files:
        store.record_missing_part(attempt, "the history until now is missing")
    elif attempt > 1 and (last_step := store.last_step()) < (plan.resume_step or 0):
        text = f"steps {last_step + 1} to {plan.resume_step} are missing"
        store.record_missing_part(attempt, text)
    return attempt


def _start_engine_if_due(live: LiveAttempt, *, restart_waits: bool) -> None:
    """Start the engine if it has not been started yet.

    This is the case for a recovered attempt whose supervisor died too early. If the run waits for
    other nodes or for GPUs, the supervisor starts the engine later.
    """
    run_dir, attempt, plan = live.run_dir, live.number, live.plan
    started = shim_identity(run_dir, attempt) is not None or restart_waits
    start_due = not plan.recover or (not started and _start_was_interrupted(run_dir, attempt))
    # The start file is written when the waiting ends.
    waits = not restart_waits and not run_dir.engine_start_path(attempt).exists()
    resume_from = plan.resume_from or (live.store.resumed_path(attempt) if plan.recover else None)

    def start(chosen: RunSpec) -> subprocess.Popen[bytes]:
        shim = _start_shim(run_dir, chosen, attempt, resume_from, live.changes)
        _wait_for_shim(run_dir, attempt, shim)
        return shim

    if _waits_before_start(live.spec) and (start_due or waits):
        save_environment(run_dir)
        live.start_shim = start
    elif start_due:
        live.shim.child = start(live.spec)


def record_failed_restart(
    run_dir: RunDir, plan: AttemptPlan, error: ProblemError | OSError
) -> None:
    """Record that the run has ended, because its next attempt could not be started.

    An agent tells node 0, which records it.
    """
    # Imported here because only a failed restart needs it.
    from ltui.training.supervise.history_recorder import stored_snapshot

    print(error, file=sys.stderr, flush=True)
    if plan.number is not None:
        from ltui.training.supervise.node_agent import report_failed_start

        report_failed_start(run_dir, plan.number, error)
    snapshot = stored_snapshot(run_dir)
    attempt = latest_attempt(run_dir) or 1
    if snapshot is not None:
        reason = str(error).splitlines()[0]
        detail = f"{snapshot.detail}; that failed: {reason}"
        store, _ = open_history(run_dir)
        ended = replace(snapshot, state=RunState.FAILED, detail=detail, ended_at=time.time())
        event = Event(time.time(), "note", f"The restart failed: {reason}")
        store.commit(snapshot.attempt, Batch(events=[event]), ended)
        store.set_state(
            max(attempt, store.last_attempt()), time.time(), RunState.FAILED, detail, None
        )
        store.close()
    for number in (attempt - 1, attempt):
        if engine_exit(run_dir, number) is not None:
            run_dir.engine_final_path(number).touch()


def _start_was_interrupted(run_dir: RunDir, attempt: int) -> bool:
    """Return True if the supervisor died after recording the attempt, before its shim started.

    A shim that has not reported that it has started exits with its supervisor.
    """
    previous = shim_identity(run_dir, attempt - 1)
    if previous is None or not previous.alive():
        return False
    deadline = time.monotonic() + _SHIM_START_S
    while any_process_has(SHIM_PATH, str(run_dir.path), str(attempt)):
        if shim_identity(run_dir, attempt) is not None or time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return shim_identity(run_dir, attempt) is None


def _acquire_lock(run_dir: RunDir, *, recovers: bool) -> int:
    """Acquire the run lock, which is held until this process ends. Return its file descriptor.

    A lock file that is a copy, or a link to that of another run, is replaced. Raises
    ``ProblemError`` if another supervisor has the run or, with ``recovers``, has just ended it.
    """
    folder = os.open(run_dir.path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Of two that start at once, the second finds the lock of the first.
        with contextlib.suppress(OSError):  # not every file system locks folders
            fcntl.flock(folder, fcntl.LOCK_EX)
        lock = run_dir.lock_path
        copied = lock.is_symlink() or lock_was_copied(lock)
        if copied or (is_hard_linked(lock) and not lock.stat().st_size):
            lock.unlink()
        return _lock_file(run_dir, recovers=recovers)
    finally:
        os.close(folder)


def _lock_file(run_dir: RunDir, *, recovers: bool) -> int:
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    was_there = run_dir.lock_path.exists()
    descriptor = os.open(run_dir.lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise _already_supervised(run_dir) from None
            time.sleep(0.05)
    if recovers and was_there and not os.fstat(descriptor).st_size:
        # Two clients may recover a run at once. What the second one needs is gone: the queues.
        os.close(descriptor)
        raise ProblemError.of(where=run_dir.id, what="its end is already recorded.")
    write_lock_text(descriptor, run_dir.lock_path)
    return descriptor


def _already_supervised(run_dir: RunDir) -> ProblemError:
    holder = lock_holder(run_dir.lock_path)
    who = f" (pid {holder.pid})" if holder else ""
    return ProblemError.of(
        where=run_dir.id,
        what=f"another supervisor{who} already has this run.",
        remedy=f"ltui attach {run_dir.id} shows it.",
    )


def _install_spec(run_dir: RunDir, plan: AttemptPlan) -> RunSpec:
    """Replace the stored specification if the plan has another one. Return the current one."""
    if plan.spec_path is not None:
        os.replace(plan.spec_path, run_dir.spec_path)
        shutil.rmtree(plan.spec_path.parent, ignore_errors=True)
    elif plan.left_out is not None:
        _leave_out(run_dir, plan.left_out)
    elif not plan.recover:
        separate(run_dir.spec_path)
        os.utime(run_dir.spec_path)  # `last` is the run that was started or resumed last
    return run_dir.read_spec()


def _leave_out(run_dir: RunDir, left_out: tuple[int, ...]) -> None:
    """Store the nodes without which the run continues, until a person resumes it."""
    spec = run_dir.read_spec()
    if spec.nodes is not None and spec.nodes.left_out != left_out:
        run_dir.write_spec(spec.with_changes(nodes=replace(spec.nodes, left_out=left_out)))


def _make_attempt_dirs(run_dir: RunDir, attempt: int) -> None:
    for path in (
        run_dir.queue_dir(attempt),
        run_dir.logs_dir(attempt),
        run_dir.path / "engine",
        run_dir.path / "evidence",
        run_dir.checkpoints_dir,
    ):
        make_private_folders(path)
    remove_links(run_dir.logs_dir(attempt))


def _start_shim(
    run_dir: RunDir,
    spec: RunSpec,
    attempt: int,
    resume_from: Path | None,
    changes: tuple[str, ...],
) -> subprocess.Popen[bytes]:
    """Start the shim, which starts the engine of ``spec``."""
    if spec.command is None:
        write_rank_config(run_dir, spec, attempt)
    document = {
        **engine_start(run_dir, spec, attempt, resume_from, changes),
        "supervisor": supervisor_argv(run_dir, AttemptPlan(recover=True)),
        "boot_id": boot_id(),
    }
    variables = {**os.environ, **{k: v for k, v in document["env"].items() if v is not None}}
    write_json(run_dir.secret_digests_path(attempt), secret_digests(variables))
    record_environment(run_dir, attempt, values=spec.nodes is None)
    write_json(run_dir.engine_start_path(attempt), document)
    run_dir.environment_path.unlink(missing_ok=True)
    program = [sys.executable, "-I", "-S", SHIM_PATH]
    with open_private_log(run_dir.shim_log_path) as log:
        return subprocess.Popen(
            [*program, str(run_dir.path), str(attempt), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _wait_for_shim(run_dir: RunDir, attempt: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until the shim reports that it has started. Raises ``ProblemError`` if it does not."""
    deadline = time.monotonic() + _SHIM_START_S
    while shim_identity(run_dir, attempt) is None:
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise ProblemError.of(
                where=run_dir.id,
                what=f"its shim process could not be started (see {run_dir.path / 'logs'}).",
            )
        time.sleep(0.01)


def _kill_shim(run_dir: RunDir, process: subprocess.Popen[bytes]) -> None:
    """Kill the shim of an attempt that has no supervisor, and all processes of the run."""
    process.kill()
    process.wait()
    kill_run_processes(run_dir)
