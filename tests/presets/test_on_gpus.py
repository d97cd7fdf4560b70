"""What presets do only on GPUs, with stand-ins for the GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ltui.training.data.text import Text
from ltui.training.models.gpt import GPT


def test_the_weights_of_the_gpt_do_not_depend_on_the_default_device() -> None:
    """Most of Lightning's strategies make the rank's GPU the default device."""
    torch.manual_seed(7)
    usual, other = (GPT(width=16, layers=1, heads=2, context=8) for _ in range(2))
    usual.configure_model()
    with torch.device("meta"):
        other.configure_model()
    weights = usual.state_dict()
    assert weights.keys() == other.state_dict().keys()
    for name, weight in other.state_dict().items():
        assert torch.equal(weight, weights[name]), name


@pytest.mark.parametrize(("device", "pinned"), [("cuda", True), ("cpu", False)])
def test_batches_for_a_gpu_are_pinned(
    device: str, pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def opened(*_: object, pin_memory: bool, **__: object) -> list[int]:
        asked.append(pin_memory)
        return [1]

    monkeypatch.setattr("ltui.training.data.sample_order.DataLoader", opened)
    strategy = SimpleNamespace(root_device=torch.device(device))
    data = Text()
    data.setup("fit")
    data.trainer = SimpleNamespace(strategy=strategy, distributed_sampler_kwargs={})  # type: ignore[assignment]
    assert list(data.train_dataloader()) == [1]
    assert asked == [pinned]
