"""Exponential moving average of the weights, for validation and test.

Lightning's own callback swaps the averages into the module for a validation. A checkpoint that is
saved during a validation then has weights and averages exchanged. This callback saves both
correctly.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback


class WeightAverage(Callback):
    """Averages all weights and floating point buffers after each optimizer step.

    The module keeps the trained weights. The averages are stored in the checkpoint, and they are in
    the module during validation and test.
    """

    def __init__(self, decay: float = 0.999, every: int = 1) -> None:
        """``decay``: weight of the previous average. In the first steps it is smaller: at step n it
        is at most (1 + n) / (10 + n). ``every``: steps between two updates. Strategies that shard
        the weights are not supported."""
        if not 0 <= decay < 1 or every < 1:
            raise ValueError(
                f"decay must be from 0 to below 1 and every at least 1, not {decay} and {every}"
            )
        self.decay = decay
        self.every = every
        self._averages: list[torch.Tensor] = []
        self._loaded: list[torch.Tensor] | None = None
        self._step = 0
        self._updates = 0
        self._swapped = False

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.strategy.restore_checkpoint_after_setup:
            raise TypeError(
                f"WeightAverage does not support the sharded weights of "
                f"{type(trainer.strategy).__name__}"
            )
        current = _tensors(pl_module)
        loaded, self._loaded = self._loaded, None
        if loaded is not None and [t.shape for t in loaded] == [t.shape for t in current]:
            self._averages = [mean.to(tensor) for mean, tensor in zip(loaded, current, strict=True)]
        else:
            self._averages = [tensor.clone() for tensor in current]
            self._updates = 0
        self._step = trainer.global_step

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:  # noqa: ARG002
        step = trainer.global_step
        if step == self._step or step % self.every:
            return
        self._step = step
        self._updates += 1
        keep = min(self.decay, (1 + self._updates) / (10 + self._updates))
        torch._foreach_lerp_(self._averages, _tensors(pl_module), 1 - keep)

    @torch.no_grad()
    def _swap(self, pl_module: Any) -> None:
        if not self._averages:
            return
        current = _tensors(pl_module)
        held = [tensor.clone() for tensor in current]
        torch._foreach_copy_(current, self._averages)
        torch._foreach_copy_(self._averages, held)
        self._swapped = not self._swapped

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        self._swap(pl_module)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        self._swap(pl_module)

    on_test_start = on_validation_start
    on_test_end = on_validation_end

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002
        if self._swapped:
            self._swap(pl_module)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:  # noqa: ARG002
        """Save the averages, and the trained weights also during a validation."""
        state = checkpoint.get("state_dict")
        averages = self._averages
        if self._swapped and state:
            names = [name for name, _ in _named_tensors(pl_module)]
            averages = [state[name] for name in names]
            trained = dict(zip(names, self._averages, strict=True))
            checkpoint["state_dict"] = {**state, **trained}
        checkpoint["weight_average"] = {"averages": averages, "updates": self._updates}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:  # noqa: ARG002
        if (saved := checkpoint.get("weight_average")) is not None:
            self._loaded, self._updates = saved["averages"], saved["updates"]


def _named_tensors(module: Any) -> list[tuple[str, torch.Tensor]]:
    """Return weights and persistent floating point buffers with their names in the state dict."""
    state = module.state_dict(keep_vars=True)
    return [(k, v) for k, v in state.items() if torch.is_floating_point(v)]


def _tensors(module: Any) -> list[torch.Tensor]:
    return [tensor.detach() for _, tensor in _named_tensors(module)]
