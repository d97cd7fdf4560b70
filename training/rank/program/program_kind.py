"""What kind of program this is, and what it trains, read from its live objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import torch

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

    @property
    def is_sharded(self) -> bool:
        """True if each rank has only a part of the model."""
        return self.wrapper in ("FSDP", "DeepSpeed")

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
