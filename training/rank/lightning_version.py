"""The version of Lightning in use, and the warning about one that is not supported."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ltui.training.rank.channel import Channel


def lightning_version(trainer: Any) -> str:
    """Return ``2.6.6`` for ``lightning``, or ``2.6.6 (pytorch_lightning)``."""
    packages = [cls.__module__.partition(".")[0] for cls in type(trainer).__mro__[:-1]]
    lightning = [name for name in packages if name in ("lightning", "pytorch_lightning")]
    package = (lightning or packages[-1:])[0]
    version = getattr(sys.modules.get(package), "__version__", "unknown")
    return version if package == "lightning" else f"{version} ({package})"


OLDEST_LIGHTNING = "2.5"
"""Oldest supported version, as in ``pyproject.toml``."""


def is_too_old(version: str) -> bool:
    """Return True if a version of ``lightning_version`` is below the oldest supported one."""
    match = re.match(r"(\d+)\.(\d+)", version)
    oldest = tuple(int(part) for part in OLDEST_LIGHTNING.split("."))
    return match is not None and (int(match[1]), int(match[2])) < oldest


def report_old_lightning(trainer: Any, channel: Channel) -> None:
    """Send a warning if the installed Lightning is older than the oldest supported version."""
    version = lightning_version(trainer)
    if is_too_old(version):
        text = (
            f"Lightning {version} is older than {OLDEST_LIGHTNING}, the oldest version that"
            " ltui supports: a stop, a pause, a checkpoint or an exact resume may not work."
        )
        remedy = "Upgrade it: pip install -U lightning"
        channel.event_from_rank_0("warning", text, remedy=remedy)
