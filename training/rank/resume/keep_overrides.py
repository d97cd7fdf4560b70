"""Keep the settings that ``--set`` changed for this attempt when a checkpoint is restored.

Restoring an optimizer or a learning rate schedule also restores its settings, so a new learning
rate in the configuration would have no effect. Therefore the changed settings are set again after
the restore. A schedule keeps its position and is scaled to the new rate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ltui.training.rank.lightning_internals import checkpoint_connector
from ltui.training.rank.torch_internals import SCHEDULER_LAST_RATES

_RATE_NAMES = ("lr", "learning_rate")


def keep_overrides(trainer: Any, overrides: Sequence[str], report: Callable[[str], None]) -> None:
    """Keep the settings that ``overrides`` name over the restore of the checkpoint.

    An override has the form ``optimizer.init_args.lr=0.01``. ``report(text)`` is called with what
    was kept.
    """
    keys = [text.partition("=")[0].strip() for text in overrides]
    rate = any(key.rpartition(".")[2] in _RATE_NAMES for key in keys)
    names = {key.rpartition(".")[2] for key in keys if "optimizer" in key.split(".")} - {"lr"}
    schedule = {key.rpartition(".")[2] for key in keys if "scheduler" in key}
    if not (rate or names or schedule):
        return
    connector = checkpoint_connector(trainer)
    restore = connector.restore_optimizers_and_schedulers

    @functools.wraps(restore)
    def restore_optimizers_and_schedulers() -> None:
        connector.restore_optimizers_and_schedulers = restore
        configured = [[dict(group) for group in o.param_groups] for o in trainer.optimizers]
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        settings_to_keep = [{n: vars(s)[n] for n in schedule if n in vars(s)} for s in schedulers]
        restore()
        kept = []
        for optimizer, groups in zip(trainer.optimizers, configured, strict=True):
            for group, new in zip(optimizer.param_groups, groups, strict=True):
                kept += _keep_settings(group, new, names)
                kept += _rescale(optimizer, group, new, schedulers) if rate else []
        for scheduler, settings in zip(schedulers, settings_to_keep, strict=True):
            vars(scheduler).update(settings)
            kept += [f"{name} {value:g}" for name, value in settings.items() if _is_number(value)]
        if kept:
            report(f"Continues with {', '.join(dict.fromkeys(kept))} instead of the checkpoint's.")

    connector.restore_optimizers_and_schedulers = restore_optimizers_and_schedulers


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _keep_settings(group: dict[str, Any], new: Mapping[str, Any], names: set[str]) -> list[str]:
    """Set the settings ``names`` of a parameter group to the values in ``new``."""
    changed = [n for n in sorted(names) if n in new and n in group and group[n] != new[n]]
    for name in changed:
        group[name] = new[name]
    return [f"{name} {new[name]}" for name in changed]


def _rescale(
    optimizer: Any, group: dict[str, Any], new: Mapping[str, Any], schedulers: Sequence[Any]
) -> list[str]:
    """Scale the group's learning rate and its schedules to the configured rate.

    ``initial_lr`` exists if a schedule starts from it.
    """
    rate_before = float(group.get("initial_lr", group["lr"]))
    configured_rate = float(new.get("initial_lr", new["lr"]))
    if rate_before == configured_rate:
        return []
    if rate_before == 0.0:
        group["lr"] = configured_rate
    else:
        group["lr"] = group["lr"] * (configured_rate / rate_before)
    if "initial_lr" in group:
        group["initial_lr"] = configured_rate
    index = next(i for i, each in enumerate(optimizer.param_groups) if each is group)
    for scheduler in schedulers:
        if getattr(scheduler, "optimizer", None) is not optimizer:
            continue
        for name, value in (("base_lrs", configured_rate), (SCHEDULER_LAST_RATES, group["lr"])):
            rates = getattr(scheduler, name, None)
            if isinstance(rates, list) and index < len(rates):
                rates[index] = value
    return [f"learning rate {group['lr']:g}"]
