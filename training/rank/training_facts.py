# ruff: noqa: ARG002  (the arguments are Lightning's)
"""What a rank sends about its training: who it is, its plan, checkpoints, Tuner, settings, work.

Each is sent once, or when it happens, and never for a step.

The hyperparameters of a script are what ``save_hyperparameters`` stored, and what the functions
that called the training hold in their variables: what argparse has parsed, and dataclasses that are
configurations by their name.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

from ltui.training.rank.channel import Channel
from ltui.training.rank.live_profile import exclude_from_profile
from ltui.training.shared.record_types import Phase, RecordKind


def send_hello(channel: Channel, trainer: Any) -> None:
    """Send who this rank is."""
    channel.send_hello(
        trainer.strategy.root_device,
        trainer.local_rank,
        trainer.world_size,
        lightning=lightning_version(trainer),
        strategy=type(trainer.strategy).__name__,
        precision=str(trainer.precision),
        accumulate_grad_batches=trainer.accumulate_grad_batches,
    )


def send_plan(channel: Channel, trainer: Any) -> None:
    """Send how many steps, epochs and batches the training will have."""
    batches = trainer.num_training_batches
    max_epochs = _limit(trainer.max_epochs)
    channel.send_record(
        RecordKind.PLAN,
        max_steps=_planned_steps(trainer, batches, max_epochs),
        max_epochs=max_epochs,
        batches_per_epoch=_limit(batches),
        val_batches=_validation_batches(trainer),
        global_step=trainer.global_step,
        epoch=trainer.current_epoch,
    )


def _planned_steps(trainer: Any, batches: float, max_epochs: int | None) -> int | None:
    """Return the optimizer steps until the end of training; None if there is no limit.

    The result is the smaller of the limits by steps and by epochs.
    """
    limits = []
    if (max_steps := _limit(trainer.max_steps)) is not None:
        limits.append(max_steps)
    automatic = trainer.lightning_module.automatic_optimization
    if max_epochs is not None and math.isfinite(batches) and automatic:
        limits.append(math.ceil(batches / trainer.accumulate_grad_batches) * max_epochs)
    return min(limits, default=None)


def _validation_batches(trainer: Any) -> int | None:
    if not trainer.enable_validation:
        return 0
    batches = trainer.num_val_batches
    return _limit(sum(batches) if isinstance(batches, list) else batches)


def _limit(value: float | None) -> int | None:
    """Return a limit, or None for Lightning's values without a limit: None, -1 and infinity."""
    return None if value is None or value < 0 or not math.isfinite(value) else int(value)


def lightning_version(trainer: Any) -> str:
    """Return ``2.6.6`` for ``lightning``, or ``2.6.6 (pytorch_lightning)``."""
    packages = [cls.__module__.partition(".")[0] for cls in type(trainer).__mro__[:-1]]
    lightning = [name for name in packages if name in ("lightning", "pytorch_lightning")]
    package = (lightning or packages[-1:])[0]
    version = getattr(sys.modules.get(package), "__version__", "unknown")
    return version if package == "lightning" else f"{version} ({package})"


OLDEST_LIGHTNING = "2.5"
"""Oldest supported version, as in ``pyproject.toml``."""


def is_too_old(version: str) -> bool:
    """Return True if a version of ``lightning_version`` is below the oldest supported one."""
    match = re.match(r"(\d+)\.(\d+)", version)
    oldest = tuple(int(part) for part in OLDEST_LIGHTNING.split("."))
    return match is not None and (int(match[1]), int(match[2])) < oldest


def report_old_lightning(trainer: Any, channel: Channel) -> None:
    """Send a warning if the installed Lightning is older than the oldest supported version."""
    version = lightning_version(trainer)
    if is_too_old(version):
        text = (
            f"Lightning {version} is older than {OLDEST_LIGHTNING}, the oldest version that"
            " ltui supports: a stop, a pause, a checkpoint or an exact resume may not work."
        )
        channel.warn_from_rank_0(text, "Upgrade it: pip install -U lightning")


_TUNER_FILE_PREFIXES = (".lr_find_", ".scale_batch_size_")
"""Prefixes of the names of the Tuner's own temporary checkpoints, which it removes again."""


