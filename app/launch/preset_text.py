"""The configuration of a preset as YAML text that a person edits, with its ``ltui`` section.
Pure."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import SequenceMatcher
from typing import Any

from msgspec import to_builtins

from ltui.training.config.device_selection import Machine
from ltui.training.config.ltui_section import read_section
from ltui.training.config.presets import Preset, parse_preset
from ltui.training.config.run_spec import CheckpointPolicy, StallPolicy
from ltui.training.config.structure_check import find_faults, locate_fault
from ltui.training.config.yaml_document import Document, read_document, resolve, write_document
from ltui.training.problem import Problem, ProblemError


def editor_text(preset: Preset, document: Mapping[str, Any]) -> str:
    """Return ``document`` as YAML, with a section ``ltui`` that shows every policy in effect."""
    policies = {
        "restarts": preset.restarts,
        "checkpoint": _as_document(preset.checkpoint),
        "stall": _as_document(preset.stall),
    }
    other_keys = {key: value for key, value in preset.section.items() if key not in policies}
    return write_document({**resolve(document)[0], "ltui": {**policies, **other_keys}})


def changed_lines(before: str, after: str) -> frozenset[int]:
    """Return the numbers (from 0) of the lines of ``after`` that ``before`` does not have."""
    blocks = SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    same = {
        n for _, start, size in blocks.get_matching_blocks() for n in range(start, start + size)
    }
    return frozenset(range(len(after.splitlines()))) - same


def _as_document(policy: CheckpointPolicy | StallPolicy) -> Document:
    values = to_builtins(policy)
    return {key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}


def text_problems(preset: Preset, text: str, machine: Machine) -> list[Problem]:
    """Return every configuration error in ``text``, with its line."""
    try:
        source = read_document(text, preset.where)
    except ProblemError as error:
        return list(error.problems)
    section, section_faults = read_section(source.values.get("ltui"))
    faults = find_faults(source.values, machine=machine, cpu_ranks=section.cpu_ranks)
    return [locate_fault(f, preset.where, source.lines) for f in (*section_faults, *faults)]


def preset_from_text(preset: Preset, text: str) -> Preset:
    """Return ``preset`` with the configuration, fields and policies of ``text``."""
    return parse_preset(text, name=preset.name, path=preset.path, shipped=preset.shipped)
