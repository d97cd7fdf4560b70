"""Readings of a sampler over time, with the processor time that the sampler takes."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from ltui.training.gpu.reading import (
    NO_DRIVER,
    NO_GPU,
    GpuReading,
    Recording,
    Round,
    write_recording,
)
from ltui.training.gpu.sampler import GpuSampler

_POLL_S = 0.1
_OPEN_S = 60.0
"""Seconds until the driver must have been opened."""


class GpuSamples:
    """Keeps every round of readings of a ``GpuSampler``, from construction until ``stop``."""

    def __init__(self, *, period_s: float) -> None:
        """Raises ``RuntimeError`` if there are no GPUs."""
        self.phase = "opened"
        """Written with the rounds of readings from now on."""
        self.period_s = period_s
        self.sampler = GpuSampler(period_s=period_s)
        self._rounds: list[Round] = []
        self._began = time.time()
        self._stopping = threading.Event()
        self._wait_for_readings()
        self._thread = threading.Thread(target=self._keep, name="samples", daemon=True)
        self._thread.start()

    def _wait_for_readings(self) -> None:
        deadline = time.monotonic() + _OPEN_S
        while not (view := self.sampler.latest()).complete or not view.readings:
            if view.note in (NO_DRIVER, NO_GPU) or time.monotonic() > deadline:
                self.sampler.stop()
                raise RuntimeError(view.note or f"no readings after {_OPEN_S:.0f} s")
            time.sleep(_POLL_S)

    def _keep(self) -> None:
        newest = 0.0
        while not self._stopping.wait(min(_POLL_S, self.period_s / 4)):
            readings = self.sampler.latest().readings
            # The GPUs are read one after the other; with the last one the round is complete.
            at = readings[-1].sampled_at or 0.0
            if at > newest:
                newest = at
                self._rounds.append(
                    Round(at_s=at - self._began, phase=self.phase, readings=readings)
                )

    def latest(self, index: int) -> GpuReading:
        """Return the newest reading of a GPU."""
        return next(r for r in self.sampler.latest().readings if r.index == index)

    def since(self, index: int, began: float) -> list[GpuReading]:
        """Return the readings of a GPU from ``began`` (unix seconds) to one that is newer than
        now, for which it waits."""
        now, deadline = time.time(), time.monotonic() + 5 + self.period_s
        while (self.latest(index).sampled_at or 0.0) < now and time.monotonic() < deadline:
            time.sleep(_POLL_S / 2)
        time.sleep(2 * _POLL_S)
        kept = [r for entry in self._rounds for r in entry.readings if r.index == index]
        return [r for r in kept if (r.sampled_at or 0.0) >= began] or kept[-1:]

    def refused(self, index: int) -> list[str]:
        """Return the names of the queries that the driver refuses for a GPU."""
        devices = [device for device in self.sampler._devices if device.index == index]
        return sorted(name for device in devices for name in device._client._retry_at)

    def cost(self, seconds: float) -> tuple[float, float]:
        """Return the sampler's share of a core in percent, and its driver calls per second."""
        clock = time.pthread_getcpuclockid(self.sampler._thread.ident or 0)
        used, calls, began = time.clock_gettime(clock), self.sampler._client.calls, time.monotonic()
        time.sleep(seconds)
        span = time.monotonic() - began
        share = 100 * (time.clock_gettime(clock) - used) / span
        return share, (self.sampler._client.calls - calls) / span

    def stop(self) -> None:
        """Stop sampling."""
        self._stopping.set()
        self._thread.join()
        self.sampler.stop(5.0)

    def write(self, path: Path, driver: str | None, *, simulated: bool) -> int:
        """Write the rounds as a recording and return their number."""
        rounds = tuple(self._rounds)
        write_recording(path, Recording(rounds=rounds, driver=driver, simulated=simulated))
        return len(rounds)
