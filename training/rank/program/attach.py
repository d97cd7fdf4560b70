"""The entry point of torch's backend extensions: it watches a program that has no Trainer.

``import torch`` loads every entry point of the group ``torch.backends``, unless
TORCH_DEVICE_BACKEND_AUTOLOAD is 0. An entry point that raises would end the user's script, so this
one never raises. It only registers a hook, which is called after the first step of an optimizer: so
a process that imports torch and trains nothing is not touched further.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

_handle: Any = None


def attach() -> None:
    """Await the first step of an optimizer, if this process belongs to a run."""
    global _handle
    if not (os.environ.get("LTUI_RUN_DIR") and os.environ.get("LTUI_RUN_ID")):
        return
    with contextlib.suppress(Exception):  # an old torch has no such hook
        from torch.optim.optimizer import register_optimizer_step_post_hook

        _handle = register_optimizer_step_post_hook(_after_first_step)


def _after_first_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    _handle.remove()
    try:
        # Imported here, because few of the processes that import torch train.
        from ltui.training.rank.program.program_rank import start

        start(optimizer)
    except Exception as error:  # noqa: BLE001  (ltui must not make a user's script fail)
        print(f"ltui: no telemetry: {type(error).__name__}: {error}", file=sys.stderr)
