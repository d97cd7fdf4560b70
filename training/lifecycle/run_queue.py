"""Put runs into the run queue, start them from there, and take them out.

The run directory of a queued run is complete, with the environment of the process that asked; it
only has no process. ``queue_files.py`` describes its files, ``state/run_queue.py`` the decision.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ltui.training.config.device_selection import free_count
from ltui.training.config.run_spec import RunSpec
from ltui.training.lifecycle.dispatcher_process import wake_dispatcher
from ltui.training.lifecycle.launch_run import (
    check_start,
    create_run_directory,
    leaving_no_run,
    start_first_attempt,
)
from ltui.training.lifecycle.rank_package import install_rank_package
from ltui.training.lifecycle.resume_run import check_resumable, resume, resume_point
from ltui.training.lifecycle.run_processes import has_live_shim, latest_attempt
from ltui.training.lifecycle.run_status import recover_run, resolve_snapshot
from ltui.training.lifecycle.supervisor_client import (
    AttemptPlan,
    ControlClient,
    SupervisorDiedError,
    attempt_environment,
)
from ltui.training.problem import ProblemError
from ltui.training.process.identity import any_process_has, lock_holder
from ltui.training.process.proc_files import read_text
from ltui.training.state.run_queue import (
    FAILED,
    GONE,
    STOPPED,
    QueueEntry,
    QueueFacts,
    UsedSlots,
    check_no_cycle,
    split_dependency,
)
from ltui.training.state.run_snapshot import RunState
from ltui.training.store.queue_files import (
    change_entry,
    check_changeable,
    queue_lock,
    read_entry,
    read_queue,
    remove_entry,
    was_started,
    write_entry,
)
from ltui.training.store.run_directory import (
    RunDir,
    paths_in,
    read_json,
    write_atomically,
    write_json,
)
from ltui.training.store.spec_file import read_spec_file, spec_text

if TYPE_CHECKING:
    from ltui.training.state.run_snapshot import CheckpointInfo


def enqueue(
    spec: RunSpec,
    home: Path,
    entry: QueueEntry,
    start_from: CheckpointInfo | None = None,
    *,
    private_files: Mapping[str, str] | None = None,
    interpreter_checked: bool = False,
    fill: Callable[[RunDir], None] = lambda _: None,
    environment: Mapping[str, str] | None = None,
) -> RunDir:
    """Create a run that is started by the run queue, as ``launch`` starts one at once.

    ``entry`` says when; its slots and GPUs are those of ``spec``.
    ``fill`` is called with the run directory before it appears under its name. The run gets
    ``environment``, by default that of this process. Raises
    ``ProblemError`` if the run could not be started; then there is no run directory.
    """
    check_start(spec, interpreter_checked=interpreter_checked)
    run_dir = RunDir(home / "runs" / spec.id)
    asked = _asked(entry, spec, home)

    def fill_completely(directory: RunDir) -> None:
        fill(directory)
        own = asked
        if start_from is not None:
            # Imported here because few runs begin with a checkpoint.
            from ltui.training.store.run_checkpoints import import_checkpoint

            brought = import_checkpoint(start_from, directory.checkpoints_dir)
            name = Path(brought.path).name
            own = replace(asked, checkpoint=name, step=brought.global_step)
        write_json(directory.environment_path, environment or os.environ)
        write_entry(directory, own)

    with leaving_no_run(run_dir):
        install_rank_package(home)
        create_run_directory(run_dir, spec, private_files, fill_completely)
    wake_dispatcher(home)
    return run_dir


def enqueue_resume(
    run_dir: RunDir,
    entry: QueueEntry,
    *,
    spec: RunSpec | None = None,
    checkpoint: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Put another attempt of a run that has ended into the run queue, as ``resume`` starts one.

    The last good checkpoint is chosen when it starts, unless ``checkpoint`` is given. Raises
    ``ProblemError`` if the run could not be resumed now.
    """
    before = run_dir.read_spec()
    changed = spec is not None and spec.overrides != before.overrides
    check_resumable(run_dir, allow_finished=changed or checkpoint is not None)
    resume_point(run_dir, checkpoint)
    check_start(spec or before)
    name = None if checkpoint is None else checkpoint.name
    asked = replace(_asked(entry, spec or before, run_dir.home), resume=True, checkpoint=name)
    with queue_lock(run_dir.home):
        check_no_cycle(read_queue(run_dir.home).entries, run_dir.id, entry.after)
        remove_entry(run_dir)
        if spec is not None:
            write_atomically(run_dir.queued_spec_path, spec_text(spec).encode())
        write_json(run_dir.environment_path, environment or attempt_environment(run_dir))
        write_entry(run_dir, asked)
    wake_dispatcher(run_dir.home)


