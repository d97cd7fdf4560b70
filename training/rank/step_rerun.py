"""The steps that ``ltui rerun`` executes again, seen from a rank: the instrument, and the end.

The variable ``LTUI_RERUN`` names the instrument and its steps. The instrument begins when the step
before its first one has ended. If there is none in this process, it begins with the first forward
pass in which gradients are recorded, which is after the sanity check of a Trainer. Each rank ends
by itself after the last step: all ranks take the same steps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from torch import is_grad_enabled
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.data import get_worker_info

from ltui.training.rank.channel import current_channel
from ltui.training.rank.coordination.stop_signals import RunStopped
from ltui.training.shared.defaults import RERUN_VARIABLE
from ltui.training.shared.record_types import Outcome, Phase

_INSTRUMENTS = {
    "compare": ("step_rerun", "Instrument"),
    "nan": ("nan_watch", "NanWatch"),
    "profile": ("step_profile", "Profile"),
    "memory": ("step_profile", "MemoryProfile"),
    "pdb": ("step_debugger", "Debugger"),
}
"""Module and class of each instrument."""


class Instrument:
    """What observes the steps. This one does nothing: the command compares the losses."""

    def __init__(self, first: int, options: Mapping[str, Any]) -> None:
        self.step = first
        """The step that goes on."""
        self.options = options

    def begin(self) -> None:
        """Observe from now on."""

    def before_forward(self, module: Any, inputs: Any) -> None:
        """Observe what a module gets: that with which the instrument began, and a hook of torch."""

    def step_ended(self, step: int) -> None:
        """Pass the end of a step that was observed."""
        self.step = step + 1

    def end(self) -> None:
        """Observe no more."""


class Rerun:
    """What this process executes again."""

    def __init__(
        self, *, first: int, last: int, after: int, instrument: str, **options: Any
    ) -> None:
        """Steps ``first`` to ``last`` are of interest; the program continues ``after`` a step."""
        self._first, self._last = first, last
        self._name, self._options = instrument, options
        self._instrument: Instrument | None = None
        self._first_forward: Any = None
        if first == after + 1:
            self._first_forward = register_module_forward_pre_hook(self._at_first_forward)

    def _at_first_forward(self, module: Any, inputs: Any) -> None:
        if is_grad_enabled() and get_worker_info() is None:
            self._begin().before_forward(module, inputs)

    def _begin(self) -> Instrument:
        """Begin to use the instrument, which observes the first step."""
        if self._first_forward is not None:
            self._first_forward.remove()
            self._first_forward = None
        if self._instrument is None:
            module, name = _INSTRUMENTS[self._name]
            kind: type[Instrument] = getattr(import_module(f"ltui.training.rank.{module}"), name)
            self._instrument = kind(self._first, self._options)
            self._instrument.begin()
        return self._instrument

    def step_ended(self, step: int, *, body_ended: bool = True, more_batches: bool = False) -> None:
        """Pass the end of a step. Raise ``RunStopped`` after the last one.

        Without ``body_ended``, the program has yet to log the values of this step: then it ends
        with the next one. So it does if losses are compared and there may be ``more_batches``:
        those without a step of the optimizer, whose losses belong to the step before them.
        """
        if self._instrument is not None and step >= self._first:
            self._instrument.step_ended(step)
        elif step == self._first - 1:
            self._begin()
        if step >= self._last + (not body_ended or (more_batches and self._name == "compare")):
            self._stop(step)

    def _stop(self, step: int) -> None:
        if self._instrument is not None:
            self._instrument.end()
        if (channel := current_channel()) is not None:
            channel.pulse.set(phase=Phase.STOPPING, outcome=Outcome.STOPPED)
            text = f"Stopped at step {step}, the end of what is executed again."
            channel.event_from_rank_0("stopped", text, global_step=step, checkpoint=None)
        raise RunStopped(step)


def _read() -> Rerun | None:
    text = os.environ.get(RERUN_VARIABLE)
    return Rerun(**json.loads(text)) if text else None


RERUN = _read()
"""What this process executes again; None in any other run."""
