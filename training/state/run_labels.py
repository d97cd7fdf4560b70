"""Labels that users give a run: a name, tags, a group, a note and a star; and its colour. Pure.

They are stored beside the run (``training/store/labels_file.py``) and never change how it trains.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ltui.training.problem import Problem, ProblemError

MOST_TAGS = 32
"""Maximum number of tags of a run."""
MOST_NOTE_CHARACTERS = 500
MOST_NAME_CHARACTERS = 80
MOST_COLOURS = 96
"""Number of pairs of a colour and a sign."""
_NAME = re.compile(r"\w[\w.:/=+@-]{0,39}")
"""Form of a tag and of the name of a group. Blanks, commas and quotes separate words."""


class RunLabels(Struct, frozen=True, kw_only=True):
    """The labels of one run. Empty values mean that there is none."""

    name: str = ""
    """Name with any characters; without it, the run is shown by the name in its id."""
    tags: tuple[str, ...] = ()
    """Sorted, each once."""
    group: str = ""
    note: str = ""
    """One line of text."""
    star: bool = False
    colour: int | None = None
    """Index of the colour and sign that the run got when it was first compared, and keeps."""

    def to_document(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "tags": list(self.tags),
            "group": self.group,
            "note": self.note,
            "star": self.star,
            **({"name": self.name} if self.name else {}),
            **({} if self.colour is None else {"colour": self.colour}),
        }


NO_LABELS = RunLabels()


def labels_from_document(document: Mapping[str, Any]) -> RunLabels:
    """Return the labels that ``to_document`` wrote. Values that ltui would not write are left
    out, so that a file edited by hand cannot harm the list of runs."""
    keys = ("name", "tags", "group", "note", "colour")
    name, tags, group, note, colour = (document.get(key) for key in keys)
    valid = {tag for tag in tags if _is_name(tag)} if isinstance(tags, list) else set()
    return RunLabels(
        name=_one_line(name)[:MOST_NAME_CHARACTERS] if isinstance(name, str) else "",
        tags=tuple(sorted(valid)[:MOST_TAGS]),
        group=group if isinstance(group, str) and _is_name(group) else "",
        note=_one_line(note)[:MOST_NOTE_CHARACTERS] if isinstance(note, str) else "",
        star=document.get("star") is True,
        colour=colour if type(colour) is int and 0 <= colour < MOST_COLOURS else None,
    )


def checked_name(text: str, where: str) -> str:
    """Return a name as one line without control characters. Raises ``ProblemError``."""
    return _checked_line(text, where, "name", MOST_NAME_CHARACTERS)


def checked_tags(texts: Iterable[str], where: str) -> tuple[str, ...]:
    """Return the tags in ``texts``, each a tag or several with commas between them.

    Raises ``ProblemError`` if one cannot be a tag.
    """
    tags = {tag.strip() for text in texts for tag in text.split(",")} - {""}
    for tag in sorted(tags):
        _check_name(tag, where, "a tag")
    return tuple(sorted(tags))


def checked_group(text: str, where: str) -> str:
    """Return the name of a group; empty for none. Raises ``ProblemError``."""
    group = text.strip()
    if group:
        _check_name(group, where, "the name of a group")
    return group


def checked_note(text: str, where: str) -> str:
    """Return a note as one line without control characters. Raises ``ProblemError``."""
    return _checked_line(text, where, "note", MOST_NOTE_CHARACTERS)


def _checked_line(text: str, where: str, kind: str, most: int) -> str:
    line = _one_line(text)
    if len(line) > most:
        raise ProblemError.of(
            where=where,
            what=f"the {kind} has {len(line)} characters.",
            remedy=f"Use at most {most}.",
        )
    return line


def new_labels(tags: Iterable[str], group: str, note: str, where: Sequence[str]) -> RunLabels:
    """Return the labels of a run that is launched. Raises ``ProblemError`` with all mistakes.

    ``where``: the places of tags, group and note that a problem names.
    """
    at_tags, at_group, at_note = where
    labels = NO_LABELS
    problems: list[Problem] = []
    steps: tuple[Callable[[RunLabels], RunLabels], ...] = (
        lambda now: replace(now, tags=with_tags(now, checked_tags(tags, at_tags), (), at_tags)),
        lambda now: replace(now, group=checked_group(group, at_group)),
        lambda now: replace(now, note=checked_note(note, at_note)),
    )
    for step in steps:
        try:
            labels = step(labels)
        except ProblemError as error:
            problems += error.problems
    if problems:
        raise ProblemError(*problems)
    return labels


def with_tags(
    labels: RunLabels, added: Iterable[str], removed: Iterable[str], where: str
) -> tuple[str, ...]:
    """Return the tags of ``labels`` with those changes. Raises ``ProblemError`` if there are too
    many."""
    tags = (set(labels.tags) | set(added)) - set(removed)
    if len(tags) > MOST_TAGS:
        raise ProblemError.of(
            where=where,
            what=f"the run would have {len(tags)} tags.",
            remedy=f"Remove some: a run has at most {MOST_TAGS}.",
        )
    return tuple(sorted(tags))


def _is_name(value: object) -> bool:
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


def _check_name(text: str, where: str, kind: str) -> None:
    if not _is_name(text):
        raise ProblemError.of(
            where=where,
            what=f"{text!r} cannot be {kind}.",
            remedy="Use at most 40 letters, digits and . _ : / = + @ -, the first of them a "
            "letter, a digit or _.",
        )


def _one_line(text: str) -> str:
    words = ("".join(c for c in word if c.isprintable()) for word in text.split())
    return " ".join(word for word in words if word)
