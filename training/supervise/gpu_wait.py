"""Wait for free GPUs, and reserve the chosen ones against other waiting runs.

Each GPU that a run was given has a lock file below the home directory, which the supervisor holds
until the run ends. Without it, nothing would show that the GPU is taken between the choice and the
first use of the GPU by the ranks. Only one run at a time chooses GPUs.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping

from msgspec.structs import replace

from ltui.training.config.device_selection import free_count
from ltui.training.gpu.reading import (
    NO_DRIVER,
    NO_GPU,
    NOT_READ_YET,
    VISIBLE,
    GpuReading,
    select_gpus,
    usable_gpus,
    visible_variables,
)
from ltui.training.gpu.run_gpus import RunGpus
from ltui.training.problem import ProblemError
from ltui.training.store.run_directory import RunDir


class GpuQueue:
    """The queue position of one run that waits for GPUs. Used by the supervisor's loop.

    ``reason`` is a sentence that states why the run is still waiting.
    """

    def __init__(self, run_dir: RunDir, devices: str, gpus: RunGpus) -> None:
        number = free_count(devices)
        assert number is not None
        self._number = number
        self._run_id = run_dir.id
        self._folder = run_dir.home / "gpus"
        self._gpus = gpus
        self._held: dict[str, int] = {}
        self.reason = f"waiting for GPUs: {NOT_READ_YET}"

    def try_allocate(self) -> dict[str, str] | None:
        """Reserve free GPUs. Return the environment variables that select them, or None.

        None means that not enough GPUs are free yet. Raises ``ProblemError`` if the request can
        never be fulfilled.
        """
        view = self._gpus.latest()
        if not view.readings:
            if view.note in (NO_DRIVER, NO_GPU):
                raise ProblemError.of(
                    where="trainer.devices",
                    what=f"it waits for free GPUs, and there are none ({view.note}).",
                    remedy="Set trainer.accelerator=cpu, or start it where there are GPUs.",
                )
            self.reason = f"waiting for GPUs: {view.note}"
            return None
        if not view.complete:
            self.reason = f"waiting for GPUs: {view.note or NOT_READ_YET}"
            return None
        return self._choose(_visible_readings(view.readings, os.environ))

    def _choose(self, readings: tuple[GpuReading, ...]) -> dict[str, str] | None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        choice_lock = _lock(self._folder / "choosing.lock")
        if choice_lock is None:
            return None  # Another run is choosing now. Try again at the next poll.
        try:
            choice = select_gpus(self._number, [self._reserve(reading) for reading in readings])
            chosen = set() if isinstance(choice, str) else {reading.index for reading in choice}
            for reading in readings:
                if reading.index not in chosen:
                    self._release_gpu(_gpu_key(reading))
        except BaseException:
            self.release()
            raise
        finally:
            os.close(choice_lock)
        if isinstance(choice, str):
            self.reason = f"waiting for GPUs: {choice}"
            return None
        return visible_variables(choice)

    def _reserve(self, reading: GpuReading) -> GpuReading:
        """Lock the GPU for this run. Return its reading, with an error if another run holds it."""
        path = self._folder / f"{_gpu_key(reading)}.lock"
        if reading.mig_enabled or _gpu_key(reading) in self._held:
            return reading
        descriptor = _lock(path)
        if descriptor is None:
            holder = path.read_text(errors="replace").strip() or "another run"
            return replace(reading, error=f"reserved for {holder}")
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, self._run_id.encode(), 0)
        self._held[_gpu_key(reading)] = descriptor
        return reading

    def _release_gpu(self, key: str) -> None:
        descriptor = self._held.pop(key, None)
        if descriptor is not None:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def release(self) -> None:
        """Release all reserved GPUs."""
        for key in list(self._held):
            self._release_gpu(key)


def _gpu_key(reading: GpuReading) -> str:
    return (reading.uuid or f"gpu-{reading.index}").replace("/", "-")


def _lock(path: os.PathLike[str]) -> int | None:
    """Open and lock a file. Return None if another process holds the lock."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _visible_readings(
    readings: tuple[GpuReading, ...], environment: Mapping[str, str]
) -> tuple[GpuReading, ...]:
    """Return the readings of the GPUs that ``CUDA_VISIBLE_DEVICES`` allows."""
    visible = environment.get(VISIBLE)
    if visible is None:
        return readings
    entries = [entry.strip().lower() for entry in visible.split(",") if entry.strip()]

    def is_visible(reading: GpuReading) -> bool:
        uuid = (reading.uuid or "").lower()
        return any(
            entry == str(reading.index) if entry.isdecimal() else uuid.startswith(entry)
            for entry in entries
        )

    return tuple(reading for reading in usable_gpus(readings) if is_visible(reading))
