"""A preset whose configuration was edited on the screen. Pure."""

from __future__ import annotations

from dataclasses import replace

from ltui.training.problem import Problem, ProblemError
from ltui.training.run.check import check_document
from ltui.training.run.devices import Machine
from ltui.training.run.document import get, read_document
from ltui.training.run.presets import Preset


def faults(preset: Preset, text: str, machine: Machine) -> list[Problem]:
    """Every mistake in ``text``, with its line."""
    try:
        source = read_document(text, preset.where)
    except ProblemError as error:
        return list(error.problems)
    return check_document(
        source.values,
        preset.where,
        lines=source.lines,
        machine=machine,
        cpu_ranks=preset.cpu_ranks,
    )


def edited(preset: Preset, text: str) -> Preset:
    """``preset`` with the configuration in ``text``; its fields show what stands there now."""
    source = read_document(text, preset.where)
    document = {key: value for key, value in source.values.items() if key != "ltui"}
    knobs = tuple(knob.with_default(get(document, knob.key)) for knob in preset.knobs)
    return replace(preset, document=document, knobs=knobs, lines=source.lines)
