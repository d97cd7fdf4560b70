"""What came out of steps that were executed again: the first difference, the first NaN. Pure."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from typing import Any

from msgspec import Struct

from ltui.training.json_codec import from_json

Losses = Mapping[tuple[str, int], Mapping[int, tuple[float, ...]]]
"""Name and rank -> step -> the values that were logged in the step, in their order."""
Events = Iterable[tuple[int | None, Mapping[str, Any]]]
"""Rank and data of events that instruments have sent."""
STEP_LOSS = "step/loss"
"""The loss of each step, as ltui measures it itself, which is NaN where it cannot."""
PLACES = {"before the step": 0, "forward": 1, "backward": 2, "after the step": 3}
"""Where in a step a NaN is, and the order in which they come."""


class Difference(Struct, frozen=True, kw_only=True):
    """The first value that is not what it was."""

    step: int
    rank: int
    metric: str
    before: float | None
    """The value in the history; None if the step logged fewer values then."""
    again: float | None


class LossComparison(Struct, frozen=True, kw_only=True):
    """The losses of the history beside those of the same steps, executed again."""

    steps: int
    """Number of steps of which a loss was compared."""
    missing_steps: int
    """Number of steps that have no loss this time."""
    different_steps: int = 0
    largest: float = 0.0
    """The largest difference of two values, as a share of the value in the history."""
    first: Difference | None = None

    @property
    def is_whole(self) -> bool:
        """Return whether each step that has a loss in the history was compared."""
        return self.steps > 0 and not self.missing_steps


def compare_losses(before: Losses, again: Losses) -> LossComparison:
    """Return where the values differ, bit for bit. Two NaN are equal."""
    compared, expected = set[int](), set[int]()
    differences: list[Difference] = []
    for (metric, rank), series in before.items():
        others = again.get((metric, rank), {})
        if metric != STEP_LOSS:
            expected |= series.keys()
        for step in series.keys() & others.keys():
            old, new = series[step], others[step]
            if metric == STEP_LOSS and all(map(math.isnan, (*old, *new))):
                continue
            compared.add(step)
            differences += [
                Difference(step=step, rank=rank, metric=metric, before=a, again=b)
                for a, b in zip_longest(old, new)
                if _bits(a) != _bits(b)
            ]
    return LossComparison(
        steps=len(compared),
        missing_steps=len(expected - compared),
        different_steps=len({each.step for each in differences}),
        largest=max(map(_share, differences), default=0.0),
        first=min(differences, key=lambda d: (d.step, d.rank, d.metric), default=None),
    )


def _bits(value: float | None) -> bytes:
    if value is None:
        return b""
    return b"NaN" if math.isnan(value) else struct.pack("<d", value)


def _share(difference: Difference) -> float:
    before, again = difference.before, difference.again
    if before is None or again is None or not math.isfinite(before) or not math.isfinite(again):
        return math.inf
    return abs(again - before) / abs(before) if before else math.inf


class FirstNan(Struct, frozen=True, kw_only=True):
    """Where a rank had its first NaN."""

    at_step: int
    rank: int
    where: str
    """A key of ``PLACES``."""
    tensor: str
    """``output 0``, ``input 0``, ``gradient of weight``, ``weight``, ``loss``."""
    module: str | None = None
    """Its name within the model; None for a loss that no module has computed."""
    module_class: str | None = None
    count: int = 0
    """Number of elements that are NaN."""
    of: int = 0
    infinite_before: str | None = None
    """Where an infinite value was seen before."""

    def text(self) -> str:
        """Return a sentence that names module, rank and tensor."""
        kind = f" ({self.module_class})" if self.module_class not in (None, self.module) else ""
        owner = f" of {self.module}{kind}" if self.module else ""
        where = f"in the {self.where} pass" if self.where.endswith("ward") else self.where
        place = f"Step {self.at_step}, rank {self.rank}, {where}"
        text = f"{place}: {self.tensor}{owner} is NaN ({self.count} of {self.of} elements)."
        if self.infinite_before:
            text += f" The first infinite value was in {self.infinite_before}."
        return text


def first_nans(events: Events) -> tuple[FirstNan, ...]:
    """Return the first NaN of each rank, the earliest first.

    The gradients of a rank are checked before they are combined with those of others, so that the
    rank in which a NaN begins comes first.
    """
    found = [from_json(FirstNan, {**data, "rank": rank}, tolerant=True) for rank, data in events]
    return tuple(sorted(found, key=lambda nan: (nan.at_step, PLACES.get(nan.where, 9), nan.rank)))


class OperatorShare(Struct, frozen=True, kw_only=True):
    """What an operator of torch took by itself, without those that it calls."""

    name: str
    calls: int
    amount: float
    """Seconds of computation, or bytes that it allocated."""


class RankProfile(Struct, frozen=True, kw_only=True):
    """The profile of one rank."""

    rank: int
    path: str | None = None
    """The trace, for Perfetto; None if it was too large to be kept."""
    device: bool = False
    """True if the figures are those of the GPU."""
    peak_bytes: float = 0.0
    """Most memory in a step: of tensors on the GPU, or of the process."""
    operators: tuple[OperatorShare, ...] = ()
    """The largest ones first."""


def rank_profiles(events: Events) -> tuple[RankProfile, ...]:
    """Return the profile of each rank."""
    read = (from_json(RankProfile, {**data, "rank": rank}, tolerant=True) for rank, data in events)
    return tuple(sorted(read, key=lambda profile: profile.rank))
