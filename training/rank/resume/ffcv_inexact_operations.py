"""FFCV operations that draw at random in FFCV's own threads, whose random states can't be saved."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ltui.training.rank.resume.ffcv_position import is_ffcv_loader


def describe_inexact_operations(operations: Iterable[Any]) -> str | None:
    """Return what a resume can't restore of an FFCV pipeline, as the middle of a sentence.

    Return None if none of ``operations`` is known to draw at random in FFCV's threads.
    """
    names = dict.fromkeys(type(o).__name__ for o in operations if _draws_at_random(o))
    if not names:
        return None
    several = len(names) > 1
    return (
        f"FFCV's {' and '.join(names)} draw{'' if several else 's'} at random in threads of "
        f"{'their' if several else 'its'} own, so images are changed differently than without the "
        "resume"
    )


def describe_inexact_loader(loader: Any) -> str | None:
    """Return what a resume can't restore of ``loader``, as the middle of a sentence, or None.

    A loader may say it in its attribute ``inexact``. For FFCV's own ``Loader`` the operations of
    its pipelines decide.
    """
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


def _draws_at_random(operation: Any) -> bool:
    wrapped = getattr(operation, "module", None)  # a torchvision module in FFCV's ModuleWrapper
    return any(
        "Random" in base.__name__ or base.__name__ == "Cutout"
        for each in (operation, wrapped)
        for base in type(each).__mro__
    )
