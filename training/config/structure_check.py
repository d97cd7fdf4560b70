"""Checks a configuration at once, without torch: structure, types, ranges, unknown keys, devices.

Every mistake is found in one go. What only the real classes can tell (their own parameters) is
checked elsewhere. Pure: what the machine has is an argument.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ltui.training.config.device_selection import (
    UNKNOWN_MACHINE,
    Machine,
    choose_devices,
    free_count,
)
from ltui.training.config.node_environment import choose_nodes
from ltui.training.config.trainer_arguments import TRAINER_ARGUMENTS, Argument
from ltui.training.config.yaml_document import Fault, iterate_values, resolve
from ltui.training.problem import Problem

TOP_LEVEL = (
    "seed_everything",
    "trainer",
    "model",
    "data",
    "optimizer",
    "lr_scheduler",
    "ckpt_path",
)
_ALSO_TOP_LEVEL = frozenset({"ltui", "weights_only", "verbose", "return_predictions"})
_CLASS_KEYS = ("class_path", "init_args", "dict_kwargs")
_CLASS_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
_PLAIN = (str, int, float, bool, type(None))


def check_document(
    document: Mapping[str, Any],
    where: str,
    *,
    lines: Mapping[str, int] | None = None,
    overridden: Iterable[str] = (),
    machine: Machine = UNKNOWN_MACHINE,
    cpu_ranks: int = 1,
) -> list[Problem]:
    """Every mistake of a LightningCLI configuration, with its place.

    ``lines`` gives the line of each dotted path, ``overridden`` the paths that ``--set`` gave, so
    that a mistake is reported where it was made.
    """
    faults = find_faults(document, machine=machine, cpu_ranks=cpu_ranks)
    return [locate_fault(fault, where, lines or {}, overridden) for fault in faults]


def find_faults(
    document: Mapping[str, Any], *, machine: Machine = UNKNOWN_MACHINE, cpu_ranks: int = 1
) -> list[Fault]:
    """As ``check_document``, by dotted path."""
    document = {k: v for k, v in document.items() if k != "ltui"}
    resolved, faults = resolve(document)
    faults += _odd_values(resolved)
    faults += _top_level(resolved)
    trainer = resolved.get("trainer")
    if isinstance(trainer, Mapping):
        found = _trainer(trainer)
        faults += found
        if not {"trainer.devices", "trainer.accelerator"} & {f.path for f in found}:
            faults += choose_devices(trainer, machine, cpu_ranks)[1]
        faults += choose_nodes(trainer, machine.node)[1]
    elif trainer is not None:
        faults.append(Fault(path="trainer", what="must be a mapping of the Trainer's arguments."))
    for key in ("model", "data"):
        if key in resolved and (key == "model" or resolved[key] is not None):
            faults += class_faults(resolved[key], key, dotted=True)
    for key in ("optimizer", "lr_scheduler"):
        if resolved.get(key) is not None:
            faults += class_faults(resolved[key], key, dotted=False)
    return faults


def locate_fault(
    fault: Fault, where: str, lines: Mapping[str, int], overridden: Iterable[str] = ()
) -> Problem:
    """The fault with the place that a person looks at: ``my.yaml:12 trainer.max_epoch``."""
    if any(_within(fault.path, key) for key in overridden):
        place = f"--set {fault.path}"
    else:
        line = _line(fault.path, lines)
        place = where + (f":{line}" if line else "") + (f" {fault.path}" if fault.path else "")
    return Problem(where=place, what=fault.what, remedy=fault.remedy)


def _within(path: str, key: str) -> bool:
    return path == key or path.startswith(key + ".")


def _line(path: str, lines: Mapping[str, int]) -> int | None:
    """The line of the path, or of the nearest thing around it that has one."""
    while path:
        if path in lines:
            return lines[path]
        path = path.rpartition(".")[0]
    return None


def closest_match(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return found[0] if found else None


def unknown_key(path: str, known: Iterable[str]) -> Fault:
    """For a key that isn't among ``known`` (names at its own depth)."""
    parent, _, name = path.rpartition(".")
    near = closest_match(name, known)
    remedy = f"Did you mean `{parent + '.' if parent else ''}{near}`?" if near else None
    if remedy is None and not parent:
        inner = closest_match(name, TRAINER_ARGUMENTS, cutoff=0.8)
        remedy = f"Did you mean `trainer.{inner}`?" if inner else f"Known keys: {', '.join(known)}."
    return Fault(path=path, what=f"unknown key `{name}`.", remedy=remedy)


