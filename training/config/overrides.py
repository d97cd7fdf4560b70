"""``--set a.b=value``: changes to a configuration from the command line or a form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ltui.training.config.structure_check import TOP_LEVEL, closest_match, key_fault
from ltui.training.config.trainer_arguments import TRAINER_ARGUMENTS
from ltui.training.config.yaml_document import Document, iterate_values, parse_value, with_value
from ltui.training.problem import Problem, ProblemError


def split_override(override: str) -> tuple[str, Any]:
    """``trainer.devices=4`` as a dotted path and a YAML value. Raises ``ProblemError``."""
    key, sign, text = override.partition("=")
    key = key.strip()
    if not sign or not key or "" in key.split("."):
        raise ProblemError(
            Problem(
                where=f"--set {override}",
                what="must have the form KEY=VALUE.",
                remedy="For example: --set trainer.max_epochs=3",
            )
        )
    try:
        return key, parse_value(text)
    except ValueError as error:
        what = f"the value is invalid YAML: {error}."
        raise ProblemError(
            Problem(where=f"--set {key}", what=what, remedy="Quote the value: --set 'a.b=\"text\"'")
        ) from error


def overridden_paths(overrides: Iterable[str]) -> tuple[str, ...]:
    """The dotted paths that well-formed overrides set."""
    return tuple(o.partition("=")[0].strip() for o in overrides if "=" in o)


def apply_overrides(document: Mapping[str, Any], overrides: Iterable[str]) -> Document:
    """A copy of ``document`` with each ``KEY=VALUE`` set, in order.

    Raises ``ProblemError`` with every override that is malformed, or whose key can't exist, naming
    the nearest key that can.
    """
    result = dict(document)
    problems: list[Problem] = []
    for override in overrides:
        try:
            key, value = split_override(override)
        except ProblemError as error:
            problems += error.problems
            continue
        unknown = _unknown(key, document)
        if unknown is not None:
            problems.append(unknown)
            continue
        try:
            result = with_value(result, key, value)
        except KeyError as error:
            what = f"`{error.args[0]}` is not a mapping, so it has no keys that can be set."
            problems.append(Problem(where=f"--set {key}", what=what))
    if problems:
        raise ProblemError(*problems)
    return result


def _unknown(key: str, document: Mapping[str, Any]) -> Problem | None:
    fault = key_fault(key)
    if fault is None:
        return None
    meant = _meant(key, document)
    remedy = f"Did you mean `{meant}`?" if meant else fault.remedy
    return Problem(where=f"--set {key}", what=fault.what, remedy=remedy)


def _meant(key: str, document: Mapping[str, Any]) -> str | None:
    """The whole path that was probably meant: one with the same last name, else the most alike."""
    known = [path for path, _ in iterate_values(document)]
    known += [f"trainer.{name}" for name in TRAINER_ARGUMENTS] + list(TOP_LEVEL)
    known = [path for path in dict.fromkeys(known) if not path.startswith("ltui")]
    same = [path for path in known if path.rpartition(".")[2] == key.rpartition(".")[2]]
    if len(same) == 1:
        return same[0]
    return closest_match(key, same or known, cutoff=0.6)
