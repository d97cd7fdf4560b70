"""A rank's way out: its queue, its pulse, and the records that are not steps.

One channel a process, shared by every Trainer of a script, because a rank has one queue an attempt.
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
from typing import TYPE_CHECKING, Any

import torch

from ltui.training.rank.environment import RankEnvironment
from ltui.training.rank.log_redirect import redirect_rank_log
from ltui.training.tensor_queue.queue_writer import QueueWriter
from ltui.training.tensor_queue.record_types import Outcome, Phase, RecordKind

if TYPE_CHECKING:
    from ltui.training.rank.coordination.coordinator import RankCoordinator

_TEXT_LIMIT = 4000
"""Characters of a message; a record must stay small beside the ring."""


class Channel:
    """The queue of this rank, with the vocabulary of ``docs/protocols.md`` on top."""

    def __init__(self, environment: RankEnvironment, rank: int) -> None:
        self.environment = environment
        self.rank = rank
        self.pid = os.getpid()
        environment.queue_dir.mkdir(parents=True, exist_ok=True)
        path = environment.queue_dir / f"rank-{rank:05d}.queue"
        self.queue = QueueWriter.create(path, capacity_bytes=environment.queue_bytes)
        self.pulse = self.queue.pulse
        self.hello_sent = False
        self.fits = 0
        """How many times fit, validate, test or predict began in this process."""
        self.resumed = False
        """Whether ``LTUI_RESUME_FROM`` has been given to a Trainer."""
        self.coordinator: RankCoordinator | None = None
        self.pulse.set(
            pid=self.pid,
            start_ticks=own_start_ticks(),
            rank=rank,
            local_rank=_integer(os.environ.get("LOCAL_RANK")),
            world_size=_integer(os.environ.get("WORLD_SIZE"), 1),
            restarts=environment.restarts,
            phase=Phase.STARTING,
            outcome=Outcome.RUNNING,
        )

    def label(self, record: RecordKind, **fields: Any) -> None:
        """A record that is all label."""
        self.queue.put(None, record, json.dumps(_finite(fields)).encode())

    def event(self, kind: str, text: str, **fields: Any) -> None:
        fields = {"step": self.pulse.global_step, "epoch": self.pulse.epoch, **fields}
        self.label(RecordKind.EVENT, kind=kind, text=text[:_TEXT_LIMIT], t=time.time(), **fields)

    def hello(self, trainer: Any) -> None:
        """Who this rank is; also tells the pulse what only the Trainer knows."""
        device = trainer.strategy.root_device
        self.pulse.set(local_rank=trainer.local_rank, world_size=trainer.world_size)
        self.label(
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

    def plan(self, trainer: Any) -> None:
        batches = trainer.num_training_batches
        max_epochs = _limit(trainer.max_epochs)
        self.label(
            RecordKind.PLAN,
            max_steps=_planned_steps(trainer, batches, max_epochs),
            max_epochs=max_epochs,
            batches_per_epoch=_limit(batches),
            val_batches=_validation_batches(trainer),
            global_step=trainer.global_step,
            epoch=trainer.current_epoch,
        )

    def close(self) -> None:
        self.queue.flush_staged()
        self.queue.close()


def _planned_steps(trainer: Any, batches: float, max_epochs: int | None) -> int | None:
    """Optimizer steps until the end: the smaller of what steps and epochs allow; None where
    neither does."""
    limits = []
    if (max_steps := _limit(trainer.max_steps)) is not None:
        limits.append(max_steps)
    one_step_a_batch = trainer.lightning_module.automatic_optimization
    if max_epochs is not None and math.isfinite(batches) and one_step_a_batch:
        limits.append(math.ceil(batches / trainer.accumulate_grad_batches) * max_epochs)
    return min(limits, default=None)


def _validation_batches(trainer: Any) -> int | None:
    if not trainer.enable_validation:
        return 0
    batches = trainer.num_val_batches
    return _limit(sum(batches) if isinstance(batches, list) else batches)


def _limit(value: float | None) -> int | None:
    """Lightning says "no limit" as None, -1 or infinity."""
    return None if value is None or value < 0 or not math.isfinite(value) else int(value)


def _device_facts(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"device_name": None, "gpu_uuid": None}
    facts = torch.cuda.get_device_properties(device)
    uuid = getattr(facts, "uuid", None)
    return {"device_name": facts.name, "gpu_uuid": None if uuid is None else f"GPU-{uuid}"}


def lightning_version(trainer: Any) -> str:
    """``2.6.6`` of ``lightning``, or ``2.6.6 (pytorch_lightning)``."""
    package = type(trainer).__mro__[-2].__module__.partition(".")[0]
    for cls in type(trainer).__mro__:
        root = cls.__module__.partition(".")[0]
        if root in ("lightning", "pytorch_lightning"):
            package = root
            break
    version = getattr(sys.modules.get(package), "__version__", "unknown")
    return version if package == "lightning" else f"{version} ({package})"


OLDEST_LIGHTNING = "2.5"
"""As in ``pyproject.toml``."""


def is_too_old(version: str) -> bool:
    """Whether ``version`` (of ``lightning_version``) is below the oldest that ltui supports."""
    found = re.match(r"(\d+)\.(\d+)", version)
    oldest = tuple(int(part) for part in OLDEST_LIGHTNING.split("."))
    return found is not None and (int(found[1]), int(found[2])) < oldest


def own_start_ticks() -> int:
    """``starttime`` of this process, 0 where there is no /proc."""
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def _integer(text: str | None, default: int = 0) -> int:
    return int(text) if text and text.isdigit() else default


def _finite(value: Any) -> Any:
    """``value`` as JSON can hold it: NaN and infinities become null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


_current: Channel | None = None


def open_channel(environment: RankEnvironment, rank: int) -> Channel:
    """The process's channel, made on first use (and anew in a forked child that is itself a
    rank)."""
    global _current
    known = _current
    if known is not None and known.pid == os.getpid():
        if (known.environment, known.rank) == (environment, rank):
            return known
        known.close()
    with contextlib.suppress(OSError):  # the shared log will do
        redirect_rank_log(os.environ, rank)
    _current = Channel(environment, rank)
    return _current
