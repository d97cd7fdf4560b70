"""One line that describes what a launch would start: ranks, length and GPUs. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ltui.training.config.device_selection import Machine, choose_devices
from ltui.training.config.node_environment import choose_nodes
from ltui.training.config.yaml_document import resolve
from ltui.widgets import formats


def launch_summary(document: Mapping[str, Any], machine: Machine, cpu_ranks: int) -> str:
    """Return ``2 ranks, 30 epochs, GPUs 0-1`` for a valid configuration."""
    trainer = resolve(document)[0].get("trainer") or {}
    chosen, _ = choose_devices(trainer, machine, cpu_ranks)
    ranks = "1 rank" if chosen.nproc == 1 else f"{chosen.nproc} ranks"
    nodes = choose_nodes(trainer, machine.node)[0]
    if nodes is not None and nodes.count > 1:
        ranks += f" on each of {nodes.count} machines"
    where = _device_text(chosen.accelerator, chosen.devices, chosen.gpus)
    return ", ".join(part for part in (ranks, _length_text(trainer), where) if part)


def _length_text(trainer: Mapping[str, Any]) -> str:
    if trainer.get("fast_dev_run"):
        return "a test of a few batches (fast_dev_run)"
    epochs, steps = trainer.get("max_epochs"), trainer.get("max_steps")
    limits = []
    if isinstance(epochs, int) and epochs >= 0:
        limits.append("1 epoch" if epochs == 1 else f"{formats.count(epochs)} epochs")
    if isinstance(steps, int) and steps >= 0:
        limits.append("1 step" if steps == 1 else f"{formats.count(steps)} steps")
    if limits:
        return " or ".join(limits) if len(limits) == 1 else f"{' or '.join(limits)} at most"
    if trainer.get("max_time") is not None:
        return f"max_time {trainer['max_time']}"
    # Lightning trains for 1000 epochs if no limit is set.
    return "until it is stopped" if epochs == -1 else f"{formats.count(1000)} epochs (the default)"


def _device_text(accelerator: str, devices: int | list[int], free: str | None) -> str:
    if accelerator == "cpu":
        return "on the CPU"
    if accelerator not in ("gpu", "cuda"):
        return f"on {accelerator}"
    if free is not None:
        count = free.removeprefix("free:")
        return "the first GPU to be free" if count == "1" else f"the first {count} GPUs to be free"
    numbers = list(range(devices)) if isinstance(devices, int) else sorted(devices)
    return f"GPU {numbers[0]}" if len(numbers) == 1 else f"GPUs {formats.ranks(tuple(numbers))}"