def key_fault(path: str) -> Fault | None:
    """Whether a dotted path can exist at all, as far as that is known without the classes."""
    parts = path.split(".")
    if parts[0] not in TOP_LEVEL and parts[0] not in _ALSO_TOP_LEVEL:
        return unknown_key(parts[0], TOP_LEVEL)
    if parts[0] == "trainer" and len(parts) > 1 and parts[1] not in TRAINER_ARGUMENTS:
        return unknown_key(".".join(parts[:2]), TRAINER_ARGUMENTS)
    if parts[0] in ("model", "data") and len(parts) > 1 and parts[1] not in _CLASS_KEYS:
        near = closest_match(parts[1], _CLASS_KEYS)
        rest = ".".join(parts[2:])
        meant = f"{parts[0]}.{near}{'.' + rest if rest else ''}" if near else (
            f"{parts[0]}.init_args.{'.'.join(parts[1:])}"
        )  # fmt: skip
        what = f"unknown key `{parts[1]}`."
        return Fault(path=path, what=what, remedy=f"Did you mean `{meant}`?")
    return None


def _top_level(document: Mapping[str, Any]) -> list[Fault]:
    faults = [
        unknown_key(str(key), TOP_LEVEL)
        for key in document
        if key not in TOP_LEVEL and key not in _ALSO_TOP_LEVEL
    ]
    if "model" not in document:
        remedy = "Name your LightningModule: `class_path: my_package.MyModel`."
        faults.append(Fault(path="model", what="required key is missing.", remedy=remedy))
    seed = document.get("seed_everything", True)
    if not isinstance(seed, (bool, int)) and seed is not None:
        what = f"must be a whole number, true or false (got {format_value(seed)})."
        faults.append(Fault(path="seed_everything", what=what))
    return faults


def _odd_values(document: Mapping[str, Any]) -> list[Fault]:
    """Values that a configuration can't hold: sets, dates, bytes, keys that aren't words."""
    faults = []
    for path, value in iterate_values(document):
        if isinstance(value, Mapping):
            odd = [k for k in value if not isinstance(k, str)]
            if odd and path.split(".")[0] == "trainer":
                faults.append(
                    Fault(path=path, what=f"the key {format_value(odd[0])} is not a string.")
                )
        elif not isinstance(value, (*_PLAIN, list)):
            what = f"a value of type {type(value).__name__} is not allowed in a configuration."
            faults.append(Fault(path=path, what=what))
    return faults


def _trainer(trainer: Mapping[str, Any]) -> list[Fault]:
    faults = []
    for key, value in trainer.items():
        argument = TRAINER_ARGUMENTS.get(str(key))
        path = f"trainer.{key}"
        if argument is None:
            faults.append(unknown_key(path, TRAINER_ARGUMENTS))
            continue
        fault = value_fault(path, value, argument)
        if fault is not None:
            faults.append(fault)
        elif "class" in argument.kinds and isinstance(value, (Mapping, list)):
            faults += _classes(value, path)
    return faults + _devices_form(trainer) + _not_here(trainer)


def value_fault(path: str, value: Any, argument: Argument) -> Fault | None:
    expected = argument.fault(value)
    if expected is None:
        return None
    remedy = None
    if isinstance(value, str) and argument.choices:
        near = closest_match(value, [str(c) for c in argument.choices])
        remedy = f"Did you mean `{near}`?" if near else None
    return Fault(path=path, what=f"must be {expected} (got {format_value(value)}).", remedy=remedy)


