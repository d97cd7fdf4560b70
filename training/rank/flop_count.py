# ruff: noqa: ARG002  (the arguments are Lightning's)
"""Counts the floating point operations of one early batch, where ``LTUI_COUNT_FLOPS`` asks for it.

torch's ``FlopCounterMode`` looks at every operation, which slows that one batch down; so it is not
done unasked, and by rank 0 alone. Matrix products, convolutions and attention are counted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

COUNT_FLOPS = "LTUI_COUNT_FLOPS"
BATCH = 2
"""Counted from 0: by then whatever is built on first use is built."""


class FlopHooks:
    """Mixed with Lightning's ``Callback``. ``tell`` sends an event of the run."""

    def __init__(self, tell: Callable[..., None]) -> None:
        self._tell = tell
        self._batches = 0
        self._mode: Any = None

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batches += 1
        if self._batches == BATCH + 1 and trainer.global_rank == 0:
            try:
                from torch.utils.flop_counter import FlopCounterMode

                mode: Any = FlopCounterMode(display=False)
                mode.__enter__()
                self._mode = mode
            except Exception as error:  # noqa: BLE001 - training goes on uncounted
                self._failed(error)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._mode is None:
            return
        try:
            flops = self._leave()
            import torch

            self._tell(
                "flops",
                f"One batch takes {flops:.3g} floating point operations.",
                flops=float(flops),
                tf32=torch.get_float32_matmul_precision() != "highest",
            )
        except Exception as error:  # noqa: BLE001
            self._failed(error)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self._mode is not None:
            with contextlib.suppress(Exception):
                self._leave()

    def _leave(self) -> int:
        mode, self._mode = self._mode, None
        mode.__exit__(None, None, None)
        return int(mode.get_total_flops())

    def _failed(self, error: Exception) -> None:
        with contextlib.suppress(Exception):
            self._tell("note", f"The operations of a batch can't be counted: {error}")
