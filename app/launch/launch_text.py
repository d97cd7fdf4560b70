"""The texts of a launch that is prepared on the home screen. Pure.

They are the configuration of a preset as YAML that a person edits, with its ``ltui`` section, what
would be started in one line, and the free GPUs to choose from.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import SequenceMatcher
from typing import Any

from msgspec import to_builtins
from rich.text import Text

from ltui.app.presentation.snapshot_text import gpu_name
from ltui.training.config.device_selection import Machine, choose_devices
from ltui.training.config.ltui_section import read_section
from ltui.training.config.node_environment import choose_nodes
from ltui.training.config.presets import Preset, parse_preset
from ltui.training.config.run_spec import CheckpointPolicy, StallPolicy
from ltui.training.config.structure_check import find_faults, locate_fault
from ltui.training.config.yaml_document import Document, read_document, resolve, write_document
from ltui.training.gpu.reading import GpuReading, GpuView, busy_reason, usable_gpus
from ltui.training.problem import Problem, ProblemError
from ltui.widgets import formats
from ltui.widgets.sanitise import clean_line


def editor_text(preset: Preset, document: Mapping[str, Any]) -> str:
    """Return ``document`` as YAML, with a section ``ltui`` that shows every policy in effect."""
    policies = {
        "restarts": preset.restarts,
        "checkpoint": _as_document(preset.checkpoint),
        "stall": _as_document(preset.stall),
    }
    other_keys = {key: value for key, value in preset.section.items() if key not in policies}
    return write_document({**resolve(document)[0], "ltui": {**policies, **other_keys}})


def changed_lines(before: str, after: str) -> frozenset[int]:
    """Return the numbers (from 0) of the lines of ``after`` that ``before`` does not have."""
    blocks = SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    same = {
        n for _, start, size in blocks.get_matching_blocks() for n in range(start, start + size)
    }
    return frozenset(range(len(after.splitlines()))) - same


def _as_document(policy: CheckpointPolicy | StallPolicy) -> Document:
    values = to_builtins(policy)
    return {key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}


def text_problems(preset: Preset, text: str, machine: Machine) -> list[Problem]:
    """Return every configuration error in ``text``, with its line."""
    try:
        source = read_document(text, preset.where)
    except ProblemError as error:
        return list(error.problems)
    section, section_faults = read_section(source.values.get("ltui"))
    faults = find_faults(source.values, machine=machine, cpu_ranks=section.cpu_ranks)
    return [locate_fault(f, preset.where, source.lines) for f in (*section_faults, *faults)]


def preset_from_text(preset: Preset, text: str) -> Preset:
    """Return ``preset`` with the configuration, fields and policies of ``text``."""
    return parse_preset(text, name=preset.name, path=preset.path, shipped=preset.shipped)


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


MAX_GPUS = 8
"""Maximum number of GPUs with a line each. If there are more, those in use come first."""


def free_gpus_text(view: GpuView) -> Text:
    """Return the number of free GPUs, and a line per GPU with its free memory or its user."""
    readings = usable_gpus(view.readings)
    if not readings:
        return Text(f"GPUs: {clean_line(view.note or 'none')}", "dim")
    occupants = {reading.index: busy_reason(reading) for reading in readings}
    free = sum(reason is None for reason in occupants.values())
    out = Text()
    out.append(f"GPUs: {free} of {len(readings)} free", "bold")
    if free:
        number = "one" if free == 1 else "two"
        out.append(f"; free:{min(free, 2)} chooses the {number} with the most free memory", "dim")
    if view.note is not None:
        out.append(f"\n! {clean_line(view.note)}", "bold")
    shown = list(readings)
    if len(shown) > MAX_GPUS:
        shown.sort(key=lambda r: (occupants[r.index] is None, r.index))
        shown = shown[:MAX_GPUS]
    for reading in shown:
        _append_gpu(out, reading, occupants[reading.index])
    if len(readings) > len(shown):
        out.append(f"\n  and {len(readings) - len(shown)} more", "dim")
    return out


def _append_gpu(out: Text, reading: GpuReading, occupant: str | None) -> None:
    name = gpu_name(reading.name)
    used, total = reading.memory_used_bytes, reading.memory_total_bytes
    memory = None if used is None or total is None else total - used
    sign = "○" if occupant is None else "●"
    state = "free" if occupant is None else clean_line(occupant)
    out.append(
        f"\n  {sign} {reading.label:>3}  {name:<16.16}  {formats.size(memory):>8} left  {state}",
        "" if occupant is None else "dim",
    )
