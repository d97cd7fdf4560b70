"""Reader of the ``ltui:`` section of a preset: the form, and how the run is supervised. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, ValidationError, convert, field
from msgspec.structs import replace

from ltui.training.config.run_spec import LEVELS, STALL_ACTIONS, CheckpointPolicy, StallPolicy
from ltui.training.config.structure_check import Argument, closest_match, value_fault
from ltui.training.config.yaml_document import Fault, format_value
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
    min: int | float | None = None
    max: int | float | None = None
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
    freeze: bool = False
    """True if the ranks train with a copy of the code, made when the run was created."""


_TEXT = Argument(kinds=("text",), optional=False)
_TEXTS = Argument(kinds=("texts",), optional=False)
_STAGE = Argument(kinds=("text",), choices=AFTER_FIT, optional=False)
_SECONDS = Argument(kinds=("number",), low=0, optional=False)
_COUNT = Argument(kinds=("whole",), low=0, optional=False)
_SECTION = {
    "title": _TEXT,
    "about": _TEXT,
    "tags": _TEXTS,
    "knobs": Argument(kinds=("list",)),
    "stall": Argument(kinds=("mapping",)),
    "checkpoint": Argument(kinds=("mapping",)),
    "after_fit": Argument(kinds=("list",), optional=False),
    "requires": _TEXTS,
    "cpu_ranks": Argument(kinds=("whole",), low=1, optional=False),
    "restarts": _COUNT,
    "mirror": Argument(kinds=("text",)),
    "freeze": Argument(kinds=("truth",), optional=False),
}
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


def read_section(value: Any) -> tuple[LtuiSection, list[Fault]]:
    """Return the section and all errors in it. A missing section (None) is no error.

    A key with an error has its default.
    """
    if value is None:
        return LtuiSection(), []
    if not isinstance(value, Mapping):
        return LtuiSection(), [Fault(path="ltui", what="must be a mapping.")]
    faults = _value_faults(value, _SECTION, "ltui")
    for key, arguments in _POLICY.items():
        if isinstance(policy := value.get(key), Mapping):
            faults += _value_faults(policy, arguments, f"ltui.{key}")
            if (text := on_verdict_fault(policy.get("on_verdict"))) is not None:
                faults.append(Fault(path=f"ltui.{key}.on_verdict", what=text))
    stages = value.get("after_fit")
    for index, item in enumerate(stages if isinstance(stages, list) else ()):
        if (fault := value_fault(f"ltui.after_fit.{index}", item, _STAGE)) is not None:
            faults.append(fault)
    knobs = value.get("knobs")
    for index, item in enumerate(knobs if isinstance(knobs, list) else ()):
        faults += _knob_faults(item, f"ltui.knobs.{index}")
    mirror = value.get("mirror")
    if isinstance(mirror, str) and not re.fullmatch(MIRROR_PATTERN, mirror):
        text = f"must be tensorboard or tensorboard:FOLDER (got {format_value(mirror)})."
        faults.append(Fault(path="ltui.mirror", what=text))
    wrong_keys = {fault.path.split(".")[1] for fault in faults}
    given = {k: v for k, v in value.items() if v is not None and str(k) not in wrong_keys}
    if "knobs" in given:
        given["knobs"] = [_with_label(item) for item in given["knobs"]]
    try:
        section = convert(given, LtuiSection, strict=False)
    except ValidationError as error:
        return LtuiSection(), [*faults, Fault(path="ltui", what=f"{error}.")]
    return replace(section, about=" ".join(section.about.split())), faults


def unknown_section_key(path: str, known_keys: Sequence[str]) -> Fault:
    """Return the error for an unknown key, with the nearest known one or all of them."""
    name = path.rpartition(".")[2]
    near = closest_match(name, known_keys)
    remedy = f"Did you mean `{near}`?" if near else f"Known keys: {', '.join(known_keys)}."
    return Fault(path=path, what=f"unknown key `{name}`.", remedy=remedy)


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
        elif isinstance(item, str) and not _is_read(item, argument):
            what = f"must be {argument.expected}, without quotes (got {format_value(item)})."
            faults.append(Fault(path=f"{path}.{key}", what=what))
    return faults


def _is_read(text: str, argument: Argument) -> bool:
    """Return False for a number in quotes that is not decimal: it is checked and not converted."""
    number = {"whole": int, "number": float}.get(argument.kinds[0])
    try:
        return number is None or convert(text, number, strict=False) is not None
    except ValidationError:
        return False


def _knob_faults(item: Any, path: str) -> list[Fault]:
    if not isinstance(item, Mapping):
        return [Fault(path=path, what="must be a mapping with the key `key`.")]
    faults = _value_faults(item, _KNOB, path)
    if "key" not in item:
        faults.append(Fault(path=path, what="the key `key` is missing."))
    elif item.get("type") == "choice" and not item.get("choices"):
        faults.append(Fault(path=path, what="a knob of type choice needs a list of choices."))
    return faults


def _with_label(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return a knob with a label, by default from its key, and with choices that are texts."""
    plain = item["key"].rpartition(".")[2].replace("_", " ")
    given = {key: value for key, value in item.items() if value is not None}
    return {"label": plain, **given, "choices": [str(c) for c in item.get("choices") or ()]}
