"""The entry point of Lightning's callback factories: it returns ltui's callbacks for each Trainer.

Both groups (``lightning.pytorch.callbacks_factory`` and ``pytorch_lightning.callbacks_factory``)
name ``callbacks``. A factory that raises would end the user's script, so this one never raises.
Outside of a run it returns an empty list and imports nothing heavy.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
from functools import lru_cache
from typing import Any

_PACKAGES = {"pytorch_lightning": "pytorch_lightning", "lightning": "lightning.pytorch"}
FREEZE_WARNINGS, FLOP_COUNT = "LtuiFreezeWarnings", "LtuiFlops"
_HOOKS = {
    "LtuiRank": ("callback", "RankHooks"),
    FREEZE_WARNINGS: ("freeze_warnings", "FreezeWarningHooks"),
    FLOP_COUNT: ("training_facts", "FlopHooks"),
}
"""Name of each callback's class -> module and class of its hooks."""


def callbacks() -> list[Any]:
    """Return ltui's callbacks for the Trainer under construction; none outside of a run."""
    if not (os.environ.get("LTUI_RUN_DIR") and os.environ.get("LTUI_RUN_ID")):
        return []
    try:
        return _create_callbacks(_calling_package())
    except Exception as error:  # noqa: BLE001  (ltui must not make a user's script fail)
        print(f"ltui: no telemetry: {type(error).__name__}: {error}", file=sys.stderr)
        return []


def _create_callbacks(package: str) -> list[Any]:
    # Imported here, because only a run needs it. The caller has already imported Lightning.
    from ltui.training.shared.rank_environment import RankEnvironment

    environment = RankEnvironment.read(os.environ)
    # A child of multiprocessing that imports the main script is no rank.
    if environment is None or getattr(multiprocessing.current_process(), "_inheriting", False):
        return []
    if (program := sys.modules.get("ltui.training.rank.program.program_rank")) is not None:
        program.stop_watching()
    rank_callback = rebuild_callback(package, environment)
    try:
        rank_callback.open_before_setup()
    except Exception as error:  # noqa: BLE001  (``setup`` tries again)
        print(f"ltui: {type(error).__name__}: {error}", file=sys.stderr)
    names = [FREEZE_WARNINGS]
    if os.environ.get("LTUI_COUNT_FLOPS", "0") not in ("", "0"):
        names.append(FLOP_COUNT)
    return [rank_callback, *(rebuild_callback(package, rank_callback, name) for name in names)]


def rebuild_callback(package: str, argument: Any, name: str = "LtuiRank") -> Any:
    """Create a callback with Lightning's ``Callback`` of ``package``.

    ``argument`` is the rank's environment, or for the other callbacks the rank's callback, through
    whose channel they send events. Unpickling in a spawned process calls this function too, because
    nothing is open there yet.
    """
    callback = _callback_class(package, name)(argument)
    callback.rebuilt_from = package, argument, name
    return callback


@lru_cache
def _callback_class(package: str, name: str) -> type[Any]:
    module, hooks_name = _HOOKS[name]
    hooks = getattr(importlib.import_module(f"ltui.training.rank.{module}"), hooks_name)
    base = importlib.import_module(_PACKAGES[package]).Callback

    def reduce(self: Any) -> tuple[Any, ...]:
        return rebuild_callback, self.rebuilt_from

    return type(name, (hooks, base), {"__reduce__": reduce, "__module__": __name__})


def _calling_package() -> str:
    """Return which of the two Lightning packages builds the Trainer: that of the nearest caller."""
    frame = sys._getframe(1)
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package in _PACKAGES:
            return str(package)
        frame = frame.f_back  # type: ignore[assignment]
    return "lightning" if "lightning.pytorch" in sys.modules else "pytorch_lightning"
