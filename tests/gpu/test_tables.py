"""Words for the driver's codes, and the table of peaks."""

from __future__ import annotations

import pytest

from ltui.training.gpu.flop_utilisation import PEAK_RATES, peak_flops, peak_rates
from ltui.training.gpu.reading import reason_names, xid_meaning, xid_sentence


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (0, ()), (1, ()), (0x4, ("power cap",)), (0x8, ("hardware slowdown",)),
        (0x48, ("hardware thermal slowdown",)), (0x88, ("power brake",)),
        (0x25, ("power cap", "thermal slowdown")), (0x8000, ("reason 0x8000",)),
    ],
)  # fmt: skip
def test_throttle_reasons(mask, words):
    assert reason_names(mask) == words


def test_xid_codes():
    assert xid_sentence(79) == "XID 79: the GPU fell off the bus"
    assert xid_meaning(79).unusable
    assert not xid_meaning(31).unusable
    assert "not in ltui's table" in xid_sentence(12345)


@pytest.mark.parametrize(
    ("name", "precision", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16-mixed", 989.5e12),
        ("NVIDIA H100 PCIe", "bf16-mixed", 756e12),
        ("NVIDIA H100 NVL", "16-mixed", 835.5e12),
        ("NVIDIA H200", "bf16-true", 989.5e12),
        ("NVIDIA A100-SXM4-80GB", "32-true", 19.5e12),
        ("NVIDIA A100 80GB PCIe", 16, 312e12),
        ("Tesla V100-SXM2-16GB", "16-mixed", 125e12),
        ("Tesla V100-PCIE-32GB", "16-mixed", 112e12),
        ("Tesla T4", "16-mixed", 65e12),
        ("NVIDIA L40S", "bf16-mixed", 362e12),
        ("NVIDIA L40", "bf16-mixed", 181e12),
        ("NVIDIA L4", "bf16-mixed", 121e12),
        ("NVIDIA GeForce RTX 4090", "bf16-mixed", 165.2e12),
        # No such unit, no such board in the table, no such precision.
        ("Tesla V100-SXM2-16GB", "bf16-mixed", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16-mixed", None),
        ("NVIDIA GeForce RTX 3080 Ti", "bf16-mixed", None),
        ("NVIDIA A10G", "16-mixed", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16-mixed", None),
        ("NVIDIA A40", "64-true", None),
        ("NVIDIA H100 PCIe", "int8", None),
        (None, "32", None),
    ],
)
def test_peaks(name, precision, expected):
    assert peak_flops(name, precision) == expected


def test_tf32_counts_where_it_is_allowed():
    assert peak_flops("NVIDIA A100-SXM4-40GB", "32", tf32=True) == 156e12
    assert peak_flops("Tesla T4", "32", tf32=True) == 8.1e12


def test_the_table_is_consistent():
    for part, peak in PEAK_RATES:
        assert peak.source
        assert peak_rates(f"NVIDIA {part}") == peak, part
        if peak.half and peak.float32:
            assert peak.half >= 1.9 * peak.float32, part
        if peak.half and peak.tf32:
            assert peak.half == pytest.approx(2 * peak.tf32, rel=0.03), part
        if peak.half and peak.float8:
            assert peak.float8 == pytest.approx(2 * peak.half, rel=0.03), part
