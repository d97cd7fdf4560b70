"""Which process is a rank: the first one that trains as it.

Programs that a rank starts (an evaluation, a tokenizer) inherit the variables that name the rank.
So a process claims its rank by a lock on a file beside the rank's queue. The lock is one of
``fcntl.lockf``, which belongs to the process alone and ends with it: neither a forked worker nor a
killed rank keeps it.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
from pathlib import Path

import torch

from ltui.training.rank.channel import Channel, current_channel, open_channel
from ltui.training.shared.rank_environment import RankEnvironment, rank_from_environment
from ltui.training.shared.record_types import Outcome
from ltui.training.tensor_queue.file_layout import PULSE_AT
from ltui.training.tensor_queue.pulse_block import PULSE_BYTES, parse_pulse

_claims: dict[Path, int] = {}
"""Claimed file -> its descriptor, which stays open: closing it would give the lock up."""


def open_own_channel() -> Channel | None:
    """Return the channel of this process if it is a rank, else None.

    A process is no rank if it belongs to no run, is a worker of a DataLoader, or was started by the
    process that is that rank. Raises ``OSError``.
    """
    environment = RankEnvironment.read(os.environ)
    if environment is None or torch.utils.data.get_worker_info() is not None:
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
