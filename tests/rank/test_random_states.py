"""The random states that a checkpoint keeps."""

from __future__ import annotations

import random

import torch

from ltui.training.rank.resume.plain_data import preserve_random_states


def test_states_are_read_on_the_host_whatever_the_default_device_is() -> None:
    """On another device, reading them back would wait for it; this one cannot be read at all."""
    random.seed(3)
    expected = random.random()
    random.seed(3)
    with torch.device("meta"), preserve_random_states():
        random.random()
    assert random.random() == expected
