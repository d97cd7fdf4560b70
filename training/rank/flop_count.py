# ruff: noqa: ARG002  (the arguments are Lightning's)
"""Count the floating point operations of one early batch if ``LTUI_COUNT_FLOPS`` requests it.

torch's ``FlopCounterMode`` intercepts every operation, which slows that batch down. Therefore it is
used only on request and only on rank 0. It counts matrix products, convolutions and attention.
"""

from __future__ import annotations

import contextlib
from typing import Any

BATCH = 2
"""Index of the counted batch, from 0. By then everything that is built on first use exists."""


class FlopHooks:
    """Mixed with Lightning's ``Callback``. Events are sent by the channel of ``rank_callback``."""

    def __init__(self, rank_callback: Any) -> None:
        self._rank_callback = rank_callback
        self._batches = 0
        self._mode: Any = None
        """The active ``FlopCounterMode``, or None."""

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
            except Exception as error:  # noqa: BLE001 - training continues without a count
                self._failed(error)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._mode is None:
            return
        try:
            flops = self._stop_counting()
            import torch

            self._send_event(
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
                self._stop_counting()

    def _stop_counting(self) -> int:
        """Leave the counter's mode and return the number of operations."""
        mode, self._mode = self._mode, None
        mode.__exit__(None, None, None)
        return int(mode.get_total_flops())

    def _send_event(self, kind: str, text: str, **fields: Any) -> None:
        if self._rank_callback.channel is not None:
            self._rank_callback.channel.event(kind, text, **fields)

    def _failed(self, error: Exception) -> None:
        with contextlib.suppress(Exception):
            self._send_event("note", f"The operations of a batch can't be counted: {error}")
