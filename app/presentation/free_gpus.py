"""Text about the free GPUs of this machine, for the form field in which they are chosen. Pure."""

from __future__ import annotations

from rich.text import Text

from ltui.app.presentation.snapshot_text import gpu_name
from ltui.training.gpu.reading import GpuReading, GpuView, busy_reason, usable_gpus
from ltui.widgets import formats
from ltui.widgets.sanitise import clean_line

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
