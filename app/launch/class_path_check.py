"""Check the classes that a configuration names: they must exist and accept the given arguments.

The check uses the facts that ``app/launch/probe_script.py`` read from the sources without
importing them. Checks that need the real classes are in ``run_in_interpreter.py``.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from ltui.app.launch.training_interpreter import InterpreterReport
from ltui.training.config.yaml_document import Fault, parse_value


class ClassUse(Struct, frozen=True):
    """A ``class_path`` in a configuration."""

    place: str
    """Path in the configuration: ``model``, ``trainer.callbacks.0``."""
    class_path: str
    init_args: Mapping[str, Any]


def class_uses(document: object, place: str = "") -> list[ClassUse]:
    """Return every full class path in a configuration, with its arguments."""
    uses: list[ClassUse] = []
    if isinstance(document, Mapping):
        path = document.get("class_path")
        if isinstance(path, str) and "." in path:
            arguments = document.get("init_args")
            uses.append(ClassUse(place, path, arguments if isinstance(arguments, Mapping) else {}))
        for key, value in document.items():
            uses += class_uses(value, f"{place}.{key}" if place else str(key))
    elif isinstance(document, (list, tuple)):
        for index, value in enumerate(document):
            uses += class_uses(value, f"{place}.{index}")
    return uses


def class_faults(uses: Sequence[ClassUse], report: InterpreterReport) -> list[Fault]:
    """Return the classes that cannot be imported, and the arguments that an ``__init__`` does
    not accept."""
    faults: list[Fault] = []
    for use in uses:
        facts = report.classes.get(use.place) or {}
        if facts.get("missing"):
            faults.append(_missing_class(use, facts))
        elif facts.get("parameters") is not None:
            faults += _wrong_arguments(use, facts["parameters"])
    return faults


def _missing_class(use: ClassUse, facts: Mapping[str, Any]) -> Fault:
    because = {
        "module": f"no module named `{facts['name']}`",
        "source": str(facts["name"]),
        "class": f"{facts.get('file')} has no `{facts['name']}`",
    }[facts["missing"]]
    close_matches = difflib.get_close_matches(facts["name"], facts.get("known", ()), n=1)
    remedy = {
        "module": "Correct the path, or start ltui in the folder that contains the module.",
        "source": "Correct the file.",
        "class": f"Did you mean `{close_matches[0]}`?" if close_matches else "Correct the name.",
    }[facts["missing"]]
    message = f"`{use.class_path}` cannot be imported: {because}."
    return Fault(path=f"{use.place}.class_path", what=message, remedy=remedy)


def _wrong_arguments(use: ClassUse, parameters: Mapping[str, str]) -> list[Fault]:
    faults = []
    for name, value in use.init_args.items():
        path = f"{use.place}.init_args.{name}"
        if name not in parameters:
            close_matches = difflib.get_close_matches(str(name), parameters, n=1)
            takes = (
                f"Its arguments: {', '.join(parameters)}." if parameters else "It has no arguments."
            )
            message = f"`{use.class_path}` has no argument of that name."
            remedy = f"Did you mean `{close_matches[0]}`?" if close_matches else takes
            faults.append(Fault(path=path, what=message, remedy=remedy))
        elif not value_fits(value, parameters[name]):
            message = (
                f"must be {_TYPE_WORDS.get(parameters[name], parameters[name])} (got {value!r})."
            )
            faults.append(Fault(path=path, what=message))
    return faults


_TYPE_WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false"}


def value_fits(value: object, annotation: str) -> bool:
    """Return whether ``value`` can have the annotated type.

    Only numbers and booleans are checked; any other annotation gives True. A string that reads as
    such a value fits, because LightningCLI converts it.
    """
    kinds = {kind.strip() for kind in annotation.split("|")}
    if not kinds <= {"int", "float", "bool", "None"}:
        return True
    if isinstance(value, str):
        try:
            value = parse_value(value)
        except ValueError:
            return False
    if value is None or isinstance(value, bool):
        return ("None" if value is None else "bool") in kinds
    if isinstance(value, int):
        return bool(kinds & {"int", "float"})
    return isinstance(value, float) and "float" in kinds