def report_saved_checkpoints(trainer: Any, channel: Channel) -> None:
    """Show the checkpoint phase while a ModelCheckpoint saves, and report the file."""
    save, pulse = trainer.save_checkpoint, channel.pulse

    @functools.wraps(save)
    def save_checkpoint(filepath: Any, *args: Any, **kwargs: Any) -> Any:
        if os.path.basename(str(filepath)).startswith(_TUNER_FILE_PREFIXES):
            return save(filepath, *args, **kwargs)
        phase_before, began_ns = pulse.phase, time.monotonic_ns()
        pulse.set(phase=Phase.CHECKPOINT)
        try:
            saved = save(filepath, *args, **kwargs)
        finally:
            ended_ns = time.monotonic_ns()
            exclude_from_profile(began_ns, ended_ns)
            pulse.set(phase=phase_before)
        with contextlib.suppress(Exception):  # only shown in the dashboard
            _send_saved_checkpoint(channel, trainer, filepath, (ended_ns - began_ns) * 1e-9)
        return saved

    trainer.save_checkpoint = save_checkpoint


def _send_saved_checkpoint(channel: Channel, trainer: Any, path: Any, seconds: float) -> None:
    """Send that the script or one of its own callbacks saved the checkpoint ``path``."""
    text = os.fspath(path)
    callback = next((c for c in trainer.checkpoint_callbacks if _has_saved(c, text)), None)
    scores = getattr(callback, "best_k_models", None) or {}
    value = scores.get(text)
    channel.event_from_rank_0(
        "script_checkpoint",
        f"The script saved {text}.",
        # A path with a scheme is not a file of this machine.
        path=text if "://" in text else os.path.abspath(text),
        global_step=trainer.global_step,
        epoch=trainer.current_epoch,
        seconds=seconds,
        metric=getattr(callback, "monitor", None) if value is not None else None,
        value=None if value is None else float(value),
        best=value is not None and getattr(callback, "best_model_path", None) == text,
        last=getattr(callback, "last_model_path", None) == text,
    )


def _has_saved(callback: Any, path: str) -> bool:
    return path in (getattr(callback, "best_k_models", None) or {}) or path in (
        getattr(callback, "best_model_path", None),
        getattr(callback, "last_model_path", None),
    )


def active_finder(trainer: Any, callback: Any) -> str | None:
    """Return the name of the finder that trains now, or None during the user's training.

    The Tuner removes all callbacks for its trials. The learning rate finder adds one of its own
    instead, the batch size finder adds none.
    """
    callbacks = trainer.callbacks
    if any(c is callback for c in callbacks):
        return None
    finds_rate = any(type(c).__name__ == "_LRCallback" for c in callbacks)
    return "learning rate finder" if finds_rate else "batch size finder"


class TunerFits:
    """Sends an event when a finder begins its trial fits and when it ends.

    Lightning undoes these fits afterwards. Therefore a run does not stop in them, and ltui saves no
    checkpoint there.
    """

    def __init__(self, send_phase_event: Callable[[str], None]) -> None:
        self.finder: str | None = None
        """The finder that is running."""
        self._send = send_phase_event

    def batch_ended(self, finder: str) -> None:
        """Record that ``finder`` has trained a batch."""
        if finder != self.finder:
            self.end()
            self.finder = finder
            self._send(f"The {finder} began its trial training.")

    def end(self) -> None:
        """Record that no finder runs any more."""
        if self.finder is not None:
            self._send(f"The {self.finder} ended.")
            self.finder = None


FLOP_BATCH = 2
"""Index of the counted batch, from 0. By then everything that is built on first use exists."""


class FlopHooks:
    """Count the floating point operations of one early batch if ``LTUI_COUNT_FLOPS`` requests it.

    torch's ``FlopCounterMode`` intercepts every operation, which slows that batch down. Therefore
    it is used only on request and only on rank 0. It counts matrix products, convolutions and
    attention. Mixed with Lightning's ``Callback``; the channel is that of ``rank_callback``.
    """

    def __init__(self, rank_callback: Any) -> None:
        self._rank_callback = rank_callback
        self._batches = 0
        self._mode: Any = None
        """The active ``FlopCounterMode``, or None."""

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batches += 1
        if self._batches == FLOP_BATCH + 1 and trainer.global_rank == 0:
            try:
                # Imported here, because most runs do not count.
                from torch.utils.flop_counter import FlopCounterMode

                mode: Any = FlopCounterMode(display=False)
                mode.__enter__()
                self._mode = mode
            except Exception as error:  # noqa: BLE001 - training continues without a count
                self._failed(error)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._mode is None:
            return
        try:
            flops = self._stop_counting()
            self._send_event(
                "flops",
                f"One batch takes {flops:.3g} floating point operations.",
                flops=float(flops),
                tf32=torch.get_float32_matmul_precision() != "highest",
            )
        except Exception as error:  # noqa: BLE001
            self._failed(error)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self._mode is not None:
            with contextlib.suppress(Exception):
                self._stop_counting()

    def _stop_counting(self) -> int:
        """Leave the counter's mode and return the number of operations."""
        mode, self._mode = self._mode, None
        mode.__exit__(None, None, None)
        return int(mode.get_total_flops())

    def _send_event(self, kind: str, text: str, **fields: Any) -> None:
        if self._rank_callback.channel is not None:
            self._rank_callback.channel.event(kind, text, **fields)

    def _failed(self, error: Exception) -> None:
        with contextlib.suppress(Exception):
            self._send_event("note", f"The operations of a batch can't be counted: {error}")


