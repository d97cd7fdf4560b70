"""What a rank's GPU suffers from, where that explains why the rank is slow or stands still. Pure.

The findings come from ``training/gpu``, as verdicts of their own; here they are tied to the rank
that others wait for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ltui.training.state.run_snapshot import Verdict

_SLOWING = {
    "gpu_thermal": "Check that GPU's cooling, or leave it out.",
    "gpu_power_brake": "Check the machine's power supply, or leave that GPU out.",
    "gpu_slow_clock": "Check that GPU's clocks and power limit (nvidia-smi -q), or leave it out.",
    "gpu_foreign": "Give the run GPUs of its own: trainer.devices=free:N.",
    "gpu_unseen": "Give the run GPUs of its own: trainer.devices=free:N.",
    "gpu_pcie_width": "Check that GPU's slot and riser, or leave it out.",
    "gpu_pcie_generation": "Check that GPU's slot and riser, or leave it out.",
}
"""kind -> remedy, what explains most first."""
_BREAKING = {
    "gpu_xid": "Check that GPU (dmesg, nvidia-smi -q), or leave it out.",
    "gpu_ecc": "Reset or replace that GPU, or leave it out.",
    "gpu_nvlink": "Check that GPU's NVLinks (nvidia-smi nvlink -s), or leave it out.",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuCause:
    """Of the GPU of one rank."""

    text: str
    """``GPU 1: thermal slowdown for 20 s (92 °C)``."""
    remedy: str


def slowing_cause(devices: Sequence[Verdict], rank: int) -> GpuCause | None:
    """What makes the rank's GPU slower than others."""
    return _first(devices, (rank,), _SLOWING)


def breaking_cause(devices: Sequence[Verdict], ranks: Iterable[int]) -> GpuCause | None:
    """What makes the GPU of one of the ranks useless."""
    return _first(devices, ranks, _BREAKING)


def _first(
    devices: Sequence[Verdict], ranks: Iterable[int], kinds: dict[str, str]
) -> GpuCause | None:
    of = set(ranks)
    for kind, remedy in kinds.items():
        for found in devices:
            if found.kind == kind and found.ended is None and of & {*found.culprits}:
                # Of several GPUs at once the cause names them already.
                named = not found.place or found.cause.startswith(found.place)
                text = found.cause if named else f"{found.place}: {found.cause}"
                return GpuCause(text=text, remedy=remedy)
    return None
