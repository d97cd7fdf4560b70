"""Model FLOP utilisation: known only where all its parts are."""

from __future__ import annotations

import pytest

from ltui.training.gpu.flop_utilisation import BatchFlops, model_flop_utilisation
from ltui.training.state.run_snapshot import RankSnapshot

H100 = {"device_name": "NVIDIA H100 80GB HBM3", "precision": "bf16-mixed"}
RANKS = (RankSnapshot(rank=0, step_s=0.1), RankSnapshot(rank=1, step_s=0.2))
COUNTED = BatchFlops(49.475e12)


def test_over_the_peak_of_the_precision() -> None:
    # Half of 989.5 TFLOP/s, and a quarter.
    share = model_flop_utilisation(COUNTED, RANKS, {0: H100, 1: H100})
    assert share == pytest.approx((0.5 + 0.25) / 2)


def test_float32_with_tf32_has_another_peak() -> None:
    plain = {0: {**H100, "precision": "32-true"}}
    slow = model_flop_utilisation(BatchFlops(1e12), RANKS[:1], plain)
    fast = model_flop_utilisation(BatchFlops(1e12, tf32=True), RANKS[:1], plain)
    assert slow == pytest.approx(10e12 / 67e12)
    assert fast == pytest.approx(10e12 / 494.5e12)


@pytest.mark.parametrize(
    ("counted", "ranks", "hello"),
    [
        (None, RANKS, H100),
        (COUNTED, RANKS, {"device_name": None, "precision": "32-true"}),
        (COUNTED, RANKS, {**H100, "device_name": "An unheard-of GPU"}),
        (COUNTED, (RankSnapshot(rank=0),), H100),
        (COUNTED, (), H100),
    ],
)
def test_unknown(counted: BatchFlops | None, ranks: tuple[RankSnapshot, ...], hello: dict) -> None:
    assert model_flop_utilisation(counted, ranks, {0: hello, 1: hello}) is None


def test_of_an_event() -> None:
    assert BatchFlops.from_event({"flops": 12.0, "tf32": True}) == BatchFlops(12.0, tf32=True)
    assert BatchFlops.from_event({"flops": None}) is None
    assert BatchFlops.from_event({}) is None
