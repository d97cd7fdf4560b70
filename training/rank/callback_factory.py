"""What Lightning finds in its entry-point groups: one callback for every Trainer of a run.

Both groups (``lightning.pytorch.callbacks_factory`` and ``pytorch_lightning.callbacks_factory``)
name ``callbacks``. A factory that raises would end the user's script, so this one never does;
outside of a run it returns nothing and imports nothing heavy.
"""

from __future__ import annotations

import importlib
import os
import sys
from functools import lru_cache
from typing import Any

_PACKAGES = {"pytorch_lightning": "pytorch_lightning", "lightning": "lightning.pytorch"}


def callbacks() -> list[Any]:
    """The callback for the Trainer under construction; an empty list outside of a run."""
    if not (os.environ.get("LTUI_RUN_DIR") and os.environ.get("LTUI_RUN_ID")):
        return []
    try:
        return _make(_calling_package())
    except Exception as error:  # noqa: BLE001  (a user's script must not fail on our account)
        print(f"ltui: no telemetry: {type(error).__name__}: {error}", file=sys.stderr)
        return []


def _make(package: str) -> list[Any]:
    # Lightning is imported by now, and only inside of a run is the rest needed.
    from ltui.training.rank.environment import RankEnvironment

    environment = RankEnvironment.read(os.environ)
    if environment is None:
        return []
    callback = rebuild_callback(package, environment)
    try:
        callback.open_before_setup()
    except Exception as error:  # noqa: BLE001  (``setup`` tries again)
        print(f"ltui: {type(error).__name__}: {error}", file=sys.stderr)
    found = [callback, rebuild_freeze_warnings(package, callback)]
    if os.environ.get("LTUI_COUNT_FLOPS", "0") not in ("", "0"):
        found.append(rebuild_flop_counter(package, callback))
    return found


def rebuild_freeze_warnings(package: str, of: Any) -> Any:
    """The callback that warns of what freezes runs, through ``of``'s channel."""

    def tell(caution: Any) -> None:
        if of.channel is not None:
            of.channel.event("warning", caution.what, remedy=caution.remedy)

    return _cautions_class(package)(of, tell)


@lru_cache(maxsize=2)
def _cautions_class(package: str) -> type:
    from ltui.training.rank.freeze_warnings import FreezeWarningHooks

    base = importlib.import_module(_PACKAGES[package]).Callback

    def init(self: Any, of: Any, tell: Any) -> None:
        FreezeWarningHooks.__init__(self, tell)
        self.of = of

    def reduce(self: Any) -> tuple[Any, ...]:
        return rebuild_freeze_warnings, (package, self.of)

    body = {"__init__": init, "__reduce__": reduce, "__module__": __name__}
    return type("LtuiFreezeWarnings", (FreezeWarningHooks, base), body)


def rebuild_flop_counter(package: str, of: Any) -> Any:
    """The callback that counts a batch's operations, and tells them through ``of``'s channel."""

    def tell(kind: str, text: str, **fields: Any) -> None:
        if of.channel is not None:
            of.channel.event(kind, text, **fields)

    return _counter_class(package)(of, tell)


@lru_cache(maxsize=2)
def _counter_class(package: str) -> type:
    from ltui.training.rank.flop_count import FlopHooks

    base = importlib.import_module(_PACKAGES[package]).Callback

    def init(self: Any, of: Any, tell: Any) -> None:
        FlopHooks.__init__(self, tell)
        self.of = of

    def reduce(self: Any) -> tuple[Any, ...]:
        return rebuild_flop_counter, (package, self.of)

    body = {"__init__": init, "__reduce__": reduce, "__module__": __name__}
    return type("LtuiFlops", (FlopHooks, base), body)


def rebuild_callback(package: str, environment: Any) -> Any:
    """A fresh callback; also how one is unpickled in a spawned process, where nothing is open
    yet."""
    return _callback_class(package)(environment)


@lru_cache(maxsize=2)
def _callback_class(package: str) -> type:
    from ltui.training.rank.callback import RankHooks

    base = importlib.import_module(_PACKAGES[package]).Callback

    def reduce(self: Any) -> tuple[Any, ...]:
        return rebuild_callback, (package, self.environment)

    return type("LtuiRank", (RankHooks, base), {"__reduce__": reduce, "__module__": __name__})


def _calling_package() -> str:
    """Of the two packages, the one whose Trainer is being made: the nearest caller of theirs."""
    frame = sys._getframe(1)
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package in _PACKAGES:
            return str(package)
        frame = frame.f_back  # type: ignore[assignment]
    return "lightning" if "lightning.pytorch" in sys.modules else "pytorch_lightning"