MAX_HYPERPARAMETERS = 100
MAX_VALUE = 200
"""Characters of one value."""
MAX_BYTES = 8000
"""Bytes of all values together: a record must be small compared with the ring."""
MAX_FRAMES = 200
"""Maximum number of calling functions whose variables are read."""
_PRIVATE_PREFIX = "_"
"""Prefix of LightningCLI's own entries."""
_SECRET = re.compile(r"(^|[._-])(password|passwd|secret|token|key|credentials?)$", re.IGNORECASE)
"""Names of values that are never stored, because they may let a reader in somewhere."""
_CONFIGURATION = re.compile(r"config|cfg|conf$|arg|opt|param|setting|flag", re.IGNORECASE)
"""Names of variables and classes of dataclasses that hold settings and not data."""
_LIBRARY = re.compile(r"[/\\](site-packages|dist-packages|lib[/\\]python3[^/\\]*)[/\\]|^<frozen")
"""Files of functions whose variables are not the user's."""


def send_hyperparameters(channel: Channel, *owners: Any) -> None:
    """Send the settings of the calling functions, and what ``save_hyperparameters`` stored.

    ``owners`` are the data module and the module of a Trainer; a later one counts.
    """
    values = settings_of_callers()
    for owner in owners:
        for name, value in dict(getattr(owner, "hparams", None) or {}).items():
            if not str(name).startswith(_PRIVATE_PREFIX):
                values |= dict(_flat(str(name), value))
    sent: dict[str, Any] = {}
    size = 0
    for name, value in list(values.items())[:MAX_HYPERPARAMETERS]:
        size += len(json.dumps({name: value}))
        if size > MAX_BYTES:
            break
        sent[name] = value
    if sent:
        channel.event("hyperparameters", "", values=sent)


def settings_of_callers() -> dict[str, Any]:
    """Return what argparse has parsed, and the fields of configurations, in calling functions.

    The value of the outermost function counts.
    """
    values: dict[str, Any] = {}
    frame: FrameType | None = sys._getframe(1)
    for _ in range(MAX_FRAMES):
        if frame is None:
            break
        ours = str(frame.f_globals.get("__name__")).startswith("ltui.")
        if not ours and not _LIBRARY.search(frame.f_code.co_filename):
            for name, value in list(frame.f_locals.items()):
                if isinstance(value, argparse.Namespace):
                    for key, option in vars(value).items():
                        values |= dict(_flat(key, option))
                elif _is_configuration(name, value):
                    values |= dict(_flat(name, value))
        frame = frame.f_back
    return values


def _is_configuration(name: str, value: Any) -> bool:
    kind = type(value)
    return (
        dataclasses.is_dataclass(kind)
        and not name.startswith(_PRIVATE_PREFIX)
        and bool(_CONFIGURATION.search(name) or _CONFIGURATION.search(kind.__name__))
        # A library's arguments are hundreds, and nearly all of them are its defaults.
        and not _LIBRARY.search(getattr(sys.modules.get(kind.__module__), "__file__", None) or "")
    )


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield names and plain values. The fields of a dataclass or Namespace get its name before."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _flat(f"{name}.{field.name}", getattr(value, field.name, None))
    elif isinstance(value, argparse.Namespace):
        for key, inner in vars(value).items():
            yield from _flat(f"{name}.{key}", inner)
    elif not _SECRET.search(name):
        yield name[:MAX_VALUE], _plain_value(value)


def _plain_value(value: Any) -> Any:
    """Return a number, a boolean, None or a short text."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (str, os.PathLike, list, tuple, dict)):
        return str(value)[:MAX_VALUE]
    return type(value).__name__
