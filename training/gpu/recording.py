"""Recordings of GPU readings: written from a sampler, played again as a source of readings.

A recording is a file of JSON lines. The first line says where it is from, such as
``{"format": 1, "driver": "580.65.06", "simulated": false}``; each further line is one round of
readings: ``{"at_s": 12.0, "phase": "idle", "readings": [{...}]}``. Values that are the default of
their field are left out, and what identifies the machine is not written.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct, convert, to_builtins
from msgspec.structs import replace

from ltui.training.gpu.reading import GpuProcess, GpuReading, GpuView, Xid

FORMAT = 1


class Round(Struct, frozen=True, kw_only=True):
    """The readings of all GPUs at one time."""

    at_s: float
    """Seconds since the beginning of the recording."""
    readings: tuple[GpuReading, ...]
    phase: str = ""
    """What ran on the GPUs meanwhile, such as ``idle``."""


class Recording(Struct, frozen=True, kw_only=True):
    """Rounds in the order of time."""

    rounds: tuple[Round, ...]
    driver: str | None = None
    """Version of the driver."""
    simulated: bool = False
    """True if the driver was simulated."""


def write_recording(path: Path, recording: Recording) -> None:
    """Write the recording. UUIDs, process ids, names, users and unix times are replaced."""
    head = {"format": FORMAT, "driver": recording.driver, "simulated": recording.simulated}
    lines = [json.dumps(head)]
    for entry in recording.rounds:
        readings = tuple(_anonymous(reading) for reading in entry.readings)
        kept = to_builtins(replace(entry, at_s=round(entry.at_s, 3), readings=readings))
        # The driver returns some numbers as whole ones; written are those that are read again.
        lines.append(json.dumps(to_builtins(convert(kept, Round)), separators=(",", ":")))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_recording(path: Path) -> Recording:
    """Return the recording in ``path``. Raises ``OSError``, and ``ValueError`` if it is none."""
    lines = path.read_text(encoding="utf-8").splitlines()
    try:
        head, *rest = [json.loads(line) for line in lines]
        if head["format"] != FORMAT:
            raise ValueError(f"format {head['format']} instead of {FORMAT}")
        recording = convert({**head, "rounds": rest}, Recording)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no recording of GPU readings: {error}") from error
    if not recording.rounds:
        raise ValueError(f"{path} has no readings")
    return recording


class RecordedGpus:
    """A source of readings with the interface of ``GpuSampler``, which repeats a recording."""

    def __init__(self, rounds: Sequence[Round], clock: Callable[[], float] = time.time) -> None:
        """``clock``: returns the unix time. The recording begins now."""
        self._rounds, self._clock = rounds, clock
        self._began = clock()

    def latest(self) -> GpuView:
        """Return the readings of the current second."""
        # The last round lasts as long as the one before it.
        last = self._rounds[-1].at_s
        length_s = last + (last - self._rounds[-2].at_s if len(self._rounds) > 1 else 1.0)
        now = self._clock()
        elapsed_s = (now - self._began) % max(length_s, 1e-3)
        current = self._rounds[0]
        for entry in self._rounds:
            if entry.at_s > elapsed_s:
                break
            current = entry
        at = now - elapsed_s + current.at_s
        return GpuView(readings=tuple(replace(r, sampled_at=at) for r in current.readings))

    def take_xids(self) -> tuple[Xid, ...]:
        """Return nothing: XID errors are not recorded."""
        return ()

    def stop(self, wait_s: float = 0.0) -> bool:  # noqa: ARG002 - interface of GpuSampler
        """Do nothing: there is no thread to stop."""
        return True


def _anonymous(reading: GpuReading) -> GpuReading:
    processes = reading.processes and tuple(
        GpuProcess(pid=1000 + number, memory_bytes=process.memory_bytes, graphics=process.graphics,
                   visible=process.visible)
        for number, process in enumerate(reading.processes)
    )  # fmt: skip
    uuid = reading.uuid and f"GPU-00000000-0000-4000-8000-{reading.index:012}"
    return replace(reading, uuid=uuid, processes=processes, sampled_at=None, last_xid=None)
