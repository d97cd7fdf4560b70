"""The instruments ``profile`` and ``memory`` of ``ltui rerun``, by ``torch.profiler``."""

from __future__ import annotations

from typing import Any

import torch

from ltui.training.rank.channel import current_channel
from ltui.training.rank.live_profile import MOST_TRACE_BYTES, create_profiler, resident_bytes
from ltui.training.rank.step_rerun import Instrument

OPERATORS_SENT = 15
"""Number of operators that are sent, those with the largest share."""


class Profile(Instrument):
    """Profiles the steps by ``torch.profiler``: what computes the longest.

    No stacks and no shapes are recorded, because they would make it slow and large.
    """

    measures_memory = False

    def begin(self) -> None:
        """Start the profiler in this thread."""
        self._peak = 0
        """Most bytes in a step."""
        self._profiler, self._device = create_profiler(memory=self.measures_memory)
        if self._device:
            torch.cuda.reset_peak_memory_stats()
        self._profiler.start()

    def step_ended(self, step: int) -> None:
        """Note how much memory is used."""
        super().step_ended(step)
        used = torch.cuda.max_memory_allocated() if self._device else resident_bytes()
        self._peak = max(self._peak, used)

    def end(self) -> None:
        """Stop the profiler, write its trace beside the log, and send the largest operators."""
        self._profiler.stop()
        channel = current_channel()
        if channel is None:
            return
        path = channel.environment.run_dir / f"rank-{channel.rank:05d}.trace.json"
        self._profiler.export_chrome_trace(str(path))
        size = path.stat().st_size
        path.chmod(0o600)
        if size > MOST_TRACE_BYTES:
            path.unlink()
        shares = [(self._share(each), each) for each in self._profiler.key_averages()]
        largest = sorted(shares, key=lambda pair: -pair[0])[:OPERATORS_SENT]
        channel.event(
            "rerun_profile",
            "The steps were profiled.",
            path=str(path) if size <= MOST_TRACE_BYTES else None,
            peak_bytes=self._peak,
            device=self._device,
            operators=[
                {"name": each.key[:200], "calls": each.count, "amount": share}
                for share, each in largest
                if share > 0
            ],
        )

    def _share(self, operator: Any) -> float:
        """Return the bytes that an operator allocates, or the seconds it computes, by itself."""
        if self.measures_memory:
            name = "self_device_memory_usage" if self._device else "self_cpu_memory_usage"
            return float(getattr(operator, name))
        name = "self_device_time_total" if self._device else "self_cpu_time_total"
        return float(getattr(operator, name)) * 1e-6


class MemoryProfile(Profile):
    """Profiles what the steps allocate."""

    measures_memory = True
