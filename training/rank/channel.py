"""The channel of a rank: its queue, its pulse, and the records that are not steps.

A process has one channel, which all Trainers of a script share, because a rank has one queue for
each attempt.

Read the original exception from one that torch forwards from a DataLoader worker. torch raises it
again in the rank, if possible with the same class. Its text contains the traceback: ``Caught
ValueError in DataLoader worker process 0.``, then ``Original Traceback ...``, and at the end the
original message. This module uses only the standard library.

Give every rank its own log if the user's command does not use ltui itself. All processes of such a
command inherit one ``engine.log``. Once a rank's number is known, its further output goes to
``rank-00003.log`` in the same folder. Output that the command redirected elsewhere stays there.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import re
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ltui.training.rank.source_changes import with_missing_guard
from ltui.training.shared.rank_environment import RankEnvironment, integer_variable
from ltui.training.shared.record_types import Outcome, Phase, RecordKind, StepField
from ltui.training.tensor_queue.queue_writer import QueueWriter
from ltui.training.tensor_queue.ring_writer import Row

if TYPE_CHECKING:
    from ltui.training.rank.coordination.coordinator import RankCoordinator


def redirect_rank_log(environ: Mapping[str, str], rank: int) -> None:
    """Redirect this process's standard output and error to its rank's log. Raises ``OSError``."""
    folder = environ.get("LTUI_LOG_DIR")
    if not folder:
        return
    try:
        shared_log = os.stat(os.path.join(folder, "engine.log"))
    except FileNotFoundError:
        return
    inherited = [fd for fd in (1, 2) if _writes_to(fd, shared_log)]
    if not inherited:
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):  # the stream is closed or None
            stream.flush()
    path = os.path.join(folder, f"rank-{rank:05d}.log")
    rank_log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        for fd in inherited:
            os.dup2(rank_log, fd)
    finally:
        os.close(rank_log)


def _writes_to(fd: int, file: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), file)
    except OSError:
        return False


_CAUGHT = re.compile(
    r"Caught (?P<kind>\w+) (?P<where>in [^\n]+)\.\nOriginal (?P<traceback>.*)", re.S
)
_TRACEBACK_START = "Traceback (most recent call last):\n"


def unwrap_worker_exception(kind: str, message: str) -> tuple[str, str]:
    """Return class name and message of the exception that a DataLoader worker raised.

    The message also says where it was raised. For any other exception return the arguments.
    """
    caught = _CAUGHT.search(message)
    if caught is None:
        return kind, message
    # With chained exceptions, the last one was raised.
    lines = caught["traceback"].rpartition(_TRACEBACK_START)[2].splitlines()
    message_lines = [line for line in lines if line and not line.startswith("  ")]
    if not message_lines:
        return caught["kind"], f"no message ({caught['where']})"
    first_line = message_lines[0]
    first_line = first_line.partition(": ")[2] if ": " in first_line else ""
    text = "\n".join([first_line, *message_lines[1:]])
    return caught["kind"], f"{text} ({caught['where']})".strip()


def dead_worker_text(exception: BaseException) -> str | None:
    """Return that a DataLoader worker has died if that is what ``exception`` comes from.

    A rank that takes a batch from a worker that was just killed may find the connection closed
    before torch knows of the death, of which the exception then says nothing.
    """
    traces = traceback.walk_tb(exception.__traceback__)
    frames = [f for f, _ in traces if f.f_code.co_name == "_try_get_data"]
    if not frames or not isinstance(exception, (OSError, EOFError)):
        return None
    workers = getattr(frames[-1].f_locals.get("self"), "_workers", ())
    deadline_s = time.monotonic() + _WORKER_DEATH_S
    while not (dead := [str(worker.pid) for worker in workers if not worker.is_alive()]):
        if time.monotonic() > deadline_s:
            return None
        time.sleep(0.02)
    return f"{_DEAD_WORKER} (pid(s) {', '.join(dead)}) exited unexpectedly"


def report_exception(send: Callable[[BaseException], None], exception: BaseException) -> None:
    """Call ``send`` with the exception that ends this rank. Raise nothing.

    torch's handler of SIGCHLD raises wherever the rank is when a DataLoader worker has died, so in
    here too. What it raises is then the reason.
    """
    try:
        send(exception)
    except Exception as second:  # noqa: BLE001 - a second error must not hide the first
        with contextlib.suppress(Exception):
            send(second if str(second).startswith(_DEAD_WORKER) else exception)


_DEAD_WORKER = "DataLoader worker"
_WORKER_DEATH_S = 1.0
"""Seconds within which the death of a worker becomes known once its connection is closed."""
_TEXT_LIMIT = 4000
"""Characters of a message: a record must be small compared with the ring."""
_TRACEBACK_LIMIT = 16000
"""Characters of an exception's traceback that are sent; its end is kept."""


