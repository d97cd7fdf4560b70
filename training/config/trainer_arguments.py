"""Arguments of Lightning's Trainer (2.5 and 2.6), listed without importing Lightning.

A test compares the names with the installed Trainer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from ltui.training.config.yaml_document import parse_value


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
