"""Which operations of FFCV draw at random in its threads, whose random states nobody can keep."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ltui.training.rank.resume.ffcv_position import is_ffcv_loader


def describe_inexact_operations(operations: Iterable[Any]) -> str | None:
    """What a resume can't bring back of an FFCV pipeline, as the middle of a sentence; None where
    none of its ``operations`` is known to draw in FFCV's threads."""
    names = dict.fromkeys(type(o).__name__ for o in operations if _draws(o))
    if not names:
        return None
    several = len(names) > 1
    return (
        f"FFCV's {' and '.join(names)} draw{'' if several else 's'} in threads of "
        f"{'their' if several else 'its'} own, so images are changed otherwise than they would have"
        " been"
    )


def describe_inexact_loader(loader: Any) -> str | None:
    """The same of any loader: what it says itself (``inexact``), or of FFCV's own ``Loader``."""
    if text := getattr(loader, "inexact", None):
        return str(text)
    specs = getattr(loader, "pipeline_specs", None)
    if not (is_ffcv_loader(loader) and isinstance(specs, dict)):
        return None
    return describe_inexact_operations(
        operation
        for spec in specs.values()
        for operation in (getattr(spec, "decoder", None), *getattr(spec, "transforms", ()))
    )


def _draws(operation: Any) -> bool:
    wrapped = getattr(operation, "module", None)  # of torchvision, in FFCV's ModuleWrapper
    return any(
        "Random" in base.__name__ or base.__name__ == "Cutout"
        for each in (operation, wrapped)
        for base in type(each).__mro__
    )
