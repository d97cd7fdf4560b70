"""Model FLOP utilisation: the model's arithmetic as a fraction of its GPUs' peak. Pure.

Peak floating point rates of GPUs, for model FLOP utilisation. The rates are dense (no structured
sparsity) at boost clock, in 10^12 floating point operations per second, from the NVIDIA data sheets
and architecture white papers that are named below. Half precision means tensor cores with float32
accumulation, as used in training. GeForce boards do that at half the rate of their headline figure.
``float32`` is the rate without TF32. ``tf32`` is the rate of float32 matrix products if TF32 is
allowed (``torch.set_float32_matmul_precision("high")``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

TERA = 1e12


class Peak(Struct, frozen=True, kw_only=True):
    """Peak rates of one board. None: the board has no such unit, or its sources do not state it."""

    source: str
    half: float | None = None
    """float16 and, from Ampere on, bfloat16."""
    tf32: float | None = None
    float32: float | None = None
    float64: float | None = None
    float8: float | None = None
    bfloat16: bool = True


_H100 = "NVIDIA H100 Tensor Core GPU data sheet"
_H200 = "NVIDIA H200 Tensor Core GPU data sheet"
_A100 = "NVIDIA A100 Tensor Core GPU data sheet"
_GH200 = "NVIDIA GH200 Grace Hopper Superchip data sheet"
_V100 = "NVIDIA V100 Tensor Core GPU data sheet"
_A30 = "NVIDIA A30 Tensor Core GPU data sheet"
_A10 = "NVIDIA A10 Tensor Core GPU data sheet"
_T4 = "NVIDIA T4 Tensor Core GPU data sheet"
_L4 = "NVIDIA L4 Tensor Core GPU data sheet, half of the sparse figures"
_DGX_B200 = "NVIDIA DGX B200 data sheet, an eighth of the system"
_TURING = "NVIDIA Turing GPU architecture white paper"
_ADA = "NVIDIA Ada GPU architecture white paper, appendix A"
_GA102 = "NVIDIA Ampere GA102 GPU architecture white paper, appendix A"
_BLACKWELL = "NVIDIA RTX Blackwell GPU architecture white paper, appendix A"

PEAK_RATES: tuple[tuple[str, Peak], ...] = (
    ("B200", Peak(source=_DGX_B200, half=2250, tf32=1125, float8=4500)),
    ("H200 NVL", Peak(source=_H200, half=835.5, tf32=417.5, float32=60, float64=30, float8=1670.5)),
    ("GH200", Peak(source=_GH200, half=989.5, tf32=494.5, float32=67, float64=34, float8=1979)),
    ("H200", Peak(source=_H200, half=989.5, tf32=494.5, float32=67, float64=34, float8=1979)),
    ("H100 PCIe", Peak(source=_H100, half=756, tf32=378, float32=51, float64=26, float8=1513)),
    ("H100 NVL", Peak(source=_H100, half=835.5, tf32=417.5, float32=60, float64=30, float8=1670.5)),
    ("H100", Peak(source=_H100, half=989.5, tf32=494.5, float32=67, float64=34, float8=1979)),
    ("A100", Peak(source=_A100, half=312, tf32=156, float32=19.5, float64=9.7)),
    ("A30", Peak(source=_A30, half=165, tf32=82, float32=10.3, float64=5.2)),
    ("A40", Peak(source="NVIDIA A40 data sheet", half=149.7, tf32=74.8, float32=37.4)),
    ("A10", Peak(source=_A10, half=125, tf32=62.5, float32=31.2)),
    ("L40S", Peak(source="NVIDIA L40S data sheet", half=362, tf32=183, float32=91.6, float8=733)),
    ("L40", Peak(source="NVIDIA L40 data sheet", half=181, tf32=90.5, float32=90.5, float8=362)),
    ("L4", Peak(source=_L4, half=121, tf32=60, float32=30.3, float8=242.5)),
    ("V100-SXM", Peak(source=_V100, half=125, float32=15.7, float64=7.8, bfloat16=False)),
    ("V100-PCIE", Peak(source=_V100, half=112, float32=14, float64=7, bfloat16=False)),
    ("T4", Peak(source=_T4, half=65, float32=8.1, bfloat16=False)),
    ("RTX A6000", Peak(source=_GA102, half=154.8, tf32=77.4, float32=38.7)),
    ("RTX 3090", Peak(source=_GA102, half=71, tf32=35.6, float32=35.6)),
    ("RTX 3080", Peak(source=_GA102, half=59.5, tf32=29.8, float32=29.8)),
    ("RTX 4090", Peak(source=_ADA, half=165.2, tf32=82.6, float32=82.6, float8=330.3)),
    ("RTX 4080", Peak(source=_ADA, half=97.5, tf32=48.7, float32=48.7, float8=194.9)),
    ("RTX 5090", Peak(source=_BLACKWELL, half=209.5, tf32=104.8, float32=104.8, float8=419)),
    ("RTX 5080", Peak(source=_BLACKWELL, half=112.6, tf32=56.3, float32=56.3, float8=225.1)),
    ("RTX 2080 Ti", Peak(source=_TURING, half=53.8, float32=13.4, bfloat16=False)),
)  # fmt: skip
"""Part of the driver's name for the board, and its rates. The first match counts."""

_PRECISIONS = {
    "16-mixed": "half", "16-true": "half", "16": "half",
    "bf16-mixed": "bfloat16", "bf16-true": "bfloat16", "bf16": "bfloat16",
    "32-true": "float32", "32": "float32", "64-true": "float64", "64": "float64",
    "transformer-engine": "float8",
}  # fmt: skip
"""Lightning's names of precisions to fields of ``Peak``."""

_VARIANT_SUFFIXES = (["Ti"], ["SUPER"], ["Laptop"], ["Max-Q"], ["Mobile"], ["D"])
"""Words after the model number of a GeForce that denote a different board."""


def peak_rates(device_name: str | None) -> Peak | None:
    """Return the rates of a board; None if it is not in the table or is a MIG device."""
    if device_name is None or " MIG " in device_name:
        return None
    name = _normalize_name(device_name)
    for board, peak in PEAK_RATES:
        match = re.search(rf"(?<!\w){re.escape(board)}(?!\w)(.*)", name)
        if match and not ("RTX" in board and match[1].split(maxsplit=1)[:1] in _VARIANT_SUFFIXES):
            return peak
    return None


def peak_flops(
    device_name: str | None, precision: str | int, *, tf32: bool = False
) -> float | None:
    """Return the peak floating point operations per second; None if unknown.

    ``precision`` is Lightning's name. ``tf32``: float32 matrix products may use TF32.
    """
    peak = peak_rates(device_name)
    unit = _PRECISIONS.get(str(precision))
    if peak is None or unit is None:
        return None
    if unit == "bfloat16" and not peak.bfloat16:
        return None
    if unit == "float32" and tf32 and peak.tf32 is not None:
        return peak.tf32 * TERA
    teraflops: float | None = getattr(peak, "half" if unit == "bfloat16" else unit)
    return None if teraflops is None else teraflops * TERA


def _normalize_name(name: str) -> str:
    """Separate the parts of a name such as ``Tesla V100-SXM2-16GB`` by spaces."""
    return re.sub(r"-(SXM)\d", r"-\1 ", name).replace("A100-", "A100 ")


class BatchFlops(Struct, frozen=True):
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
