"""Model FLOP utilisation: the model's arithmetic as a fraction of its GPUs' peak. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ltui.training.gpu.peak_flops import peak_flops


@dataclass(frozen=True, slots=True)
class BatchFlops:
    """Floating point operations of one batch of one rank, forward and backward, counted once."""

    flops: float
    tf32: bool = False
    """True if float32 matrix products may use TF32."""

    @classmethod
    def from_event(cls, fields: Mapping[str, Any]) -> BatchFlops | None:
        """Return the count in an event's fields; None if there is none."""
        flops = fields.get("flops")
        if not isinstance(flops, (int, float)) or not flops > 0:
            return None
        return cls(float(flops), bool(fields.get("tf32")))


def model_flop_utilisation(
    counted: BatchFlops | None,
    batch_s: Mapping[int, float | None],
    hello_labels: Mapping[int, Mapping[str, Any] | None],
) -> float | None:
    """Return the mean model FLOP utilisation of the ranks, 0 to 1.

    Return None if the count, the peak of a device or the duration of a batch is unknown.

    ``batch_s`` is the mean duration of each rank's batches in seconds, ``hello_labels`` are the
    ranks' HELLO labels.
    """
    if counted is None:
        return None
    fractions = []
    for rank, seconds in batch_s.items():
        hello = hello_labels.get(rank) or {}
        name = hello.get("device_name")
        peak = peak_flops(
            name if isinstance(name, str) else None,
            str(hello.get("precision", "")),
            tf32=counted.tf32,
        )
        if peak is None or not seconds:
            return None
        fractions.append(counted.flops / seconds / peak)
    return sum(fractions) / len(fractions) if fractions else None
