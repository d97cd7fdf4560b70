"""Which metrics are of validation or test data, by their names."""

from __future__ import annotations

import pytest

from ltui.training.state.metric_name_patterns import is_evaluation


@pytest.mark.parametrize(
    "name",
    ["val/loss", "loss_test", "eval/acc", "val1/loss", "val0_acc", "validate/loss", "testing/acc"],
)
def test_names_of_evaluation(name: str) -> None:
    assert is_evaluation(name)


@pytest.mark.parametrize("name", ["train/loss", "value_loss", "valence", "lr", "latest/loss"])
def test_names_of_training(name: str) -> None:
    assert not is_evaluation(name)