def _asked(entry: QueueEntry, spec: RunSpec, home: Path) -> QueueEntry:
    """Return a new entry at the end of those of its priority, asked for by this process.

    Raises ``ProblemError`` if the run needs other machines.
    """
    if spec.nodes is not None:
        raise ProblemError.of(
            where="--queue",
            what="a run on several machines cannot wait in the run queue.",
            remedy="Start it without --queue, or with `ltui submit` under SLURM.",
        )
    umask = re.search(r"^Umask:\s*(\d+)$", read_text("/proc/self/status"), re.MULTILINE)
    last = max((one.position for one in read_queue(home).entries.values()), default=0.0)
    return replace(
        entry,
        asked_at=time.time(),
        position=entry.position or last + 1.0,
        slots=spec.slots,
        gpus=free_count(spec.gpus) or 0,
        host=os.uname().nodename,
        umask=int(umask[1], 8) if umask else entry.umask,
    )


def take_out(run_dir: RunDir) -> None:
    """Take a run out of the run queue. A run that was never started is then stopped; it can be put
    back. Raises ``ProblemError`` if it is not queued or is being started."""
    with queue_lock(run_dir.home):
        try:
            entry = read_entry(run_dir)
        except ProblemError:
            entry = QueueEntry(resume=latest_attempt(run_dir) is not None)
        check_changeable(run_dir, entry)
        assert entry is not None
        if entry.resume:
            remove_entry(run_dir)
        else:
            write_entry(run_dir, replace(entry, ended=STOPPED, starting=None, reason=None))


def request_from_queue(run_dir: RunDir, request: dict[str, Any]) -> dict[str, Any] | None:
    """Return the answer to a request for a queued run; None if it has a supervisor."""
    if lock_holder(run_dir.lock_path) is not None or not run_dir.queued_path.exists():
        return None
    if request.get("cmd") not in ("stop", "kill"):
        raise ProblemError.of(
            where=run_dir.id,
            what="it waits in the run queue, so no process of it can do that.",
            remedy=f"`ltui stop {run_dir.id}` takes it out of the run queue.",
        )
    take_out(run_dir)
    return {"ok": True}


# -- for the dispatcher ----------------------------------------------------------------------------


def mark_starting(run_dir: RunDir, entry: QueueEntry) -> QueueEntry:
    """Store that the run is being started, before anything of it is. The caller holds the lock."""
    marked = replace(entry, starting=(latest_attempt(run_dir) or 0) + 1)
    write_entry(run_dir, marked)
    return marked


def start_queued(run_dir: RunDir, entry: QueueEntry) -> None:
    """Start a run that was marked, and return when its supervisor answers.

    If it cannot be started, its entry says why. It is never started twice: its supervisor holds the
    run lock, compares the attempt with the mark, and removes the entry (``open_attempt.py``).
    Raises ``SupervisorDiedError`` if that was killed; then the run may be started again.
    """
    saved = read_json(run_dir.environment_path)
    environment = None if saved is None else {str(k): str(v) for k, v in saved.items()}
    umask = os.umask(entry.umask)
    try:
        if entry.resume:
            has_spec = run_dir.queued_spec_path.exists()
            resume(
                run_dir,
                spec=read_spec_file(run_dir.queued_spec_path) if has_spec else None,
                checkpoint=_checkpoint(run_dir, entry),
                queued_attempt=entry.starting,
                environment=environment,
            )
        else:
            plan = AttemptPlan(
                queued_attempt=entry.starting,
                resume_from=_checkpoint(run_dir, entry),
                resume_step=entry.step,
            )
            start_first_attempt(run_dir, plan, environment)
    except SupervisorDiedError:
        raise
    except (ValueError, OSError) as error:  # a variable may have a name that the system refuses
        record_failure(run_dir, entry, error)
    finally:
        os.umask(umask)


