"""The configuration of a preset as text that a person edits, with its ``ltui`` section. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ltui.training.config.device_selection import Machine
from ltui.training.config.ltui_section import read_section
from ltui.training.config.presets import Preset, parse_preset
from ltui.training.config.run_spec import CheckpointPolicy, StallPolicy
from ltui.training.config.structure_check import check_document, locate_fault
from ltui.training.config.yaml_document import Document, read_document, resolve, write_document
from ltui.training.problem import Problem, ProblemError


def editor_text(preset: Preset, document: Mapping[str, Any]) -> str:
    """The YAML of ``document``, and of the section ``ltui`` with every policy in force."""
    policies = {
        "restarts": preset.restarts,
        "checkpoint": _plain(preset.checkpoint),
        "stall": _plain(preset.stall),
    }
    rest = {key: value for key, value in preset.section.items() if key not in policies}
    return write_document({**resolve(document)[0], "ltui": {**policies, **rest}})


def _plain(policy: CheckpointPolicy | StallPolicy) -> Document:
    values = asdict(policy)
    return {key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}


def text_problems(preset: Preset, text: str, machine: Machine) -> list[Problem]:
    """Every mistake in ``text``, with its line."""
    try:
        source = read_document(text, preset.where)
    except ProblemError as error:
        return list(error.problems)
    section, found = read_section(source.values.get("ltui"))
    problems = [locate_fault(fault, preset.where, source.lines) for fault in found]
    return problems + check_document(
        source.values,
        preset.where,
        lines=source.lines,
        machine=machine,
        cpu_ranks=section.cpu_ranks,
    )


def preset_from_text(preset: Preset, text: str) -> Preset:
    """``preset`` as ``text`` describes it: its configuration, fields and policies."""
    return parse_preset(text, name=preset.name, path=preset.path, shipped=preset.shipped)
