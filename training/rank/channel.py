"""The channel of a rank: its queue, its pulse, and the records that are not steps.

A process has one channel, which all Trainers of a script share, because a rank has one queue for
each attempt.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

import torch

from ltui.training.rank.environment import RankEnvironment
from ltui.training.rank.lightning_version import lightning_version
from ltui.training.rank.log_redirect import redirect_rank_log
from ltui.training.tensor_queue.queue_writer import QueueWriter
from ltui.training.tensor_queue.record_types import Outcome, Phase, RecordKind

if TYPE_CHECKING:
    from ltui.training.rank.coordination.coordinator import RankCoordinator

_TEXT_LIMIT = 4000
"""Characters of a message: a record must be small compared with the ring."""


class Channel:
    """Writes the records of ``docs/protocols.md`` to the queue of this rank."""

    def __init__(self, environment: RankEnvironment, rank: int) -> None:
        self.environment = environment
        self.rank = rank
        self.pid = os.getpid()
        environment.queue_dir.mkdir(parents=True, exist_ok=True)
        path = environment.queue_dir / f"rank-{rank:05d}.queue"
        self.queue = QueueWriter.create(path, capacity_bytes=environment.queue_bytes)
        self.pulse = self.queue.pulse
        self.hello_sent = False
        self.fit_count = 0
        """How many times fit, validate, test or predict began in this process."""
        self.resumed = False
        """True if a Trainer has resumed from ``LTUI_RESUME_FROM``."""
        self.coordinator: RankCoordinator | None = None
        self.pulse.set(
            pid=self.pid,
            start_ticks=own_start_ticks(),
            rank=rank,
            local_rank=_parse_integer(os.environ.get("LOCAL_RANK")),
            world_size=_parse_integer(os.environ.get("WORLD_SIZE"), 1),
            restarts=environment.restarts,
            phase=Phase.STARTING,
            outcome=Outcome.RUNNING,
        )

    def send_record(self, record: RecordKind, **fields: Any) -> None:
        """Send a record without a tensor. Its label is a JSON object of ``fields``."""
        self.queue.put(None, record, json.dumps(_replace_nonfinite(fields)).encode())

    def event(self, kind: str, text: str, **fields: Any) -> None:
        """Send an event with the present step and epoch."""
        fields = {"step": self.pulse.global_step, "epoch": self.pulse.epoch, **fields}
        self.send_record(
            RecordKind.EVENT, kind=kind, text=text[:_TEXT_LIMIT], t=time.time(), **fields
        )

    def event_from_rank_0(self, kind: str, text: str, **fields: Any) -> None:
        """Send an event about what all ranks do. The other ranks do not repeat it."""
        if self.rank == 0:
            self.event(kind, text, **fields)

    def send_hello(self, trainer: Any) -> None:
        """Send who this rank is, and write to the pulse what only the Trainer knows."""
        device = trainer.strategy.root_device
        self.pulse.set(local_rank=trainer.local_rank, world_size=trainer.world_size)
        self.send_record(
            RecordKind.HELLO,
            rank=self.rank,
            local_rank=trainer.local_rank,
            world_size=trainer.world_size,
            pid=self.pid,
            start_ticks=own_start_ticks(),
            host=socket.gethostname(),
            device=str(device),
            **_device_facts(device),
            python=platform.python_version(),
            torch=torch.__version__,
            lightning=lightning_version(trainer),
            strategy=type(trainer.strategy).__name__,
            precision=str(trainer.precision),
            accumulate_grad_batches=trainer.accumulate_grad_batches,
            script=sys.argv[0] if sys.argv else "",
        )
        self.hello_sent = True

    def send_plan(self, trainer: Any) -> None:
        """Send how many steps, epochs and batches the training will have."""
        batches = trainer.num_training_batches
        max_epochs = _limit(trainer.max_epochs)
        self.send_record(
            RecordKind.PLAN,
            max_steps=_planned_steps(trainer, batches, max_epochs),
            max_epochs=max_epochs,
            batches_per_epoch=_limit(batches),
            val_batches=_validation_batches(trainer),
            global_step=trainer.global_step,
            epoch=trainer.current_epoch,
        )

    def close(self) -> None:
        """Publish staged records and close the queue."""
        self.queue.flush_staged()
        self.queue.close()


def _planned_steps(trainer: Any, batches: float, max_epochs: int | None) -> int | None:
    """Return the optimizer steps until the end of training; None if there is no limit.

    The result is the smaller of the limits by steps and by epochs.
    """
    limits = []
    if (max_steps := _limit(trainer.max_steps)) is not None:
        limits.append(max_steps)
    automatic = trainer.lightning_module.automatic_optimization
    if max_epochs is not None and math.isfinite(batches) and automatic:
        limits.append(math.ceil(batches / trainer.accumulate_grad_batches) * max_epochs)
    return min(limits, default=None)


def _validation_batches(trainer: Any) -> int | None:
    if not trainer.enable_validation:
        return 0
    batches = trainer.num_val_batches
    return _limit(sum(batches) if isinstance(batches, list) else batches)


def _limit(value: float | None) -> int | None:
    """Return a limit, or None for Lightning's values without a limit: None, -1 and infinity."""
    return None if value is None or value < 0 or not math.isfinite(value) else int(value)


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


def _parse_integer(text: str | None, default: int = 0) -> int:
    return int(text) if text and text.isdigit() else default


def _replace_nonfinite(value: Any) -> Any:
    """Replace NaN and infinity by None, because JSON does not have them."""
    if isinstance(value, dict):
        return {key: _replace_nonfinite(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


_current: Channel | None = None


def open_channel(environment: RankEnvironment, rank: int) -> Channel:
    """Return the channel of this process. Open it on first use.

    A forked child that is itself a rank opens its own.
    """
    global _current
    existing = _current
    if existing is not None and existing.pid == os.getpid():
        if (existing.environment, existing.rank) == (environment, rank):
            return existing
        existing.close()
    with contextlib.suppress(OSError):  # then the shared log is used
        redirect_rank_log(os.environ, rank)
    _current = Channel(environment, rank)
    return _current