def _checkpoint(run_dir: RunDir, entry: QueueEntry) -> Path | None:
    return None if entry.checkpoint is None else run_dir.checkpoints_dir / entry.checkpoint


_EXIT_S = 10.0
"""Seconds to wait for the end of a supervisor that could not start its run."""


def record_failure(run_dir: RunDir, entry: QueueEntry, error: ValueError | OSError) -> None:
    """Mark the entry as failed, unless a supervisor of another dispatcher has started the run."""
    # The supervisor that has reported the failure may still exit.
    deadline = time.monotonic() + _EXIT_S
    while time.monotonic() < deadline and is_being_started(run_dir, entry):
        time.sleep(0.05)
    with queue_lock(run_dir.home):
        if read_entry(run_dir) != entry or is_being_started(run_dir, entry):
            return
        reason = str(error).splitlines()[0]
        write_entry(run_dir, replace(entry, starting=None, ended=FAILED, reason=reason))


def is_being_started(run_dir: RunDir, entry: QueueEntry) -> bool:
    """Return True if a supervisor starts a marked run, or has started it."""
    return (
        was_started(run_dir, entry)
        or lock_holder(run_dir.lock_path) is not None
        or any_process_has("ltui.training.supervise.main", str(run_dir.path))
    )


def retry(run_dir: RunDir) -> None:
    """Let an entry wait again that failed or was taken out, or that another machine has."""

    def again(entry: QueueEntry) -> QueueEntry:
        here = os.uname().nodename
        return replace(entry, ended=None, starting=None, reason=None, held=False, host=here)

    change_entry(run_dir, again)
    wake_dispatcher(run_dir.home)


def read_facts(
    home: Path,
    entries: Mapping[str, QueueEntry],
    *,
    slots: int,
    passing: bool,
    recovers: bool = False,
) -> QueueFacts:
    """Return what the decision about these entries needs.

    With ``recovers``, runs whose processes died are recovered, and no live run is asked how long it
    still takes: the decision itself does not depend on that.
    """
    others = {split_dependency(text)[0] for entry in entries.values() for text in entry.after}
    return QueueFacts(
        entries=entries,
        live=tuple(_live_runs(home, recovers=recovers)),
        others={run: _state(RunDir(home / "runs" / run)) for run in others},
        host=os.uname().nodename,
        now=time.time(),
        slots=slots,
        passing=passing,
    )


def _state(run_dir: RunDir) -> str:
    if not run_dir.spec_path.exists():
        return GONE
    try:
        return str(resolve_snapshot(run_dir).state.value)
    except ProblemError:
        return RunState.LOST.value


def _live_runs(home: Path, *, recovers: bool) -> Iterable[UsedSlots]:
    """Yield the runs of this machine that have a supervisor or a shim, and are not in the queue."""
    for path in sorted(paths_in(home / "runs")):
        run_dir = RunDir(path)
        # A run that cannot be read must not keep the others. A supervisor that ended regularly has
        # emptied its lock.
        with suppress(OSError, ProblemError):
            if path.name.startswith(".") or not os.stat(run_dir.lock_path).st_size:
                continue
            live = lock_holder(run_dir.lock_path) is not None or has_live_shim(run_dir)
            if not live and recovers and recover_run(run_dir):
                live = lock_holder(run_dir.lock_path) is not None
            # While it is being started, its entry counts.
            if live and not run_dir.queued_path.exists():
                yield _used_slots(run_dir, asks=not recovers)


def _used_slots(run_dir: RunDir, *, asks: bool) -> UsedSlots:
    spec = run_dir.read_spec()
    snapshot = ControlClient(run_dir).status(timeout_s=0.5) if asks else None
    return UsedSlots(
        run=run_dir.id,
        slots=0 if spec.gpus is not None else spec.slots,
        # This file is removed when the GPUs are chosen and the shim is started.
        waits_for_gpus=spec.gpus is not None and run_dir.environment_path.exists(),
        left_s=None if snapshot is None else snapshot.eta_s,
    )
