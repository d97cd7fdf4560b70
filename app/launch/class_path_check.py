"""The classes that a configuration names: whether they are there, and take what they are given.

Uses what ``app/launch/interpreter_probe.py`` read in their sources, without importing them. What
needs the real classes is checked by ``app/launch/real_class_check.py``.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ltui.app.launch.training_interpreter import InterpreterReport
from ltui.training.config.yaml_document import Fault, parse_value


@dataclass(frozen=True, slots=True)
class ClassUse:
    """A ``class_path`` in a configuration."""

    place: str
    """``model``, ``trainer.callbacks.0``."""
    class_path: str
    init_args: Mapping[str, Any]


def class_uses(document: object, place: str = "") -> list[ClassUse]:
    """Every full class path in a configuration, with its arguments."""
    found: list[ClassUse] = []
    if isinstance(document, Mapping):
        path = document.get("class_path")
        if isinstance(path, str) and "." in path:
            arguments = document.get("init_args")
            found.append(ClassUse(place, path, arguments if isinstance(arguments, Mapping) else {}))
        for key, value in document.items():
            found += class_uses(value, f"{place}.{key}" if place else str(key))
    elif isinstance(document, (list, tuple)):
        for index, value in enumerate(document):
            found += class_uses(value, f"{place}.{index}")
    return found


def class_faults(uses: Sequence[ClassUse], findings: InterpreterReport) -> list[Fault]:
    """Classes that can't be imported, and arguments that their ``__init__`` does not take."""
    faults: list[Fault] = []
    for use in uses:
        known = findings.classes.get(use.place) or {}
        if known.get("missing"):
            faults.append(_missing_class(use, known))
        elif known.get("parameters") is not None:
            faults += _wrong_arguments(use, known["parameters"])
    return faults


def _missing_class(use: ClassUse, known: Mapping[str, Any]) -> Fault:
    because = {
        "module": f"no module named `{known['name']}`",
        "source": str(known["name"]),
        "class": f"{known.get('file')} has no `{known['name']}`",
    }[known["missing"]]
    near = difflib.get_close_matches(known["name"], known.get("known", ()), n=1)
    remedy = {
        "module": "Correct the path, or start ltui in the folder that contains the module.",
        "source": "Correct the file.",
        "class": f"Did you mean `{near[0]}`?" if near else "Correct the name.",
    }[known["missing"]]
    what = f"`{use.class_path}` cannot be imported: {because}."
    return Fault(path=f"{use.place}.class_path", what=what, remedy=remedy)


def _wrong_arguments(use: ClassUse, parameters: Mapping[str, str]) -> list[Fault]:
    faults = []
    for name, value in use.init_args.items():
        path = f"{use.place}.init_args.{name}"
        if name not in parameters:
            near = difflib.get_close_matches(str(name), parameters, n=1)
            takes = (
                f"Its arguments: {', '.join(parameters)}." if parameters else "It has no arguments."
            )
            what = f"`{use.class_path}` has no argument of that name."
            remedy = f"Did you mean `{near[0]}`?" if near else takes
            faults.append(Fault(path=path, what=what, remedy=remedy))
        elif not value_fits(value, parameters[name]):
            what = f"must be {_TYPE_WORDS.get(parameters[name], parameters[name])} (got {value!r})."
            faults.append(Fault(path=path, what=what))
    return faults


_TYPE_WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false"}


def value_fits(value: object, annotation: str) -> bool:
    """Whether ``value`` can be of the annotated type; True for all but plain numbers and truths.

    A text that reads as such a value fits, as LightningCLI takes it.
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
