"""The entry point of Lightning's callback factories: it returns ltui's callbacks for each Trainer.

Both groups (``lightning.pytorch.callbacks_factory`` and ``pytorch_lightning.callbacks_factory``)
name ``callbacks``. A factory that raises would end the user's script, so this one never raises.
Outside of a run it returns an empty list and imports nothing heavy.
"""

from __future__ import annotations

import importlib
import os
import sys
from functools import lru_cache
from typing import Any

_PACKAGES = {"pytorch_lightning": "pytorch_lightning", "lightning": "lightning.pytorch"}


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
    from ltui.training.rank.environment import RankEnvironment

    environment = RankEnvironment.read(os.environ)
    if environment is None:
        return []
    rank_callback = rebuild_callback(package, environment)
    try:
        rank_callback.open_before_setup()
    except Exception as error:  # noqa: BLE001  (``setup`` tries again)
        print(f"ltui: {type(error).__name__}: {error}", file=sys.stderr)
    created = [rank_callback, rebuild_freeze_warnings(package, rank_callback)]
    if os.environ.get("LTUI_COUNT_FLOPS", "0") not in ("", "0"):
        created.append(rebuild_flop_counter(package, rank_callback))
    return created


def rebuild_freeze_warnings(package: str, rank_callback: Any) -> Any:
    """Create the callback that warns about freezes through the channel of ``rank_callback``."""

    def report(warning: Any) -> None:
        if rank_callback.channel is not None:
            rank_callback.channel.event("warning", warning.what, remedy=warning.remedy)

    return _freeze_warnings_class(package)(rank_callback, report)


@lru_cache(maxsize=2)
def _freeze_warnings_class(package: str) -> type:
    from ltui.training.rank.freeze_warnings import FreezeWarningHooks

    base = importlib.import_module(_PACKAGES[package]).Callback

    def init(self: Any, rank_callback: Any, report: Any) -> None:
        FreezeWarningHooks.__init__(self, report)
        self.rank_callback = rank_callback

    def reduce(self: Any) -> tuple[Any, ...]:
        return rebuild_freeze_warnings, (package, self.rank_callback)

    body = {"__init__": init, "__reduce__": reduce, "__module__": __name__}
    return type("LtuiFreezeWarnings", (FreezeWarningHooks, base), body)


def rebuild_flop_counter(package: str, rank_callback: Any) -> Any:
    """Create the callback that counts a batch's operations.

    It sends the result through the channel of ``rank_callback``.
    """

    def send_event(kind: str, text: str, **fields: Any) -> None:
        if rank_callback.channel is not None:
            rank_callback.channel.event(kind, text, **fields)

    return _flop_counter_class(package)(rank_callback, send_event)


@lru_cache(maxsize=2)
def _flop_counter_class(package: str) -> type:
    from ltui.training.rank.flop_count import FlopHooks

    base = importlib.import_module(_PACKAGES[package]).Callback

    def init(self: Any, rank_callback: Any, send_event: Any) -> None:
        FlopHooks.__init__(self, send_event)
        self.rank_callback = rank_callback

    def reduce(self: Any) -> tuple[Any, ...]:
        return rebuild_flop_counter, (package, self.rank_callback)

    body = {"__init__": init, "__reduce__": reduce, "__module__": __name__}
    return type("LtuiFlops", (FlopHooks, base), body)


def rebuild_callback(package: str, environment: Any) -> Any:
    """Create the callback of a rank.

    Unpickling it in a spawned process calls this function too, because nothing is open there yet.
    """
    return _callback_class(package)(environment)


@lru_cache(maxsize=2)
def _callback_class(package: str) -> type:
    from ltui.training.rank.callback import RankHooks

    base = importlib.import_module(_PACKAGES[package]).Callback

    def reduce(self: Any) -> tuple[Any, ...]:
        return rebuild_callback, (package, self.environment)

    return type("LtuiRank", (RankHooks, base), {"__reduce__": reduce, "__module__": __name__})


def _calling_package() -> str:
    """Return which of the two Lightning packages builds the Trainer: that of the nearest caller."""
    frame = sys._getframe(1)
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package in _PACKAGES:
            return str(package)
        frame = frame.f_back  # type: ignore[assignment]
    return "lightning" if "lightning.pytorch" in sys.modules else "pytorch_lightning"
