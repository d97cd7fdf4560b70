"""Form of a preset: the texts in its fields become a configuration and a list of errors.

Pure. The screen calls ``apply_form`` on every change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml
from msgspec import Struct

from ltui.training.config.device_selection import (
    UNKNOWN_MACHINE,
    Machine,
    free_count,
    parse_devices,
)
from ltui.training.config.ltui_section import Knob
from ltui.training.config.presets import Preset
from ltui.training.config.structure_check import find_faults, locate_fault
from ltui.training.config.trainer_arguments import Argument
from ltui.training.config.yaml_document import Document, parse_value, with_value
from ltui.training.problem import Problem

START_FROM = "start from"
"""Key of the field for another run's checkpoint, which is no key of the configuration."""


class FormResult(Struct, frozen=True, kw_only=True):
    """Configuration and errors that follow from a form."""

    document: Document
    """The preset's configuration with all valid fields applied."""
    overrides: tuple[str, ...]
    """Changed fields as arguments of ``--set``."""
    problems: tuple[Problem, ...]
    """Errors. ``where`` is the key of the field with the error, or else the place in the file."""


def field_texts(preset: Preset) -> dict[str, str]:
    """Return the initial text of each field, by knob key."""
    return {knob.key: field_text(knob.default) for knob in preset.knobs}


def field_text(value: Any) -> str:
    """Return a value as the text of a field."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ",".join(str(item) for item in value)
    return str(value)


def apply_form(
    preset: Preset, texts: Mapping[str, str], machine: Machine = UNKNOWN_MACHINE
) -> FormResult:
    """Return the configuration and errors for the texts of a form.

    ``texts`` maps knob keys to texts. A field without a text keeps the preset's value.
    """
    document = dict(preset.document)
    overrides: list[str] = []
    problems: list[Problem] = []
    for knob in preset.knobs:
        text = texts.get(knob.key)
        if text is None or text.strip() == field_text(knob.default):
            continue
        try:
            value = parse_field(knob, text)
            document = with_value(document, knob.key, value)
        except (ValueError, KeyError) as error:
            problems.append(Problem(where=knob.key, what=str(error.args[0])))
            continue
        overrides.append(f"{knob.key}={_one_line_yaml(value)}")
    keys = {knob.key for knob in preset.knobs}
    invalid_fields = {problem.where for problem in problems}
    for fault in find_faults(document, machine=machine, cpu_ranks=preset.cpu_ranks):
        if fault.path not in keys:
            problems.append(locate_fault(fault, preset.where, preset.lines))
        elif fault.path not in invalid_fields:
            problems.append(Problem(where=fault.path, what=fault.what, remedy=fault.remedy))
    return FormResult(document=document, overrides=tuple(overrides), problems=tuple(problems))


def parse_field(knob: Knob, text: str) -> Any:
    """Return the value of a field's text. Raise ``ValueError`` with a sentence."""
    text = text.strip()
    if knob.type == "choice":
        return _choice(knob, text)
    if not text:
        if knob.default is None or knob.type in ("str", "path"):
            return None if knob.default is None else ""
        raise ValueError("required")
    if knob.type in ("str", "path"):
        return text
    if knob.type == "devices":
        if text == "auto" or free_count(text):
            return text
        # In brackets, one number is a list, too: `[2]` is the GPU 2 and not two GPUs.
        devices = parse_devices(parse_value(text) if text.startswith("[") else text)
        return -1 if devices is None else devices
    try:
        value = parse_value(text)
    except ValueError:
        value = text
    if knob.type == "bool":
        if isinstance(value, bool):
            return value
        raise ValueError(f"must be true or false (got `{text}`)")
    kind = "whole" if knob.type == "int" else "number"
    number = Argument(kinds=(kind,), low=knob.min, high=knob.max, optional=False)
    # A number in quotes is text, although the Trainer accepts it.
    if isinstance(value, str) or number.fault(value) is not None:
        raise ValueError(f"must be {number.expected} (got `{text}`)")
    return value


def _choice(knob: Knob, text: str) -> Any:
    if text not in knob.choices:
        raise ValueError(f"must be one of {', '.join(knob.choices)} (got `{text}`)")
    value = parse_value(text)
    # A choice has the type of the preset's value: `16-mixed` is a string, `32` may be either.
    return text if isinstance(knob.default, str) or isinstance(value, (dict, list)) else value


def _one_line_yaml(value: Any) -> str:
    """Return a value as YAML on one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...").removesuffix("\n")
