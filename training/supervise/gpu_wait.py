"""Waiting for free GPUs, and keeping the ones that were found from other runs that wait.

Each GPU that a run was given has a lock file below the home directory, held by its supervisor until
the run ends: between the choice and the moment at which the ranks show up on the GPU nothing else
would tell that it is taken. Runs choose one at a time.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from dataclasses import replace

from ltui.training.gpu.free_gpus import (
    FreeDevices,
    GpuSelection,
    parse_devices,
    select_gpus,
    usable_gpus,
)
from ltui.training.gpu.reading import GpuReading
from ltui.training.gpu.run_gpus import ORDER, VISIBLE, RunGpus
from ltui.training.gpu.sampler import NO_DRIVER, NO_GPU, NOT_READ_YET
from ltui.training.problem import Problem, ProblemError
from ltui.training.store.run_directory import RunDir


class GpuQueue:
    """One run's wait. Used by the supervisor's loop."""

    def __init__(self, run_dir: RunDir, wanted: str, gpus: RunGpus) -> None:
        request = parse_devices(wanted)
        assert isinstance(request, FreeDevices)
        self._request = request
        self._run_id = run_dir.id
        self._folder = run_dir.home / "gpus"
        self._gpus = gpus
        self._held: dict[str, int] = {}
        self.reason = f"waiting for GPUs: {NOT_READ_YET}"

    def try_allocate(self) -> dict[str, str] | None:
        """The environment that gives the run its GPUs; None while there are not enough.

        Raises ``ProblemError`` for what can never be had.
        """
        view = self._gpus.latest()
        if not view.readings:
            if view.note in (NO_DRIVER, NO_GPU):
                raise ProblemError(
                    Problem(
                        where="trainer.devices",
                        what=f"it waits for free GPUs, and there are none ({view.note}).",
                        remedy="Set trainer.accelerator=cpu, or start it where there are GPUs.",
                    )
                )
            self.reason = f"waiting for GPUs: {view.note}"
            return None
        if not view.complete:
            self.reason = f"waiting for GPUs: {view.note or NOT_READ_YET}"
            return None
        return self._choose(_visible(view.readings, os.environ))

    def _choose(self, readings: tuple[GpuReading, ...]) -> dict[str, str] | None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        choosing = _lock(self._folder / "choosing.lock")
        if choosing is None:
            return None  # Another run chooses in this very moment: the next look sees what is left.
        try:
            found = select_gpus(self._request, [self._unless_kept(reading) for reading in readings])
            chosen = set(found.indices) if isinstance(found, GpuSelection) else set()
            for reading in readings:
                if reading.index not in chosen:
                    self._let_go(_key(reading))
        except BaseException:
            self.release()
            raise
        finally:
            os.close(choosing)
        if not isinstance(found, GpuSelection):
            self.reason = f"waiting for GPUs: {found.reason}"
            return None
        return {VISIBLE: found.visible, **({ORDER: "PCI_BUS_ID"} if found.by_index else {})}

    def _unless_kept(self, reading: GpuReading) -> GpuReading:
        """The reading, with an error where another run keeps that GPU; else it is ours for now."""
        path = self._folder / f"{_key(reading)}.lock"
        if reading.mig_enabled or _key(reading) in self._held:
            return reading
        handle = _lock(path)
        if handle is None:
            holder = path.read_text(errors="replace").strip() or "another run"
            return replace(reading, error=f"kept for {holder}")
        os.ftruncate(handle, 0)
        os.pwrite(handle, self._run_id.encode(), 0)
        self._held[_key(reading)] = handle
        return reading

    def _let_go(self, key: str) -> None:
        handle = self._held.pop(key, None)
        if handle is not None:
            fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)

    def release(self) -> None:
        """Give every GPU back."""
        for key in list(self._held):
            self._let_go(key)


def _key(reading: GpuReading) -> str:
    return (reading.uuid or f"gpu-{reading.index}").replace("/", "-")


def _lock(path: os.PathLike[str]) -> int | None:
    """The file, locked until it is closed; None where another process has it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def _visible(
    readings: tuple[GpuReading, ...], environment: Mapping[str, str]
) -> tuple[GpuReading, ...]:
    """Those that ``CUDA_VISIBLE_DEVICES`` leaves to choose among."""
    named = environment.get(VISIBLE)
    if named is None:
        return readings
    entries = [entry.strip().lower() for entry in named.split(",") if entry.strip()]

    def left(reading: GpuReading) -> bool:
        uuid = (reading.uuid or "").lower()
        return any(
            entry == str(reading.index) if entry.isdecimal() else uuid.startswith(entry)
            for entry in entries
        )

    return tuple(reading for reading in usable_gpus(readings) if left(reading))
