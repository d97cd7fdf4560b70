"""GPU problems that explain why a rank is slow or makes no progress. Pure.

The findings come from ``training/gpu`` as verdicts of their own. This module connects them with the
rank that the other ranks wait for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

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
"""kind -> remedy of GPU problems that slow a rank down, the most likely cause first."""
_BREAKING = {
    "gpu_xid": "Check that GPU (dmesg, nvidia-smi -q), or leave it out.",
    "gpu_ecc": "Reset or replace that GPU, or leave it out.",
    "gpu_nvlink": "Check that GPU's NVLinks (nvidia-smi nvlink -s), or leave it out.",
}
"""kind -> remedy of GPU problems that stop a rank, the most likely cause first."""


class GpuCause(Struct, frozen=True, kw_only=True):
    """A problem with the GPU of a rank."""

    text: str
    """The verdict's cause with the GPU: ``GPU 1: thermal slowdown for 20 s (92 °C)``."""
    remedy: str


def slowing_cause(gpu_verdicts: Sequence[Verdict], rank: int) -> GpuCause | None:
    """Return what makes the rank's GPU slower than others, or None."""
    return _first_cause(gpu_verdicts, (rank,), _SLOWING)


def breaking_cause(gpu_verdicts: Sequence[Verdict], ranks: Iterable[int]) -> GpuCause | None:
    """Return what makes the GPU of one of the ranks unusable, or None."""
    return _first_cause(gpu_verdicts, ranks, _BREAKING)


def _first_cause(
    gpu_verdicts: Sequence[Verdict], ranks: Iterable[int], remedies: dict[str, str]
) -> GpuCause | None:
    affected = set(ranks)
    for kind, remedy in remedies.items():
        for verdict in gpu_verdicts:
            if verdict.kind == kind and verdict.ended is None and affected & {*verdict.culprits}:
                return GpuCause(text=verdict.cause, remedy=remedy)
    return None
