"""Reader of the ``ltui:`` section of a preset: the form, and how the run is supervised. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from ltui.training.config.run_spec import STALL_ACTIONS, CheckpointPolicy, StallPolicy
from ltui.training.config.structure_check import closest_match, format_value, value_fault
from ltui.training.config.trainer_arguments import Argument
from ltui.training.config.verdict_severity import LEVELS
from ltui.training.config.yaml_document import Fault
from ltui.training.shared.defaults import MIRROR_PATTERN

KNOB_TYPES = ("int", "float", "str", "bool", "choice", "path", "devices")
AFTER_FIT = ("validate", "test")


class Knob(Struct, frozen=True, kw_only=True):
    """One field of the form: a setting that users often change."""

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
    """Unit of a number: ``epochs``, ``samples per rank``."""
    default: Any = None
    """Value in the preset's configuration."""

    def with_default(self, value: Any) -> Knob:
        return replace(self, default=value)


class LtuiSection(Struct, frozen=True, kw_only=True):
    """The section as read. Every field has a default because the section is optional."""

    title: str = ""
    about: str = ""
    tags: tuple[str, ...] = ()
    knobs: tuple[Knob, ...] = ()
    stall: StallPolicy = field(default_factory=StallPolicy)
    checkpoint: CheckpointPolicy = field(default_factory=CheckpointPolicy)
    after_fit: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    """Distributions that the ranks' interpreter needs besides torch and Lightning."""
    cpu_ranks: int = 1
    """Number of ranks if ``devices`` is ``auto`` and there is no GPU."""
    restarts: int = 0
    """Maximum number of automatic restarts from the last good checkpoint after a crash."""
    mirror: str | None = None
    """Where the values are also written while the run goes on: ``tensorboard[:FOLDER]``."""


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
    """Return the section and all errors in it. A missing section (None) is no error."""
    if value is None:
        return LtuiSection(), []
    if not isinstance(value, Mapping):
        return LtuiSection(), [Fault(path="ltui", what="must be a mapping.")]
    known_keys = LtuiSection.__struct_fields__
    faults = [
        unknown_section_key(f"ltui.{key}", known_keys) for key in value if key not in known_keys
    ]
    section = LtuiSection(
        title=_read_text(value, "title", faults),
        about=" ".join(_read_text(value, "about", faults).split()),
        tags=_read_texts(value, "tags", faults),
        knobs=_read_knobs(value.get("knobs"), faults),
        stall=_read_policy(value, "stall", StallPolicy(), faults),
        checkpoint=_read_policy(value, "checkpoint", CheckpointPolicy(), faults),
        after_fit=_read_texts(value, "after_fit", faults, AFTER_FIT),
        requires=_read_texts(value, "requires", faults),
        cpu_ranks=_read_int(value, "cpu_ranks", 1, faults),
        restarts=_read_int(value, "restarts", 0, faults),
        mirror=_read_mirror(value.get("mirror"), faults),
    )
    return section, faults


def unknown_section_key(path: str, known_keys: Sequence[str]) -> Fault:
    """Return the error for an unknown key, with the nearest known one or all of them."""
    name = path.rpartition(".")[2]
    near = closest_match(name, known_keys)
    remedy = f"Did you mean `{near}`?" if near else f"Known keys: {', '.join(known_keys)}."
    return Fault(path=path, what=f"unknown key `{name}`.", remedy=remedy)


def _read_text(value: Mapping[str, Any], key: str, faults: list[Fault]) -> str:
    text = value.get(key, "")
    if isinstance(text, str):
        return text
    faults.append(Fault(path=f"ltui.{key}", what=f"must be text (got {format_value(text)})."))
    return ""


def _read_texts(
    value: Mapping[str, Any], key: str, faults: list[Fault], choices: tuple[str, ...] = ()
) -> tuple[str, ...]:
    items = value.get(key, [])
    if not isinstance(items, list) or not all(isinstance(i, str) for i in items):
        faults.append(Fault(path=f"ltui.{key}", what="must be a list of strings."))
        return ()
    for index, item in enumerate(items):
        if choices and item not in choices:
            text = f"must be one of {', '.join(choices)} (got {format_value(item)})."
            faults.append(Fault(path=f"ltui.{key}.{index}", what=text))
    return tuple(items)


def _read_int(value: Mapping[str, Any], key: str, low: int, faults: list[Fault]) -> int:
    """Return an integer of at least ``low``; ``low`` is also the default."""
    number = value.get(key, low)
    if type(number) is int and number >= low:
        return number
    text = f"must be a whole number, {low} or more (got {format_value(number)})."
    faults.append(Fault(path=f"ltui.{key}", what=text))
    return low


def _read_mirror(value: Any, faults: list[Fault]) -> str | None:
    if value is None or (isinstance(value, str) and re.fullmatch(MIRROR_PATTERN, value)):
        return value
    text = f"must be tensorboard or tensorboard:FOLDER (got {format_value(value)})."
    faults.append(Fault(path="ltui.mirror", what=text))
    return None


def _read_policy(
    value: Mapping[str, Any], key: str, default: Policy, faults: list[Fault]
) -> Policy:
    values = value.get(key)
    if values is None:
        return default
    if not isinstance(values, Mapping):
        faults.append(Fault(path=f"ltui.{key}", what="must be a mapping."))
        return default
    policy_faults = _value_faults(values, _POLICY[key], f"ltui.{key}")
    if (text := on_verdict_fault(values.get("on_verdict"))) is not None:
        policy_faults.append(Fault(path=f"ltui.{key}.on_verdict", what=text))
    faults += policy_faults
    return default if policy_faults else replace(default, **values)


def on_verdict_fault(value: Any) -> str | None:
    """Return what is wrong with ``on_verdict``, a list of strings or a URL; None if it is valid.

    Whether the command exists is checked when the run is launched.
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


def _value_faults(
    values: Mapping[Any, Any], arguments: Mapping[str, Argument], path: str
) -> list[Fault]:
    faults = []
    for key, item in values.items():
        argument = arguments.get(str(key))
        if argument is None:
            faults.append(unknown_section_key(f"{path}.{key}", list(arguments)))
        elif (fault := value_fault(f"{path}.{key}", item, argument)) is not None:
            faults.append(fault)
    return faults


def _read_knobs(items: Any, faults: list[Fault]) -> tuple[Knob, ...]:
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
        knob_faults = _value_faults(item, _KNOB, path)
        if "key" not in item:
            knob_faults.append(Fault(path=path, what="the key `key` is missing."))
        elif item.get("type") == "choice" and not item.get("choices"):
            knob_faults.append(
                Fault(path=path, what="a knob of type choice needs a list of choices.")
            )
        faults += knob_faults
        if not knob_faults:
            knobs.append(_to_knob(item))
    return tuple(knobs)


def _to_knob(item: Mapping[str, Any]) -> Knob:
    key = item["key"]
    plain = key.rpartition(".")[2].replace("_", " ")
    choices = tuple(str(c) for c in item.get("choices") or ())
    return Knob(**{**item, "label": item.get("label", plain), "choices": choices})
