"""Model FLOP utilisation: known only where all its parts are."""

from __future__ import annotations

import pytest

from ltui.training.gpu.flop_utilisation import BatchFlops, model_flop_utilisation

H100 = {"device_name": "NVIDIA H100 80GB HBM3", "precision": "bf16-mixed"}
BATCH_S = {0: 0.1, 1: 0.2}
COUNTED = BatchFlops(49.475e12)


def test_over_the_peak_of_the_precision() -> None:
    # Half of 989.5 TFLOP/s, and a quarter.
    share = model_flop_utilisation(COUNTED, BATCH_S, {0: H100, 1: H100})
    assert share == pytest.approx((0.5 + 0.25) / 2)


def test_float32_with_tf32_has_another_peak() -> None:
    plain = {0: {**H100, "precision": "32-true"}}
    slow = model_flop_utilisation(BatchFlops(1e12), {0: 0.1}, plain)
    fast = model_flop_utilisation(BatchFlops(1e12, tf32=True), {0: 0.1}, plain)
    assert slow == pytest.approx(10e12 / 67e12)
    assert fast == pytest.approx(10e12 / 494.5e12)


@pytest.mark.parametrize(
    ("counted", "batch_s", "hello"),
    [
        (None, BATCH_S, H100),
        (COUNTED, BATCH_S, {"device_name": None, "precision": "32-true"}),
        (COUNTED, BATCH_S, {**H100, "device_name": "An unheard-of GPU"}),
        (COUNTED, {**BATCH_S, 1: None}, H100),
        (COUNTED, {}, H100),
    ],
)
def test_unknown(
    counted: BatchFlops | None, batch_s: dict[int, float | None], hello: dict[str, str]
) -> None:
    assert model_flop_utilisation(counted, batch_s, {0: hello, 1: hello}) is None


def test_of_an_event() -> None:
    assert BatchFlops.from_event({"flops": 12.0, "tf32": True}) == BatchFlops(12.0, tf32=True)
    assert BatchFlops.from_event({"flops": None}) is None
    assert BatchFlops.from_event({}) is None
