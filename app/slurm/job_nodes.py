"""The nodes of a job: the first starts the next attempt of the run, the others join it.

SLURM signals every process of a job. The supervisor and the ranks act on the signal themselves. The
process on the first node records that there was one, because the job is then requeued.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from msgspec import Struct
from msgspec.structs import replace

from ltui.app.command_output import EXIT_DONE
from ltui.app.interrupt_signals import ReceivedSignals
from ltui.app.nodes.join_run import follow_agent, join_by_launcher, joined_line
from ltui.app.nodes.node_options import required_place, with_free_ports, with_reachable_address
from ltui.app.nodes.start_head import prepare_next_attempt
from ltui.app.slurm.job_submission import requeued_by_slurm
from ltui.training.config.node_environment import read_node_environment
from ltui.training.config.run_spec import Nodes
from ltui.training.json_codec import to_json
from ltui.training.lifecycle.launch_run import start_first_attempt
from ltui.training.lifecycle.resume_run import resume
from ltui.training.lifecycle.run_processes import latest_attempt
from ltui.training.lifecycle.run_status import recover_run, resolve_here
from ltui.training.lifecycle.supervisor_client import AttemptPlan, ControlClient
from ltui.training.nodes.link_key import KEY_FILE_NAME, KEY_VARIABLE, LinkKey
from ltui.training.problem import ProblemError
from ltui.training.slurm.batch_script import signal_lead_s
from ltui.training.slurm.job_record import (
    JobRecord,
    Life,
    read_record,
    refusal,
    snapshot_path,
    with_unfinished_closed,
    write_head,
    write_lives,
)
from ltui.training.slurm.slurm_client import SlurmError, job_properties, unix_time
from ltui.training.state.run_snapshot import LIVE, RunSnapshot, RunState
from ltui.training.store.database_schema import StoreError
from ltui.training.store.open_history import wait_for_last_copy
from ltui.training.store.run_checkpoints import furthest_checkpoint
from ltui.training.store.run_directory import RunDir, write_json
from ltui.training.tensor_queue.control_block import STOP_SIGNALS

POLL_S = 0.25
"""Seconds between two polls of the run's state."""
PUBLISH_S = 5.0
"""Seconds between two snapshots for other machines while the state is unchanged."""
STOP_MARGIN_S = 15.0
"""Seconds between the end of a stop and the time limit, for the end of the job."""
TERMINATED_STOP_S = 20.0
"""Seconds for a stop after SIGTERM. By default SLURM kills the job 30 s after that signal."""


class Warnings(Struct):
    """The signals that this process has received."""

    asked_to_continue: bool = False
    """SLURM announced the time limit or a preemption: the run has to continue later."""
    terminated: bool = False
    """SLURM ends the job."""
    stopped_by_person: bool = False
    """The run was stopping before SLURM announced anything, so it must not continue."""

    def install(self) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, self._receive)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if number in (signal.SIGUSR1, signal.SIGUSR2):
            self.asked_to_continue = True
        else:
            self.terminated = True

    @property
    def any(self) -> bool:
        return self.asked_to_continue or self.terminated


def run_head(run_dir: RunDir) -> int:
    """Start the next attempt and wait until it has ended. Return the exit code of the process.

    Raises ``ProblemError`` if the attempt cannot be started.
    """
    warnings = Warnings()
    warnings.install()
    life = _open_life(run_dir)
    ends_at = _time_limit()
    if ends_at is not None:
        # The supervisor shows the remaining time.
        os.environ["SLURM_JOB_END_TIME"] = str(int(ends_at))
    hide_slurm_from_lightning()
    write_head(run_dir, life.job_id, ends_at, os.environ.get("SLURM_JOB_NODELIST"))
    try:
        _write_nodes(run_dir)
        _start_attempt(run_dir, life)
        snapshot = _follow(run_dir, warnings, ends_at)
    except BaseException as error:
        note = f"job {life.job_id} ended: {error or type(error).__name__}"
        _close_life(run_dir, outcome="failed", requeue=False, note=note)
        raise
    # A run that is told to stop before it has begun to train ends as failed, and continues, too.
    asked = warnings.asked_to_continue or (warnings.terminated and requeued_by_slurm(life))
    requeue = asked and not warnings.stopped_by_person and snapshot.state is not RunState.FINISHED
    _close_life(run_dir, outcome=snapshot.state.value, requeue=requeue)
    _publish(run_dir, snapshot)
    wait_for_last_copy(run_dir)
    print(f"ltui: {run_dir.id} {snapshot.state.value}: {snapshot.detail or ''}", flush=True)
    return EXIT_DONE