class Channel:
    """Writes the records of ``docs/protocols.md`` to the queue of this rank."""

    def __init__(self, environment: RankEnvironment, rank: int, *, has_pulse: bool = True) -> None:
        """``has_pulse``: False in a process that logs values and is no rank."""
        self._has_pulse = has_pulse
        self.environment = environment
        self.rank = rank
        self.pid = os.getpid()
        environment.queue_dir.mkdir(parents=True, exist_ok=True)
        path = environment.queue_dir / f"rank-{rank:05d}.queue"
        self.queue = QueueWriter.create(path, capacity_bytes=environment.queue_bytes)
        self.pulse = self.queue.pulse
        self.hello_sent = False
        self.steps_before = 0
        """Steps of an earlier training in this attempt, by another process that was this rank."""
        self.fit_count = 0
        """How many times fit, validate, test or predict began in this process."""
        self.resumed = False
        """True if a Trainer has resumed from ``LTUI_RESUME_FROM``."""
        self.coordinator: RankCoordinator | None = None
        if not has_pulse:
            self.pulse.epoch = -1  # unknown
            return
        self.pulse.set(
            pid=self.pid,
            start_ticks=own_start_ticks(),
            rank=rank,
            local_rank=integer_variable(os.environ, "LOCAL_RANK"),
            world_size=integer_variable(os.environ, "WORLD_SIZE", 1),
            restarts=environment.restarts,
            phase=Phase.STARTING,
            outcome=Outcome.RUNNING,
        )

    def send_record(self, record: RecordKind, **fields: Any) -> None:
        """Send a record without a tensor. Its label is a JSON object of ``fields``."""
        self.queue.put(None, record, json.dumps(_replace_nonfinite(fields)).encode())

    def event(self, kind: str, text: str, **fields: Any) -> None:
        """Send an event with the present step and epoch."""
        epoch = self.pulse.epoch if self.pulse.epoch >= 0 else None
        fields = {"step": self.pulse.global_step, "epoch": epoch, **fields}
        self.send_record(
            RecordKind.EVENT, kind=kind, text=text[:_TEXT_LIMIT], t=time.time(), **fields
        )

    def event_from_rank_0(self, kind: str, text: str, **fields: Any) -> None:
        """Send an event about what all ranks do. The other ranks do not repeat it."""
        if self.rank == 0:
            self.event(kind, text, **fields)

    def step_row(self) -> Row:
        """Return the row of a STEP record, whose fields are not known yet."""
        row = self.queue.row(RecordKind.STEP, len(StepField))
        for field in StepField:
            row.fields[field] = math.nan
        return row

    def warn_from_rank_0(self, text: str, remedy: str, **fields: Any) -> None:
        """Send a warning about all ranks, and what to do about it."""
        self.event_from_rank_0("warning", text, remedy=remedy, **fields)

    def send_hello(
        self, device: torch.device, local_rank: int, world_size: int, **facts: Any
    ) -> None:
        """Send who this rank is, with ``facts`` about its program, and complete the pulse."""
        if self._has_pulse:
            self.pulse.set(local_rank=local_rank, world_size=world_size)
        self.send_record(
            RecordKind.HELLO,
            rank=self.rank,
            local_rank=local_rank,
            world_size=world_size,
            pid=self.pid,
            start_ticks=own_start_ticks(),
            host=socket.gethostname(),
            device=str(device),
            **_device_facts(device),
            python=platform.python_version(),
            torch=torch.__version__,
            script=sys.argv[0] if sys.argv else "",
            **facts,
        )
        self.hello_sent = True

    def send_exception(self, exception: BaseException) -> None:
        """Send the exception that ends this rank, with its traceback."""
        lines = traceback.format_exception(type(exception), exception, exception.__traceback__)
        name, message = unwrap_worker_exception(type(exception).__name__, str(exception))
        if (text := dead_worker_text(exception)) is not None:
            name, message = "RuntimeError", text
        message = with_missing_guard(message[:_TEXT_LIMIT])
        self.event(
            "exception",
            f"{name}: {message}",
            type=name,
            message=message,
            traceback="".join(lines)[-_TRACEBACK_LIMIT:],
            torch_dir=f"{os.path.dirname(torch.__file__)}{os.sep}",
        )
        self.pulse.set(phase=Phase.EXCEPTION, outcome=Outcome.RAISED)

    def telemetry_off(self, error: BaseException) -> None:
        """Report that telemetry failed, as far as that is still possible."""
        with contextlib.suppress(Exception):  # there is no other way to report it
            self.pulse.set(telemetry_ok=False)
            reason = f"{type(error).__name__}: {error}"
            text = f"Telemetry switched itself off ({reason})."
            self.event("telemetry_off", text, error=reason)

    def ended(self) -> None:
        """Publish what is staged, and that the process exits after its training has ended."""
        if self.pid == os.getpid() and self.pulse.outcome in (Outcome.FINISHED, Outcome.STOPPED):
            self.queue.flush_staged()
            self.pulse.set(phase=Phase.ENDED)

    def close(self) -> None:
        """Publish staged records and close the queue."""
        self.queue.flush_staged()
        self.queue.close()


def _device_facts(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"device_name": None, "gpu_uuid": None}
    facts = torch.cuda.get_device_properties(device)
    uuid = getattr(facts, "uuid", None)
    return {"device_name": facts.name, "gpu_uuid": None if uuid is None else f"GPU-{uuid}"}


def own_start_ticks() -> int:
    """Return the start time of this process in clock ticks since boot; 0 without /proc."""
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def _replace_nonfinite(value: Any) -> Any:
    """Replace NaN and infinity by None, because JSON does not have them."""
    if isinstance(value, dict):
        return {key: _replace_nonfinite(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


_current: Channel | None = None


def current_channel() -> Channel | None:
    """Return the channel of this process, or None if it has opened none."""
    return _current if _current is not None and _current.pid == os.getpid() else None


def open_channel(environment: RankEnvironment, rank: int) -> Channel:
    """Return the channel of this process. Open it on first use.

    A forked child that is itself a rank opens its own.
    """
    global _current
    existing = current_channel()
    if existing is not None:
        if (existing.environment, existing.rank) == (environment, rank):
            return existing
        existing.close()
    with contextlib.suppress(OSError):  # then the shared log is used
        redirect_rank_log(os.environ, rank)
    _current = Channel(environment, rank)
    return _current
