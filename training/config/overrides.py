"""``--set a.b=value``: changes to a configuration from the command line or a form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ltui.training.config.structure_check import TOP_LEVEL, closest_match, key_fault
from ltui.training.config.trainer_arguments import TRAINER_ARGUMENTS
from ltui.training.config.yaml_document import Document, iterate_values, parse_value, with_value
from ltui.training.problem import Problem, ProblemError


def split_override(override: str) -> tuple[str, Any]:
    """Split ``trainer.devices=4`` into a dotted path and a YAML value. Raise ``ProblemError``."""
    key, sign, text = override.partition("=")
    key = key.strip()
    if not sign or not key or "" in key.split("."):
        raise ProblemError.of(
            where=f"--set {override}",
            what="must have the form KEY=VALUE.",
            remedy="For example: --set trainer.max_epochs=3",
        )
    try:
        return key, parse_value(text)
    except ValueError as error:
        message = f"the value is invalid YAML: {error}."
        raise ProblemError.of(
            where=f"--set {key}", what=message, remedy="Quote the value: --set 'a.b=\"text\"'"
        ) from error


def overridden_paths(overrides: Iterable[str]) -> tuple[str, ...]:
    """Return the dotted paths that valid overrides set."""
    return tuple(o.partition("=")[0].strip() for o in overrides if "=" in o)


def apply_overrides(document: Mapping[str, Any], overrides: Iterable[str]) -> Document:
    """Return a copy of ``document`` with each ``KEY=VALUE`` set, in order.

    Raise ``ProblemError`` with all overrides that are malformed or have a key that cannot exist.
    The problem names the most similar valid key.
    """
    result = dict(document)
    problems: list[Problem] = []
    for override in overrides:
        try:
            key, value = split_override(override)
        except ProblemError as error:
            problems += error.problems
            continue
        unknown = _unknown_key(key, document)
        if unknown is not None:
            problems.append(unknown)
            continue
        try:
            result = with_value(result, key, value)
        except KeyError as error:
            text = f"`{error.args[0]}` is not a mapping, so it has no keys that can be set."
            problems.append(Problem(where=f"--set {key}", what=text))
    if problems:
        raise ProblemError(*problems)
    return result


def _unknown_key(key: str, document: Mapping[str, Any]) -> Problem | None:
    fault = key_fault(key)
    if fault is None:
        return None
    suggestion = _suggestion(key, document)
    remedy = f"Did you mean `{suggestion}`?" if suggestion else fault.remedy
    return Problem(where=f"--set {key}", what=fault.what, remedy=remedy)


def _suggestion(key: str, document: Mapping[str, Any]) -> str | None:
    """Return the path that was probably meant.

    It is the only one with the same last name, or else the most similar one.
    """
    paths = [path for path, _ in iterate_values(document)]
    paths += [f"trainer.{name}" for name in TRAINER_ARGUMENTS] + list(TOP_LEVEL)
    paths = [path for path in dict.fromkeys(paths) if not path.startswith("ltui")]
    same_name = [path for path in paths if path.rpartition(".")[2] == key.rpartition(".")[2]]
    if len(same_name) == 1:
        return same_name[0]
    return closest_match(key, same_name or paths, cutoff=0.6)