def _open_life(run_dir: RunDir) -> Life:
    """Record the start of this job. Raises ``ProblemError`` if the run must not start again."""
    record = _record(run_dir)
    step = _good_step(run_dir)
    lives = with_unfinished_closed(record.lives, step, time.time())
    if (why := refusal(lives[record.counted_from :])) is not None:
        write_lives(run_dir, record.with_lives(lives, note=f"not started again: {why}"))
        raise ProblemError.of(
            where=run_dir.id,
            what=f"it is not started again: {why}.",
            remedy="Look at its log, then resume it by hand.",
        )
    life = Life(
        job_id=os.environ.get("SLURM_JOB_ID", "0"),
        restart=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
        host=os.environ.get("SLURMD_NODENAME"),
        started_at=time.time(),
        start_step=step or 0,
    )
    write_lives(run_dir, record.with_lives((*lives, life)))
    return life


def _close_life(run_dir: RunDir, *, outcome: str, requeue: bool, note: str | None = None) -> None:
    record = _record(run_dir)
    lives = list(record.lives)
    if lives:
        lives[-1] = replace(
            lives[-1],
            ended_at=time.time(),
            end_step=_good_step(run_dir),
            outcome=outcome,
            requeued=requeue,
        )
        write_lives(run_dir, record.with_lives(lives, note=note or record.note))


def _record_warning(run_dir: RunDir, asked_to_continue: bool) -> None:
    """Record that the run continues after the stop, so that it is never shown as stopped."""
    record = _record(run_dir)
    if record.lives and record.lives[-1].requeued != asked_to_continue:
        last = replace(record.lives[-1], requeued=asked_to_continue)
        lives = (*record.lives[:-1], last)
        write_lives(run_dir, record.with_lives(lives, note=record.note))


def _record(run_dir: RunDir) -> JobRecord:
    record = read_record(run_dir)
    if record is None:
        raise ProblemError.of(where=run_dir.id, what="its record of the job is damaged.")
    return record


def _good_step(run_dir: RunDir) -> int | None:
    """Return the step of the furthest good checkpoint."""
    checkpoint = furthest_checkpoint(run_dir.checkpoints_dir)
    return None if checkpoint is None else checkpoint.global_step


def _start_attempt(run_dir: RunDir, life: Life) -> None:
    """Start the first attempt, or resume from the last good checkpoint if there is one."""
    if latest_attempt(run_dir) is None:
        start_first_attempt(run_dir)
        return
    because = f"SLURM started job {life.job_id} again"
    if furthest_checkpoint(run_dir.checkpoints_dir) is not None:
        resume(run_dir, because=because)
    else:
        recover_run(run_dir)
        start_first_attempt(run_dir, AttemptPlan(restarted_because=because))


def _write_nodes(run_dir: RunDir) -> None:
    """Write the nodes of this start of the job into the specification, and the key of their link.

    Raises ``ProblemError`` if there is no key or a port is taken.
    """
    spec, nodes = run_dir.read_spec(), job_nodes(os.environ)
    if nodes is not None:
        nodes = with_free_ports(with_reachable_address(nodes), fixed=True)
        key = LinkKey.find(None, os.environ)
        prepare_next_attempt(run_dir, {KEY_FILE_NAME: f"{key.text}\n"})
    # The ranks must not inherit it; the supervisor reads the file.
    os.environ.pop(KEY_VARIABLE, None)
    if nodes != spec.nodes:
        run_dir.write_spec(spec.with_changes(nodes=nodes))


def _time_limit() -> float | None:
    """Return the unix time of the job's time limit, or None if it is unknown."""
    text = os.environ.get("SLURM_JOB_END_TIME", "")
    if text.isdecimal():
        return float(text)
    try:
        properties = job_properties(os.environ.get("SLURM_JOB_ID", "0"))
    except SlurmError:
        return None
    return unix_time(properties.get("EndTime", ""))


