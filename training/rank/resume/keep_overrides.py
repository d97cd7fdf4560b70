"""What ``--set`` changed for this attempt, kept where a checkpoint would bring the former back.

Restoring an optimizer or a learning rate schedule restores its settings too: a new learning rate in
the configuration would be without effect. So after the restore the settings that were changed are
put in their place again; a schedule keeps its position and is scaled to the new rate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_RATES = ("lr", "learning_rate")


def keep_overrides(trainer: Any, changed: Sequence[str], tell: Callable[[str], None]) -> None:
    """Have the coming restore leave alone what ``changed`` (``optimizer.init_args.lr=0.01``) names.

    ``tell(text)`` says what was kept.
    """
    keys = [text.partition("=")[0].strip() for text in changed]
    rate = any(key.rpartition(".")[2] in _RATES for key in keys)
    names = {key.rpartition(".")[2] for key in keys if "optimizer" in key.split(".")} - {"lr"}
    schedule = {key.rpartition(".")[2] for key in keys if "scheduler" in key}
    if not (rate or names or schedule):
        return
    connector = trainer._checkpoint_connector
    restore = connector.restore_optimizers_and_schedulers

    @functools.wraps(restore)
    def restore_optimizers_and_schedulers() -> None:
        connector.restore_optimizers_and_schedulers = restore
        fresh = [[dict(group) for group in o.param_groups] for o in trainer.optimizers]
        schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
        wanted = [{n: vars(s)[n] for n in schedule if n in vars(s)} for s in schedules]
        restore()
        said = []
        for optimizer, groups in zip(trainer.optimizers, fresh, strict=True):
            for group, new in zip(optimizer.param_groups, groups, strict=True):
                said += _keep(group, new, names)
                said += _rescale(optimizer, group, new, schedules) if rate else []
        for scheduler, settings in zip(schedules, wanted, strict=True):
            vars(scheduler).update(settings)
            said += [f"{name} {value:g}" for name, value in settings.items() if _is_number(value)]
        if said:
            tell(f"Goes on with {', '.join(dict.fromkeys(said))}, not with the checkpoint's.")

    connector.restore_optimizers_and_schedulers = restore_optimizers_and_schedulers


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _keep(group: dict[str, Any], new: Mapping[str, Any], names: set[str]) -> list[str]:
    changed = [n for n in sorted(names) if n in new and n in group and group[n] != new[n]]
    for name in changed:
        group[name] = new[name]
    return [f"{name} {new[name]}" for name in changed]


def _rescale(
    optimizer: Any, group: dict[str, Any], new: Mapping[str, Any], schedules: Sequence[Any]
) -> list[str]:
    """The group at the new rate; ``initial_lr`` is there where a schedule begins from it."""
    began = float(group.get("initial_lr", group["lr"]))
    begins = float(new.get("initial_lr", new["lr"]))
    if began == begins:
        return []
    if began == 0.0:
        group["lr"] = begins
    else:
        group["lr"] = group["lr"] * (begins / began)
    if "initial_lr" in group:
        group["initial_lr"] = begins
    index = next(i for i, known in enumerate(optimizer.param_groups) if known is group)
    for schedule in schedules:
        if getattr(schedule, "optimizer", None) is not optimizer:
            continue
        for name, value in (("base_lrs", begins), ("_last_lr", group["lr"])):
            rates = getattr(schedule, name, None)
            if isinstance(rates, list) and index < len(rates):
                rates[index] = value
    return [f"learning rate {group['lr']:g}"]