def _devices_form(trainer: Mapping[str, Any]) -> list[Fault]:
    devices = trainer.get("devices", "auto")
    what = None
    if isinstance(devices, str) and devices != "auto":
        if not re.fullmatch(r"\s*(-1|\d+(\s*,\s*\d+)*)\s*,?\s*", devices) and not free_count(
            devices
        ):
            what = (
                "must be auto, a number of devices, a list of devices, or free:2 for two free "
                f"GPUs (got {format_value(devices)})."
            )
    elif isinstance(devices, list):
        if not devices or not all(type(d) is int and d >= 0 for d in devices):
            what = f"must be a list of device numbers, 0 or more (got {format_value(devices)})."
        elif len(set(devices)) < len(devices):
            what = "the list contains a device twice."
    if devices == 0 or devices == "0":
        what = "must be at least 1: a run needs a device."
    return [] if what is None else [Fault(path="trainer.devices", what=what)]


def _not_here(trainer: Mapping[str, Any]) -> list[Fault]:
    """What Trainer accepts but ranks started by torch elastic can't be."""
    faults = []
    strategy = trainer.get("strategy")
    if isinstance(strategy, str) and re.search(r"_(spawn|fork|notebook)", strategy):
        plain = re.sub(r"_(spawn|fork|notebook)", "", strategy)
        what = f"`{strategy}` starts its own processes, but ltui starts the ranks."
        faults.append(Fault(path="trainer.strategy", what=what, remedy=f"Use `{plain}`."))
    return faults


def _classes(value: Any, path: str) -> list[Fault]:
    """Faults of one class or of a list of them."""
    if not isinstance(value, list):
        return class_faults(value, path, dotted=False)
    return [f for i, v in enumerate(value) for f in class_faults(v, f"{path}.{i}", dotted=False)]


def class_faults(value: Any, path: str, *, dotted: bool) -> list[Fault]:
    """Faults in the form of ``class_path`` and ``init_args``.

    ``dotted``: the class must be named with its module. Lightning's and torch's own (callbacks,
    optimizers) may go by their bare name.
    """
    if isinstance(value, str):
        return _class_path(value, path, dotted)
    if not isinstance(value, Mapping):
        return [
            Fault(
                path=path, what=f"must be a class_path with init_args (got {format_value(value)})."
            )
        ]
    if "class_path" not in value:
        near = closest_match("class_path", [str(k) for k in value], cutoff=0.7)
        if near is not None:
            return [unknown_key(f"{path}.{near}", _CLASS_KEYS)]
        remedy = f"Name the class: `{path}: {{class_path: my_package.MyClass, init_args: ...}}`."
        return [Fault(path=path, what="the class_path is missing.", remedy=remedy)]
    faults = _class_path(value["class_path"], f"{path}.class_path", dotted)
    faults += [unknown_key(f"{path}.{k}", _CLASS_KEYS) for k in value if k not in _CLASS_KEYS]
    arguments = value.get("init_args")
    if arguments is not None and not isinstance(arguments, Mapping):
        what = f"must be a mapping of the class's arguments (got {format_value(arguments)})."
        faults.append(Fault(path=f"{path}.init_args", what=what))
    return faults


def _class_path(value: Any, path: str, dotted: bool) -> list[Fault]:
    if isinstance(value, str) and _CLASS_PATH.fullmatch(value) and not value.endswith(".py"):
        return []
    if isinstance(value, str) and not dotted and value.isidentifier():
        return []
    what = f"must be a dotted path to a class (got {format_value(value)})."
    remedy = "For example: `my_package.models.MyModel`."
    if isinstance(value, str) and value.endswith(".py"):
        remedy = f"Name the class: `{value.removesuffix('.py').replace('/', '.')}.MyClass`."
    return [Fault(path=path, what=what, remedy=remedy)]


def format_value(value: Any) -> str:
    """A value in a message: short, in backticks."""
    text = (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )
    text = text if len(text) <= 40 else text[:37] + "..."
    return f"`{text}`"