def _follow(run_dir: RunDir, warnings: Warnings, ends_at: float | None) -> RunSnapshot:
    """Wait until the run has ended, and return its last snapshot.

    Before the time limit and after a signal, the supervisor is asked to stop the run.
    """
    record = _record(run_dir)
    lead_s, began_at = float(record.options.warn_s), time.time()
    published_at, published_state = 0.0, None
    stop_requested, stopping = False, 0
    while True:
        if warnings.any:
            continues = warnings.asked_to_continue and not warnings.stopped_by_person
            _record_warning(run_dir, continues)
        with contextlib.suppress(StoreError):
            snapshot = resolve_here(run_dir)
            if snapshot.state not in LIVE:
                return snapshot
            # Seen twice, because SLURM's signal may reach the supervisor just before this process.
            stopping = stopping + 1 if snapshot.state is RunState.STOPPING else 0
            if stopping >= 2 and not warnings.any:
                warnings.stopped_by_person = True
            now_s = time.time()
            limit_s = None if ends_at is None else ends_at - began_at
            lead_s = max(lead_s, measured_lead_s(snapshot, limit_s))
            if ends_at is not None and now_s >= ends_at - lead_s:
                warnings.asked_to_continue = True
            if warnings.any and not stop_requested:
                stop_requested = _request_stop(run_dir, warnings, ends_at)
            if published_state is not snapshot.state or now_s - published_at >= PUBLISH_S:
                published_at, published_state = now_s, snapshot.state
                _publish(run_dir, snapshot)
        time.sleep(POLL_S)


def measured_lead_s(snapshot: RunSnapshot, limit_s: float | None) -> float:
    """Return the seconds that a stop needs before the time limit; 0 if nothing was measured.

    The checkpoints of earlier starts of the job count too. ``limit_s`` is the length of this one.
    """
    checkpoint_s = max(snapshot.checkpoint_seconds, default=None)
    step_s = max((max(r.recent_step_s) for r in snapshot.ranks if r.recent_step_s), default=None)
    if checkpoint_s is None and step_s is None:
        return 0.0
    return float(signal_lead_s(checkpoint_s, step_s, limit_s))


def _request_stop(run_dir: RunDir, warnings: Warnings, ends_at: float | None) -> bool:
    """Ask the supervisor for a stop with a checkpoint. Return True if it has the request."""
    if warnings.terminated:
        timeout_s = TERMINATED_STOP_S
    else:
        remaining_s = 3600.0 if ends_at is None else ends_at - time.time()
        timeout_s = max(10.0, remaining_s - STOP_MARGIN_S)
    request = {"cmd": "stop", "timeout_s": timeout_s}
    try:
        ControlClient(run_dir).request(request)
    except ProblemError:
        return False  # It is starting or ending; the next round tries again.
    return True


def _publish(run_dir: RunDir, snapshot: RunSnapshot) -> None:
    """Write the snapshot for machines that cannot reach the supervisor."""
    with contextlib.suppress(OSError):
        write_json(snapshot_path(run_dir), to_json(snapshot))


def job_nodes(environ: Mapping[str, str]) -> Nodes | None:
    """Return the nodes of the job step that this process is a task of; None if there is only one.

    Raises ``ProblemError`` if the place of this node among them is unknown.
    """
    environment = read_node_environment(environ)
    if environment.step_count is None or environment.step_count < 2:
        return None
    return required_place(environment.step_count, environment, "--nodes")


def hide_slurm_from_lightning() -> None:
    """Keep Lightning from its own SLURM mode in the ranks that this process starts.

    It would expect one task of SLURM for each rank, and would requeue the job itself.
    """
    os.environ["SLURM_JOB_NAME"] = "interactive"


def run_other_node(nodes: Nodes, home: Path) -> int:
    """Join the run as node ``nodes.rank`` and wait until it has ended. Return the exit code.

    The files of the agent are below ``home``. Raises ``ProblemError`` if this node cannot join.
    """
    signals = ReceivedSignals()

    def stop(_number: int, _frame: FrameType | None) -> None:
        # SLURM may send several signals. Only a person's second Ctrl-C would mean a kill.
        signals.interrupts = 1

    for number in STOP_SIGNALS:
        signal.signal(number, stop)
    hide_slurm_from_lightning()
    joined = join_by_launcher(nodes, None, None, home)
    print(joined_line(joined), flush=True)
    follow_agent(joined, signals)
    # How the run ended is recorded on the first node. Another code would make srun kill that node.
    return EXIT_DONE
