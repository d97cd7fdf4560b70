"""Words for the codes of the driver, the table of peaks, and the utilisation of the peak."""

from __future__ import annotations

import pytest

from ltui.training.gpu.flop_utilisation import (
    PEAK_RATES,
    BatchFlops,
    model_flop_utilisation,
    peak_flops,
    peak_rates,
)
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


# -- model FLOP utilisation ------------------------------------------------------------------------

H100 = {"device_name": "NVIDIA H100 80GB HBM3", "precision": "bf16-mixed"}
BATCH_S = {0: 0.1, 1: 0.2}
COUNTED = BatchFlops(49.475e12)


@pytest.mark.parametrize(
    ("counted", "batch_s", "hello", "share"),
    [
        (COUNTED, BATCH_S, H100, (0.5 + 0.25) / 2),  # of 989.5 TFLOP/s
        (BatchFlops(1e12), {0: 0.1}, {**H100, "precision": "32-true"}, 10e12 / 67e12),
        (
            BatchFlops(1e12, tf32=True),
            {0: 0.1},
            {**H100, "precision": "32-true"},
            10e12 / 494.5e12,
        ),
        (None, BATCH_S, H100, None),
        (COUNTED, BATCH_S, {"device_name": None, "precision": "32-true"}, None),
        (COUNTED, BATCH_S, {**H100, "device_name": "An unheard-of GPU"}, None),
        (COUNTED, {**BATCH_S, 1: None}, H100, None),
        (COUNTED, {}, H100, None),
    ],
)
def test_the_utilisation_is_known_only_where_all_its_parts_are(counted, batch_s, hello, share):
    found = model_flop_utilisation(counted, batch_s, {0: hello, 1: hello})
    assert found == (None if share is None else pytest.approx(share))


def test_the_operations_of_an_event():
    assert BatchFlops.from_event({"flops": 12.0, "tf32": True}) == BatchFlops(12.0, tf32=True)
    assert BatchFlops.from_event({"flops": None}) is None
    assert BatchFlops.from_event({}) is None
