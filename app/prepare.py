"""From what a person typed to a configuration that can be launched: loaded, overridden, checked."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ltui.app.interpreter import (
    NEEDED,
    Findings,
    choose_python,
    class_problems,
    class_uses,
    lacking,
    look,
    needs_of,
)
from ltui.training.problem import ProblemError
from ltui.training.run.check import check_document
from ltui.training.run.overrides import apply_overrides
from ltui.training.run.presets import Preset, load_preset


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A preset with its overrides, and the interpreter that would train it."""

    preset: Preset
    document: Mapping[str, Any]
    overrides: tuple[str, ...]
    python: str
    findings: Findings


def prepare(name: str, overrides: Sequence[str], named_python: str | None) -> Prepared:
    """What can be told in a tenth of a second. ``ProblemError`` with all that is wrong."""
    preset = load_preset(name, Path.cwd())
    document = apply_overrides(preset.document, list(overrides))
    where = preset.name
    problems = list(check_document(document, where))
    python = choose_python(named_python, os.environ)
    uses = class_uses(document)
    findings = look(
        python,
        list(NEEDED),
        {use.place: use.class_path for use in uses},
        folders=[*folders_of(preset), str(Path.cwd())],
    )
    missing = lacking(findings, {**NEEDED, **needs_of(findings)})
    # Without torch nearly every class is missing: that would only bury the reason.
    problems += missing or class_problems(uses, findings, where)
    if problems:
        raise ProblemError(*problems)
    return Prepared(
        preset=preset,
        document=document,
        overrides=tuple(overrides),
        python=python,
        findings=findings,
    )


def folders_of(preset: Preset) -> list[str]:
    """Where a configuration file's classes may stand beside it."""
    return [str(Path(preset.path).resolve().parent)] if preset.path is not None else []
