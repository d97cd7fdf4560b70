"""Stacks for people: the user's own code is marked, and runs of library calls are folded. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ltui.training.diagnosis.evidence import Frame, StackGroup
from ltui.widgets import formats
from ltui.widgets.sanitise import clean_name
from ltui.widgets.view_models import Cell, Tone

USER_CODE_MARK = "▸ "
"""Mark before a call in the user's own code."""
_IMPORTING = "<frozen importlib"
MAX_CALLS_BELOW = 3
"""Number of library calls shown of those that the user's code called; the rest is folded."""
MAX_CALLERS = 1
"""Number of library calls shown of those that called the user's code."""
_PACKAGES = re.compile(r".*/(?:site|dist)-packages/(?P<rest>.+)")
_STANDARD_LIBRARY = re.compile(r".*/lib(?:64)?/python3(?:\.\d+)?/(?P<rest>.+)")
_RANK_SIDE = re.compile(r".*/rank-side/[^/]+/(?P<rest>ltui/.+)")
_OF_PRESETS = re.compile(r"ltui/training/(?:models|data)/.+")
"""Modules that the shipped presets train. For a person who runs a preset they are the user's
code."""


def in_library(path: str) -> str | None:
    """Return the path inside an installed package, Python or ltui, or None for the user's code."""
    for pattern in (_RANK_SIDE, _PACKAGES, _STANDARD_LIBRARY):
        if (match := pattern.fullmatch(path)) is not None:
            return None if _OF_PRESETS.fullmatch(match["rest"]) else match["rest"]
    return path if path.startswith("<") or path.endswith((".so", ".c", ".cpp")) else None


def frame_location(frame: Frame, *, full_paths: bool = False) -> str:
    """Return ``data/augment.py:88 __call__``. With ``full_paths``, user code has its complete
    path."""
    inside = in_library(frame.file)
    if inside is not None:
        path = inside
    elif full_paths:
        path = frame.file
    else:
        path = "/".join(frame.file.rsplit("/", 2)[-2:])
    where = f"{clean_name(path)}:{frame.line}" if frame.line > 0 else clean_name(path)
    return f"{where} {clean_name(frame.function)}"


def stack_lines(frames: Sequence[Frame], *, full_paths: bool = False) -> tuple[Cell, ...]:
    """Return the lines of a stack, innermost call first. In a report nothing is folded."""
    lines: list[Cell] = []
    library: list[Frame] = []
    user_code_seen = False

    def fold(shown_calls: int) -> None:
        informative = [f for f in library if not f.file.startswith(_IMPORTING)]
        folds = not full_paths and len(library) > shown_calls + 1
        shown = informative[:shown_calls] if folds else library
        lines.extend(
            Cell(text=f"  {frame_location(f, full_paths=full_paths)}", tone=Tone.DIM) for f in shown
        )
        if len(shown) < len(library):
            hidden = [f for f in library if f not in shown]
            lines.append(
                Cell(text=f"  … {len(hidden)} calls in {_package_names(hidden)}", tone=Tone.DIM)
            )
        library.clear()

    for frame in frames:
        if in_library(frame.file) is not None:
            library.append(frame)
            continue
        fold(MAX_CALLERS if user_code_seen else MAX_CALLS_BELOW)
        user_code_seen = True
        lines.append(
            Cell(
                text=f"{USER_CODE_MARK}{frame_location(frame, full_paths=full_paths)}",
                tone=Tone.ACCENT,
            )
        )
    fold(MAX_CALLERS if user_code_seen else MAX_CALLS_BELOW)
    return tuple(lines)


def _package_names(frames: Sequence[Frame]) -> str:
    """Return the packages of some calls in order of appearance: ``torch, lightning``."""
    names = (clean_name((in_library(f.file) or f.file).lstrip("/").split("/")[0]) for f in frames)
    plain = (re.sub(r"^<frozen ([\w]+).*", r"\1", name).removesuffix(".py") for name in names)
    shown = list(dict.fromkeys(plain))
    return ", ".join(shown[:3]) + (", ..." if len(shown) > 3 else "")


def stack_title(group: StackGroup, culprits: set[int]) -> str:
    """Return ``! rank 1``, ``ranks 0, 2, 3 alike`` or ``worker 4711 of rank 1``."""
    sign = "! " if culprits & set(group.ranks) else ""
    plain = all(re.fullmatch(r"rank \d+", who) for who in group.who)
    if plain and group.ranks:
        alike = " alike" if len(set(group.ranks)) > 1 else ""
        return f"{sign}{formats.rank_words(group.ranks)}{alike}"
    named = [clean_name(who) for who in group.who]
    more = f" and {len(named) - 4} more" if len(named) > 4 else ""
    suffix = " alike" if len(named) > 1 else ""
    return f"{sign}{', '.join(named[:4])}{more}{suffix}"
