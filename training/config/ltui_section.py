"""The ``ltui:`` section of a preset: what the form shows, and how the run is watched."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from ltui.training.config.run_spec import STALL_ACTIONS, CheckpointPolicy, StallPolicy
from ltui.training.config.structure_check import closest_match, format_value, value_fault
from ltui.training.config.trainer_arguments import Argument
from ltui.training.config.verdict_levels import LEVELS
from ltui.training.config.yaml_document import Fault

KNOB_TYPES = ("int", "float", "str", "bool", "choice", "path", "devices")
AFTER_FIT = ("validate", "test")


@dataclass(frozen=True, kw_only=True, slots=True)
class Knob:
    """One field of the form: a setting that is worth changing."""

    key: str
    """Dotted path in the document: ``trainer.max_epochs``."""
    label: str
    type: str = "str"
    """One of ``KNOB_TYPES``."""
    choices: tuple[str, ...] = ()
    min: float | None = None
    max: float | None = None
    help: str = ""
    unit: str = ""
    """What the number counts: ``epochs``, ``samples per rank``."""
    default: Any = None
    """The value in the document."""

    def with_default(self, value: Any) -> Knob:
        return replace(self, default=value)


@dataclass(frozen=True, kw_only=True, slots=True)
class LtuiSection:
    """The section as read; every field has a default, as the section itself is optional."""

    title: str = ""
    about: str = ""
    tags: tuple[str, ...] = ()
    knobs: tuple[Knob, ...] = ()
    stall: StallPolicy = field(default_factory=StallPolicy)
    checkpoint: CheckpointPolicy = field(default_factory=CheckpointPolicy)
    after_fit: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    cpu_ranks: int = 1
    restarts: int = 0


_TEXT = Argument(kinds=("text",), optional=False)
_SECONDS = Argument(kinds=("number",), low=0, optional=False)
_COUNT = Argument(kinds=("whole",), low=0, optional=False)
_POLICY = {
    "stall": {
        "floor_s": _SECONDS,
        "cap_s": _SECONDS,
        "factor": Argument(kinds=("number",), low=1, optional=False),
        "slow_phase_s": _SECONDS,
        "then": Argument(kinds=("text",), choices=STALL_ACTIONS, optional=False),
        "then_after_s": _SECONDS,
        "restarts": _COUNT,
        "on_verdict": Argument(kinds=("text", "list")),
        "on_verdict_level": Argument(kinds=("text",), choices=LEVELS, optional=False),
        "on_verdict_timeout_s": Argument(kinds=("number",), low=1, optional=False),
    },
    "checkpoint": {
        "every_s": _SECONDS,
        "keep": _COUNT,
        "best": Argument(kinds=("text",)),
        "mode": Argument(kinds=("text",), choices=("min", "max"), optional=False),
        "keep_best": Argument(kinds=("whole",), low=1, optional=False),
    },
}
_KNOB = {
    "key": _TEXT,
    "label": _TEXT,
    "type": Argument(kinds=("text",), choices=KNOB_TYPES, optional=False),
    "choices": Argument(kinds=("list",)),
    "min": Argument(kinds=("number",)),
    "max": Argument(kinds=("number",)),
    "help": _TEXT,
    "unit": _TEXT,
}
Policy = TypeVar("Policy", StallPolicy, CheckpointPolicy)


def read_section(value: Any) -> tuple[LtuiSection, list[Fault]]:
    """The section and every mistake in it. None (no section) is fine."""
    if value is None:
        return LtuiSection(), []
    if not isinstance(value, Mapping):
        return LtuiSection(), [Fault(path="ltui", what="must be a mapping.")]
    known = [f.name for f in fields(LtuiSection)]
    faults = [_unknown(f"ltui.{key}", known) for key in value if key not in known]
    section = LtuiSection(
        title=_text(value, "title", faults),
        about=" ".join(_text(value, "about", faults).split()),
        tags=_texts(value, "tags", faults),
        knobs=_knobs(value.get("knobs"), faults),
        stall=_policy(value, "stall", StallPolicy(), faults),
        checkpoint=_policy(value, "checkpoint", CheckpointPolicy(), faults),
        after_fit=_texts(value, "after_fit", faults, AFTER_FIT),
        requires=_texts(value, "requires", faults),
        cpu_ranks=_whole(value, "cpu_ranks", 1, faults),
        restarts=_whole(value, "restarts", 0, faults),
    )
    return section, faults


def _unknown(path: str, known: list[str]) -> Fault:
    name = path.rpartition(".")[2]
    near = closest_match(name, known)
    remedy = f"Did you mean `{near}`?" if near else f"Known keys: {', '.join(known)}."
    return Fault(path=path, what=f"unknown key `{name}`.", remedy=remedy)


def _text(value: Mapping[str, Any], key: str, faults: list[Fault]) -> str:
    text = value.get(key, "")
    if isinstance(text, str):
        return text
    faults.append(Fault(path=f"ltui.{key}", what=f"must be text (got {format_value(text)})."))
    return ""


def _texts(
    value: Mapping[str, Any], key: str, faults: list[Fault], choices: tuple[str, ...] = ()
) -> tuple[str, ...]:
    items = value.get(key, [])
    if not isinstance(items, list) or not all(isinstance(i, str) for i in items):
        faults.append(Fault(path=f"ltui.{key}", what="must be a list of strings."))
        return ()
    for index, item in enumerate(items):
        if choices and item not in choices:
            what = f"must be one of {', '.join(choices)} (got {format_value(item)})."
            faults.append(Fault(path=f"ltui.{key}.{index}", what=what))
    return tuple(items)


def _whole(value: Mapping[str, Any], key: str, low: int, faults: list[Fault]) -> int:
    """A number from ``low`` up, which is also what holds where none is given."""
    number = value.get(key, low)
    if type(number) is int and number >= low:
        return number
    what = f"must be a whole number, {low} or more (got {format_value(number)})."
    faults.append(Fault(path=f"ltui.{key}", what=what))
    return low


def _policy(value: Mapping[str, Any], key: str, default: Policy, faults: list[Fault]) -> Policy:
    given = value.get(key)
    if given is None:
        return default
    if not isinstance(given, Mapping):
        faults.append(Fault(path=f"ltui.{key}", what="must be a mapping."))
        return default
    found = _checked(given, _POLICY[key], f"ltui.{key}")
    if (what := on_verdict_fault(given.get("on_verdict"))) is not None:
        found.append(Fault(path=f"ltui.{key}.on_verdict", what=what))
    faults += found
    return default if found else replace(default, **given)


def on_verdict_fault(value: Any) -> str | None:
    """What is wrong with ``on_verdict``, which is a list of texts or a URL; None where nothing is.

    Whether the command exists is only known where the run is started.
    """
    if isinstance(value, (list, tuple)):
        texts = all(isinstance(item, str) for item in value)
        if value and texts and value[0]:
            return None
        return "a command must be a list of strings: the program, then its arguments."
    if isinstance(value, str):
        if re.fullmatch(r"https?://[^\s/?#]+\S*", value):
            return None
        return (
            f"must be a webhook's URL (http:// or https://) or a command as a list of strings "
            f"(got {format_value(value)})."
        )
    return None


def _checked(given: Mapping[Any, Any], arguments: Mapping[str, Argument], path: str) -> list[Fault]:
    faults = []
    for key, item in given.items():
        argument = arguments.get(str(key))
        if argument is None:
            faults.append(_unknown(f"{path}.{key}", list(arguments)))
        elif (fault := value_fault(f"{path}.{key}", item, argument)) is not None:
            faults.append(fault)
    return faults


def _knobs(items: Any, faults: list[Fault]) -> tuple[Knob, ...]:
    if items is None:
        return ()
    if not isinstance(items, list):
        faults.append(Fault(path="ltui.knobs", what="must be a list."))
        return ()
    knobs = []
    for index, item in enumerate(items):
        path = f"ltui.knobs.{index}"
        if not isinstance(item, Mapping):
            faults.append(Fault(path=path, what="must be a mapping with the key `key`."))
            continue
        found = _checked(item, _KNOB, path)
        if "key" not in item:
            found.append(Fault(path=path, what="the key `key` is missing."))
        elif item.get("type") == "choice" and not item.get("choices"):
            found.append(Fault(path=path, what="a knob of type choice needs a list of choices."))
        faults += found
        if not found:
            knobs.append(_knob(item))
    return tuple(knobs)


def _knob(item: Mapping[str, Any]) -> Knob:
    key = item["key"]
    plain = key.rpartition(".")[2].replace("_", " ")
    choices = tuple(str(c) for c in item.get("choices") or ())
    return Knob(**{**item, "label": item.get("label", plain), "choices": choices})
