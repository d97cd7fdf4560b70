"""Model FLOP utilisation: what a model's own arithmetic takes of what its GPUs could do. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ltui.training.gpu.peak_flops import peak_flops
from ltui.training.state.run_snapshot import RankSnapshot


@dataclass(frozen=True, slots=True)
class BatchFlops:
    """Of one batch of one rank, forward and backward, as counted once."""

    flops: float
    tf32: bool = False
    """float32 matrix products may use TF32."""

    @classmethod
    def from_event(cls, fields: Mapping[str, Any]) -> BatchFlops | None:
        flops = fields.get("flops")
        if not isinstance(flops, (int, float)) or not flops > 0:
            return None
        return cls(float(flops), bool(fields.get("tf32")))


def model_flop_utilisation(
    counted: BatchFlops | None,
    ranks: Iterable[RankSnapshot],
    hello_labels: Mapping[int, Mapping[str, Any] | None],
) -> float | None:
    """Mean over the ranks, 0 to 1; None where the count, a device's peak or the pace is unknown.

    ``hello_and_plan`` are the ranks' HELLO labels.
    """
    if counted is None:
        return None
    shares = []
    for rank in ranks:
        hello = hello_labels.get(rank.rank) or {}
        name = hello.get("device_name")
        peak = peak_flops(
            name if isinstance(name, str) else None,
            str(hello.get("precision", "")),
            tf32=counted.tf32,
        )
        if peak is None or not rank.step_s:
            return None
        shares.append(counted.flops / rank.step_s / peak)
    return sum(shares) / len(shares) if shares else None
