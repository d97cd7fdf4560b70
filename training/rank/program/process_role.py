"""What this process of a program is: a rank, or one that only logs. And what kind of program it is.

Programs that a rank starts (an evaluation, a tokenizer) inherit the variables that name the rank.
So the first process that trains as a rank claims it, by a lock on a file beside the rank's queue.
The lock is one of ``fcntl.lockf``, which belongs to the process alone and ends with it: neither a
forked worker nor a killed rank keeps it.

A process without an optimizer of torch has no steps that ltui sees. It is no rank: it has no pulse,
and nobody waits for it. It only sends what it logs, through the queue of its rank, and only if
there is none yet. A process that makes a step later replaces that file by its own.
"""

from __future__ import annotations

import fcntl
import gc
import multiprocessing
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch

from ltui.training.rank.channel import Channel, current_channel, open_channel
from ltui.training.rank.metric_records import MetricSender
from ltui.training.rank.program import printed_values
from ltui.training.rank.program.logged_values import Send, Values, logged_values, send_through
from ltui.training.rank.program.program_hooks import KERAS
from ltui.training.shared.rank_environment import RankEnvironment, rank_from_environment
from ltui.training.shared.record_types import Outcome
from ltui.training.tensor_queue.pulse_block import PULSE_BYTES, parse_pulse
from ltui.training.tensor_queue.queue_file import PULSE_AT

_claims: dict[Path, int] = {}
"""Claimed file -> its descriptor, which stays open: closing it would give the lock up."""


def open_own_channel() -> Channel | None:
    """Return the channel of this process if it is a rank, else None.

    A process is no rank if it belongs to no run, is a worker of a DataLoader, or was started by the
    process that is that rank. Raises ``OSError``.
    """
    environment = _read_environment()
    if environment is None:
        return None
    if (channel := current_channel()) is not None:
        return channel
    rank, world_size = read_place()
    if not claim_rank(environment.queue_dir, rank):
        return None
    steps = _steps_before(environment, rank, world_size)
    channel = open_channel(environment, rank)
    channel.steps_before = steps
    return channel


def _read_environment() -> RankEnvironment | None:
    """Return what the run says; None outside of a run and in a worker of a DataLoader."""
    in_worker = torch.utils.data.get_worker_info() is not None
    return None if in_worker else RankEnvironment.read(os.environ)


def _steps_before(environment: RankEnvironment, rank: int, world_size: int) -> int:
    """Return the steps of an earlier training of this attempt, such as another line of a script.

    Of several ranks it must have finished: only then all of them have made the same steps. Workers
    that torch elastic restarts repeat the same training.
    """
    try:
        with (environment.queue_dir / f"rank-{rank:05d}.queue").open("rb") as file:
            pulse = parse_pulse(os.pread(file.fileno(), PULSE_BYTES, PULSE_AT))
    except (OSError, ValueError):
        return 0
    if pulse is None or pulse.restarts != environment.restarts:
        return 0
    return pulse.global_step if world_size == 1 or pulse.outcome is Outcome.FINISHED else 0


def is_place_known() -> bool:
    """Return False in a process that a program has started as a rank and that is none yet."""
    distributed = torch.distributed
    return (
        multiprocessing.parent_process() is None
        or rank_from_environment(os.environ) is not None
        or (distributed.is_available() and distributed.is_initialized())
    )


