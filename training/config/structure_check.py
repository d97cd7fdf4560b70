"""Check of a configuration without torch: structure, types, ranges, unknown keys, devices.

The check reports all errors at once. The parameters of the user's classes are checked elsewhere,
with the real classes. Those of the Trainer (Lightning 2.5 and 2.6) are listed here, so that
Lightning need not be imported; a test compares their names with the installed Trainer. Pure: the
resources of the machine are arguments.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct

from ltui.training.config.device_selection import UNKNOWN_MACHINE, Machine, choose_devices
from ltui.training.config.node_environment import choose_nodes
from ltui.training.config.yaml_document import (
    Fault,
    format_value,
    iterate_values,
    parse_value,
    resolve,
)
from ltui.training.problem import Problem


class Argument(Struct, frozen=True, kw_only=True):
    """Valid values of one argument.

    ``kinds`` are: whole, number, share, truth, text, texts, list, mapping, class.
    """

    kinds: tuple[str, ...]
    low: float | None = None
    high: float | None = None
    choices: tuple[Any, ...] = ()
    optional: bool = True
    """True if null is valid."""

    def fault(self, value: Any) -> str | None:
        """Return what the value must be, as the end of ``must be ...``; None if it is valid."""
        if value is None:
            return None if self.optional else self.expected
        if any(self._fits(kind, value) for kind in self.kinds):
            return None
        return self.expected

    def _fits(self, kind: str, value: Any) -> bool:
        if self.choices and kind == "text":
            return value in self.choices and not isinstance(value, bool)
        if kind == "truth":
            return isinstance(value, bool)
        if kind == "text":
            return isinstance(value, str)
        if kind == "texts":
            return isinstance(value, list) and all(isinstance(item, str) for item in value)
        if kind == "list":
            return isinstance(value, list)
        if kind in ("mapping", "class"):
            return isinstance(value, Mapping)
        value = _number(value)
        if value is None:
            return False
        if kind == "share":
            # An integer is a number of batches, a float is a fraction of them.
            return value >= 0 if isinstance(value, int) else 0.0 <= value <= 1.0
        if kind == "whole" and not isinstance(value, int):
            return False
        low, high = -math.inf if self.low is None else self.low, self.high
        return bool(low <= value <= (math.inf if high is None else high))

    @property
    def expected(self) -> str:
        """Description of valid values: ``a whole number, 1 or more, or true or false``."""
        words = [
            self._words(kind) for kind in self.kinds if kind != "mapping" or not self.kinds[1:]
        ]
        return (", or " if any("," in word for word in words) else " or ").join(words)

    def _words(self, kind: str) -> str:
        if kind == "text" and self.choices:
            return "one of " + ", ".join(dict.fromkeys(str(c) for c in self.choices))
        if kind in ("whole", "number"):
            return ("a whole number" if kind == "whole" else "a number") + bounds(
                self.low, self.high
            )
        return _WORDS[kind]


_WORDS = {
    "share": "a whole number, 0 or more, or a fraction from 0.0 to 1.0",
    "truth": "true or false",
    "text": "text",
    "texts": "a list of strings",
    "list": "a list",
    "mapping": "a mapping",
    "class": "a class_path with init_args",
}


def bounds(low: float | None, high: float | None) -> str:
    """Return a description of limits: ``, 1 or more``, `` from 0 to 1``, or an empty string."""
    if low is None and high is None:
        return ""
    if high is None:
        return f", {low:g} or more"
    return f", at most {high:g}" if low is None else f" from {low:g} to {high:g}"


def _number(value: Any) -> int | float | None:
    """Return a number; a number in quotes is accepted, as by LightningCLI."""
    if isinstance(value, str):
        try:
            value = parse_value(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # a whole number beyond every float
        return None


_TRUTH = Argument(kinds=("truth",))
_TRUTH_NOT_NULL = Argument(kinds=("truth",), optional=False)
_SHARE = Argument(kinds=("share",))
_FROM_0 = Argument(kinds=("whole",), low=0)
_FROM_MINUS_1 = Argument(kinds=("whole",), low=-1)
_CLASS = Argument(kinds=("text", "class"))
_CLASSES = Argument(kinds=("class", "list"))

PRECISIONS = (
    "16-mixed", "bf16-mixed", "16-true", "bf16-true", "32-true", "64-true", 16, 32, 64, "16", "32",
    "64", "bf16", "transformer-engine", "transformer-engine-float16",
)  # fmt: skip

TRAINER_ARGUMENTS: Mapping[str, Argument] = {
    "accelerator": Argument(kinds=("text", "class"), optional=False),
    "strategy": Argument(kinds=("text", "class"), optional=False),
    "devices": Argument(kinds=("whole", "text", "list"), low=-1, optional=False),
    "num_nodes": Argument(kinds=("whole",), low=1, optional=False),
    "precision": Argument(kinds=("text",), choices=PRECISIONS),
    "logger": Argument(kinds=("truth", "class", "list")),
    "callbacks": _CLASSES,
    "fast_dev_run": Argument(kinds=("truth", "whole"), low=0, optional=False),
    "max_epochs": _FROM_MINUS_1,
    "min_epochs": _FROM_0,
    "max_steps": Argument(kinds=("whole",), low=-1, optional=False),
    "min_steps": _FROM_0,
    "max_time": Argument(kinds=("text", "mapping")),
    "limit_train_batches": _SHARE,
    "limit_val_batches": _SHARE,
    "limit_test_batches": _SHARE,
    "limit_predict_batches": _SHARE,
    "overfit_batches": Argument(kinds=("share",), optional=False),
    "val_check_interval": Argument(kinds=("share", "text", "mapping")),
    "check_val_every_n_epoch": Argument(kinds=("whole",), low=1),
    "num_sanity_val_steps": _FROM_MINUS_1,
    "log_every_n_steps": _FROM_0,
    "enable_checkpointing": _TRUTH,
    "enable_progress_bar": _TRUTH,
    "enable_model_summary": _TRUTH,
    "accumulate_grad_batches": Argument(kinds=("whole",), low=1, optional=False),
    "gradient_clip_val": Argument(kinds=("number",), low=0),
    "gradient_clip_algorithm": Argument(kinds=("text",), choices=("norm", "value")),
    "deterministic": Argument(kinds=("truth", "text"), choices=("warn",)),
    "benchmark": _TRUTH,
    "inference_mode": _TRUTH_NOT_NULL,
    "use_distributed_sampler": _TRUTH_NOT_NULL,
    "profiler": _CLASS,
    "detect_anomaly": _TRUTH_NOT_NULL,
    "barebones": _TRUTH_NOT_NULL,
    "plugins": Argument(kinds=("class", "list", "text")),
    "sync_batchnorm": _TRUTH_NOT_NULL,
    "reload_dataloaders_every_n_epochs": Argument(kinds=("whole",), low=0, optional=False),
    "default_root_dir": Argument(kinds=("text",)),
    "enable_autolog_hparams": _TRUTH_NOT_NULL,
    "model_registry": Argument(kinds=("text",)),
}


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


def find_faults(
    document: Mapping[str, Any], *, machine: Machine = UNKNOWN_MACHINE, cpu_ranks: int = 1
) -> list[Fault]:
    """Return all errors of a LightningCLI configuration by dotted path."""
    document = {k: v for k, v in document.items() if k != "ltui"}
    resolved, faults = resolve(document)
    faults += _check_plain_values(resolved)
    faults += _check_top_level(resolved)
    trainer = resolved.get("trainer")
    if isinstance(trainer, Mapping):
        trainer_faults = _check_trainer(trainer)
        faults += trainer_faults
        if "trainer.devices" not in {fault.path for fault in trainer_faults}:
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
    """Return the error with its place for the user: ``my.yaml:12 trainer.max_epoch``."""
    if any(_is_within(fault.path, key) for key in overridden):
        place = f"--set {fault.path}"
    else:
        line = _line(fault.path, lines)
        place = where + (f":{line}" if line else "") + (f" {fault.path}" if fault.path else "")
    return Problem(where=place, what=fault.what, remedy=fault.remedy)


def _is_within(path: str, key: str) -> bool:
    return path == key or path.startswith(key + ".")


def _line(path: str, lines: Mapping[str, int]) -> int | None:
    """Return the line of the path, or of the innermost enclosing path that has a line."""
    while path:
        if path in lines:
            return lines[path]
        path = path.rpartition(".")[0]
    return None


def closest_match(word: str, words: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the most similar of some words; None if none is similar."""
    matches = difflib.get_close_matches(word, list(words), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def unknown_key(path: str, known_keys: Iterable[str]) -> Fault:
    """Return the error for a key that is not among the known keys of its mapping."""
    parent, _, name = path.rpartition(".")
    near = closest_match(name, known_keys)
    remedy = f"Did you mean `{parent + '.' if parent else ''}{near}`?" if near else None
    if remedy is None and not parent:
        inner = closest_match(name, TRAINER_ARGUMENTS, cutoff=0.8)
        remedy = (
            f"Did you mean `trainer.{inner}`?" if inner else f"Known keys: {', '.join(known_keys)}."
        )
    return Fault(path=path, what=f"unknown key `{name}`.", remedy=remedy)


def key_fault(path: str) -> Fault | None:
    """Return the error if a dotted path cannot exist, as far as is known without the classes."""
    parts = path.split(".")
    if parts[0] not in TOP_LEVEL and parts[0] not in _ALSO_TOP_LEVEL:
        return unknown_key(parts[0], TOP_LEVEL)
    if parts[0] == "trainer" and len(parts) > 1 and parts[1] not in TRAINER_ARGUMENTS:
        return unknown_key(".".join(parts[:2]), TRAINER_ARGUMENTS)
    if parts[0] in ("model", "data") and len(parts) > 1 and parts[1] not in _CLASS_KEYS:
        near = closest_match(parts[1], _CLASS_KEYS)
        if near is None:
            suggestion = f"{parts[0]}.init_args.{'.'.join(parts[1:])}"
        else:
            suggestion = ".".join([parts[0], near, *parts[2:]])
        text = f"unknown key `{parts[1]}`."
        return Fault(path=path, what=text, remedy=f"Did you mean `{suggestion}`?")
    return None


def _check_top_level(document: Mapping[str, Any]) -> list[Fault]:
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
        text = f"must be a whole number, true or false (got {format_value(seed)})."
        faults.append(Fault(path="seed_everything", what=text))
    return faults


def _check_plain_values(document: Mapping[str, Any]) -> list[Fault]:
    """Report values that a configuration cannot hold: sets, dates, bytes, non-string keys."""
    faults = []
    for path, value in iterate_values(document):
        if isinstance(value, Mapping):
            invalid_keys = [k for k in value if not isinstance(k, str)]
            if invalid_keys and path.split(".")[0] == "trainer":
                faults.append(
                    Fault(
                        path=path, what=f"the key {format_value(invalid_keys[0])} is not a string."
                    )
                )
        elif not isinstance(value, (*_PLAIN, list)):
            text = f"a value of type {type(value).__name__} is not allowed in a configuration."
            faults.append(Fault(path=path, what=text))
    return faults


def _check_trainer(trainer: Mapping[str, Any]) -> list[Fault]:
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
            faults += _check_classes(value, path)
    return faults + _check_torch_elastic(trainer)


def value_fault(path: str, value: Any, argument: Argument) -> Fault | None:
    """Return the error if a value is not valid for an argument."""
    expected = argument.fault(value)
    if expected is None:
        return None
    remedy = None
    if isinstance(value, str) and argument.choices:
        near = closest_match(value, [str(c) for c in argument.choices])
        remedy = f"Did you mean `{near}`?" if near else None
    return Fault(path=path, what=f"must be {expected} (got {format_value(value)}).", remedy=remedy)


def _check_torch_elastic(trainer: Mapping[str, Any]) -> list[Fault]:
    """Report settings that the Trainer accepts but that do not work with torch elastic."""
    faults = []
    strategy = trainer.get("strategy")
    if isinstance(strategy, str) and re.search(r"_(spawn|fork|notebook)", strategy):
        plain = re.sub(r"_(spawn|fork|notebook)", "", strategy)
        text = f"`{strategy}` starts its own processes, but ltui starts the ranks."
        faults.append(Fault(path="trainer.strategy", what=text, remedy=f"Use `{plain}`."))
    return faults


def _check_classes(value: Any, path: str) -> list[Fault]:
    """Check one class or a list of classes."""
    if not isinstance(value, list):
        return class_faults(value, path, dotted=False)
    return [f for i, v in enumerate(value) for f in class_faults(v, f"{path}.{i}", dotted=False)]


def class_faults(value: Any, path: str, *, dotted: bool) -> list[Fault]:
    """Check the form of ``class_path`` and ``init_args``.

    With ``dotted``, the class must be named with its module. Without it, classes of Lightning and
    torch (callbacks, optimizers) may be given by their bare name.
    """
    if isinstance(value, str):
        return _check_class_path(value, path, dotted)
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
    faults = _check_class_path(value["class_path"], f"{path}.class_path", dotted)
    faults += [unknown_key(f"{path}.{k}", _CLASS_KEYS) for k in value if k not in _CLASS_KEYS]
    arguments = value.get("init_args")
    if arguments is not None and not isinstance(arguments, Mapping):
        text = f"must be a mapping of the class's arguments (got {format_value(arguments)})."
        faults.append(Fault(path=f"{path}.init_args", what=text))
    return faults


def _check_class_path(value: Any, path: str, dotted: bool) -> list[Fault]:
    if isinstance(value, str) and _CLASS_PATH.fullmatch(value) and not value.endswith(".py"):
        return []
    if isinstance(value, str) and not dotted and value.isidentifier():
        return []
    text = f"must be a dotted path to a class (got {format_value(value)})."
    remedy = "For example: `my_package.models.MyModel`."
    if isinstance(value, str) and value.endswith(".py"):
        remedy = f"Name the class: `{value.removesuffix('.py').replace('/', '.')}.MyClass`."
    return [Fault(path=path, what=text, remedy=remedy)]
