"""The samplers of a DataLoader, and the generators from which the loader and its samplers draw."""

from __future__ import annotations

from typing import Any

import torch

from ltui.training.rank.lightning_internals import wrapped_sampler


def samplers_of(loader: Any) -> tuple[Any, ...]:
    """Return all samplers of the loader; each may be None.

    They are its sampler, its batch sampler, the batch sampler's sampler, and the samplers inside
    the wrappers with which Lightning distributes the first and the third over the ranks. While
    ``DataLoaderPosition`` replaces one of them, the original is returned.
    """
    sampler, batch_sampler = (
        getattr(each, "ltui_original", each)
        for each in (getattr(loader, name, None) for name in ("sampler", "batch_sampler"))
    )
    # accelerate shards the batches of another batch sampler.
    batches = getattr(batch_sampler, "batch_sampler", batch_sampler)
    batched_sampler = getattr(batches, "sampler", None)
    wrapped = wrapped_sampler(sampler), wrapped_sampler(batched_sampler)
    return sampler, batch_sampler, batched_sampler, *wrapped


def innermost_sampler(loader: Any) -> Any:
    """Return the sampler that draws the order of the samples."""
    sampler, batch_sampler, batched_sampler, *wrapped = samplers_of(loader)
    candidates = [s for s in (*wrapped, batched_sampler, batch_sampler) if s is not None]
    return candidates[0] if candidates else sampler


def _generators_of(loader: Any) -> list[torch.Generator]:
    """Return the generators of the loader and its samplers, each once, in a fixed order."""
    values = []
    for owner in (loader, *samplers_of(loader)):
        attributes = getattr(owner, "__dict__", {})
        values += [attributes[name] for name in sorted(attributes)]
    generators = [value for value in values if isinstance(value, torch.Generator)]
    return list({id(generator): generator for generator in generators}.values())


def read_generators(loader: Any) -> list[torch.Tensor]:
    """Return the states of the generators of the loader and its samplers."""
    return [generator.get_state() for generator in _generators_of(loader)]


def restore_generators(loader: Any, states: list[torch.Tensor]) -> None:
    """Set the generators of the loader and its samplers to a value of ``read_generators``."""
    for generator, state in zip(_generators_of(loader), states, strict=False):
        generator.set_state(state)