def read_place() -> tuple[int, int]:
    """Return this process's rank and the number of ranks."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    rank = rank_from_environment(os.environ)
    return (0, 1) if rank is None else (rank, int(os.environ["WORLD_SIZE"]))


def claim_rank(queue_dir: Path, rank: int) -> bool:
    """Return False if another live process is this rank. Raises ``OSError``."""
    queue_dir.mkdir(parents=True, exist_ok=True)
    path = queue_dir / f"rank-{rank:05d}.claim"
    if path in _claims:
        return True
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return False
    _claims[path] = file
    return True


_FRAMEWORKS = (
    ("transformers.trainer.Trainer", "Hugging Face Trainer"),
    ("lightning.fabric.fabric.Fabric", "Lightning Fabric"),
    ("lightning_fabric.fabric.Fabric", "Lightning Fabric"),
    ("accelerate.accelerator.Accelerator", "accelerate"),
)
_WRAPPERS = (
    ("torch.nn.parallel.distributed.DistributedDataParallel", "DDP"),
    ("torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel", "FSDP"),
    ("torch.distributed.fsdp.FSDPModule", "FSDP"),
    ("torch.distributed.fsdp._fully_shard._fully_shard.FSDPModule", "FSDP"),
    ("deepspeed.runtime.engine.DeepSpeedEngine", "DeepSpeed"),
)
"""Classes that combine the gradients of all ranks before each step."""


@dataclass(frozen=True, slots=True)
class ProgramKind:
    """The framework of a program, and how it combines gradients."""

    framework: str
    wrapper: str | None
    """``DDP``, ``FSDP``, ``DeepSpeed``; None if nothing of the kind was found."""

    def describe(self) -> str:
        """Return ``PyTorch DDP``."""
        return self.framework if self.wrapper is None else f"{self.framework} {self.wrapper}"


def read_program_kind() -> ProgramKind:
    """Return the kind of this program.

    Looks at every object that the garbage collector tracks, which takes some tens of milliseconds.
    """
    # Only their types are read: an attribute of an unknown object may have effects.
    types = {type(each) for each in gc.get_objects()}
    names = {f"{base.__module__}.{base.__qualname__}" for each in types for base in each.__mro__}
    framework = next((word for name, word in _FRAMEWORKS if name in names), "PyTorch")
    return ProgramKind(framework, next((word for name, word in _WRAPPERS if name in names), None))


def trained_parameter(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Return the first parameter that ``optimizer`` trains. Its first groups may be empty."""
    parameters: Iterator[torch.Tensor] = chain.from_iterable(
        group["params"] for group in optimizer.param_groups
    )
    return next(each for each in parameters if each.requires_grad)


def find_module_of(parameter: torch.Tensor) -> torch.nn.Module | None:
    """Return the module that holds ``parameter``, if there is one.

    Looks at every object, as ``read_program_kind`` does.
    """
    for each in gc.get_objects():
        if issubclass(type(each), torch.nn.Module):
            own = vars(each).get("_parameters") or {}
            if any(its is parameter for its in own.values()):
                return each  # type: ignore[no-any-return]
    return None


_channel: Channel | None = None


def open_stepless() -> Send | None:
    """Return a function that sends values, unless a rank has a queue, which is left alone."""
    channel = _open()
    if channel is None:
        return None

    sender = MetricSender(channel)
    send_unflushed = send_through(channel, sender)

    def send(values: Values, step: int, t: float) -> None:
        send_unflushed(values, step, t)
        sender.flush()
        report_missing_values(channel)

    return send


def send_at_exit() -> None:
    """Send what waits, what was dropped, and why a pattern found nothing.

    Not if this process is a rank, which does that itself.
    """
    if current_channel() is not None:
        return
    logged_values.begin_stepless()
    logged_values.send_waiting()
    printed = printed_values.printed
    complains = printed is not None and printed.lines_read > 0 and printed.complaint() is not None
    if (complains or logged_values.dropped) and (channel := _open()) is not None:
        report_missing_values(channel, at_end=True)


def report_missing_values(channel: Channel, *, at_end: bool = False) -> None:
    """Send what is missing of the values, and at the end why the pattern found nothing."""
    logged_values.report_dropped(channel, at_end=at_end)
    if (printed := printed_values.printed) is None:
        return
    if (note := printed.skipped_note()) is not None:
        channel.event_from_rank_0("note", note)
    if at_end and (text := printed.complaint()) is not None:
        channel.warn_from_rank_0(text, "Try it on a line of the log.")


def _open() -> Channel | None:
    """Return the channel of this process, which is opened once; None if it must not have one."""
    global _channel
    environment = _read_environment()
    if environment is None or current_channel() is not None:
        return None
    if _channel is not None and _channel.pid == os.getpid():
        return _channel
    rank, world_size = read_place()
    own = environment.queue_dir / f"rank-{rank:05d}.queue"
    others = environment.queue_dir.glob("rank-*.queue")
    # Without a launcher that names it, this process may have started the ranks that have queues.
    if own.exists() or (rank_from_environment(os.environ) is None and any(others)):
        return None
    channel = _channel = Channel(environment, rank, has_pulse=False)
    uses_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    device = torch.device("cuda" if uses_gpu else "cpu")
    kind = "Keras" if KERAS in sys.modules else "PyTorch without torch.optim"
    channel.send_hello(device, rank, world_size, program=kind, saves=False)
    return channel
