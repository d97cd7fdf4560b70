"""The instruments ``profile`` and ``memory`` of ``ltui rerun``, by ``torch.profiler``."""

from __future__ import annotations

import torch

from ltui.training.rank.channel import current_channel
from ltui.training.rank.live_profile import MOST_TRACE_BYTES, create_profiler, used_bytes
from ltui.training.rank.step_rerun import Instrument

OPERATORS_SENT = 15
"""Number of operators that are sent, those with the largest share."""


class Profile(Instrument):
    """Profiles the steps by ``torch.profiler``: what computes the longest.

    No stacks and no shapes are recorded, because they would make it slow and large.
    """

    measure, unit = "time_total", 1e-6
    """What is measured of an operator, the end of an attribute's name, and its unit in seconds."""

    def begin(self) -> None:
        """Start the profiler in this thread."""
        self._peak = 0
        """Most bytes in a step."""
        self._profiler, self._device = create_profiler(memory=self.measure == "memory_usage")
        if self._device:
            torch.cuda.reset_peak_memory_stats()
        self._profiler.start()

    def step_ended(self, step: int) -> None:
        """Note how much memory is used."""
        super().step_ended(step)
        self._peak = max(self._peak, used_bytes(on_device=self._device))

    def end(self) -> None:
        """Stop the profiler, write its trace beside the log, and send the largest operators."""
        self._profiler.stop()
        channel = current_channel()
        if channel is None:
            return
        path = channel.environment.run_dir / f"rank-{channel.rank:05d}.trace.json"
        self._profiler.export_chrome_trace(str(path))
        path.chmod(0o600)
        is_kept = path.stat().st_size <= MOST_TRACE_BYTES
        if not is_kept:
            path.unlink()
        own = f"self_{'device' if self._device else 'cpu'}_{self.measure}"
        operators = [
            {"name": o.key[:200], "calls": o.count, "amount": float(getattr(o, own)) * self.unit}
            for o in self._profiler.key_averages()
        ]
        largest = sorted(operators, key=lambda o: -o["amount"])[:OPERATORS_SENT]
        channel.event(
            "rerun_profile",
            "The steps were profiled.",
            path=str(path) if is_kept else None,
            peak_bytes=self._peak,
            device=self._device,
            operators=[operator for operator in largest if operator["amount"] > 0],
        )


class MemoryProfile(Profile):
    """Profiles what the steps allocate."""

    measure, unit = "memory_usage", 1.0
    """The unit is a byte."""
