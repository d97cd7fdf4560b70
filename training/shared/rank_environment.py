"""The environment variables through which a run configures its ranks: written and read.

``docs/protocols.md``, "Environment of ltui's processes", lists them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ltui.training.shared.defaults import CHECKPOINTS_KEPT, QUEUE_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnvironment:
    """The configuration that a rank gets from its run."""

    run_dir: Path
    run_id: str
    attempt: int
    queue_bytes: int = QUEUE_BYTES
    """Capacity of the rank's queue."""
    resume_from: Path | None = None
    """The checkpoint to resume from; None to start from the beginning."""
    checkpoint_every_s: float = 0.0
    """Seconds between periodic checkpoints; 0 for none."""
    checkpoint_keep: int = CHECKPOINTS_KEPT
    """Number of periodic checkpoints to keep."""
    overrides: tuple[str, ...] = ()
    """Settings that ``--set`` changed for this attempt, as ``optimizer.init_args.lr=0.01``."""
    best_metric: str | None = None
    """The metric by which the best checkpoints are kept; None for none."""
    best_mode: str = "min"
    """``min`` or ``max``."""
    best_keep: int = 1
    """Number of best checkpoints to keep."""
    earlier_steps: Mapping[int, int] | None = None
    """Earlier attempt -> last of its steps that are still part of the run; None if not known."""
    nodes: int = 1
    """Number of nodes of the run whose ranks ltui connects; 1 if it runs on one machine."""
    restarts: int = 0
    """How often torch elastic restarted its workers within this attempt, counted by the agent of
    this node."""
    worker_group: int = 0
    """Number by which the workers that torch elastic started together on all nodes differ from
    those before a restart; 0 without torch elastic."""

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> RankEnvironment | None:
        """Return the configuration, or None if the process does not belong to a run.

        Raises ``ValueError`` if a variable should be a number and is not.
        """
        needed = (_VARIABLES[field].name for field in ("run_dir", "run_id", "attempt"))
        if not all(environ.get(name) for name in needed):
            return None
        values = {
            field: variable.read(text)
            for field, variable in _VARIABLES.items()
            if (text := environ.get(variable.name))
        }
        return cls(
            **values,
            restarts=int(environ.get("TORCHELASTIC_RESTART_COUNT") or 0),
            worker_group=_worker_group(environ),
        )

    def variables(self) -> dict[str, str | None]:
        """Return the variables that ``read`` reads; None removes one.

        ``restarts`` and ``worker_group`` are not among them: torch elastic sets theirs.
        """
        return {
            variable.name: None if value is None or value == () else variable.write(value)
            for field, variable in _VARIABLES.items()
            for value in (getattr(self, field),)
        }

    @property
    def queue_dir(self) -> Path:
        """The folder of the attempt's queues."""
        return self.run_dir / "queue" / str(self.attempt)

    @property
    def checkpoints_dir(self) -> Path:
        """The folder of the run's checkpoints."""
        return self.run_dir / "checkpoints"


class _Variable(NamedTuple):
    """An environment variable, and how its text is read and written."""

    name: str
    read: Callable[[str], Any] = str
    write: Callable[[Any], str] = str


def _count(text: str) -> int:
    return max(1, int(text))


def _earlier_steps(text: str) -> dict[int, int]:
    return {int(attempt): int(step) for attempt, step in json.loads(text).items()}


_VARIABLES = {
    "run_dir": _Variable("LTUI_RUN_DIR", Path),
    "run_id": _Variable("LTUI_RUN_ID"),
    "attempt": _Variable("LTUI_ATTEMPT", int),
    "queue_bytes": _Variable("LTUI_QUEUE_BYTES", int),
    "resume_from": _Variable("LTUI_RESUME_FROM", Path),
    "checkpoint_every_s": _Variable("LTUI_CHECKPOINT_EVERY_S", float, "{:g}".format),
    "checkpoint_keep": _Variable("LTUI_CHECKPOINT_KEEP", _count),
    "overrides": _Variable("LTUI_CHANGED", lambda text: tuple(json.loads(text)), json.dumps),
    "best_metric": _Variable("LTUI_CHECKPOINT_BEST"),
    "best_mode": _Variable("LTUI_CHECKPOINT_BEST_MODE"),
    "best_keep": _Variable("LTUI_CHECKPOINT_BEST_KEEP", _count),
    "earlier_steps": _Variable("LTUI_EARLIER_STEPS", _earlier_steps, json.dumps),
    "nodes": _Variable("LTUI_NODES", _count),
}
"""The variable of each field of ``RankEnvironment`` that the run sets."""


def _worker_group(environ: Mapping[str, str]) -> int:
    # The agents choose a free port anew for each start of the workers, the same on every node.
    started = "TORCHELASTIC_RUN_ID" in environ
    return integer_variable(environ, "MASTER_PORT") if started else 0


def integer_variable(environ: Mapping[str, str], name: str, default: int = 0) -> int:
    """Return the number in a variable, or ``default`` if it is not set or is no number."""
    text = environ.get(name, "")
    return int(text) if text.isdigit() else default


def rank_from_environment(environ: Mapping[str, str]) -> int | None:
    """Return the global rank if a launcher such as torch elastic has set it, else None."""
    if environ.get("RANK", "").isdigit() and "WORLD_SIZE" in environ:
        return int(environ["RANK"])
    return None
