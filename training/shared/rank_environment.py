"""The environment variables through which a run configures its ranks: written and read.

``docs/protocols.md``, "Environment of ltui's processes", lists them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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
        run_dir, run_id = environ.get("LTUI_RUN_DIR"), environ.get("LTUI_RUN_ID")
        attempt = environ.get("LTUI_ATTEMPT")
        if not (run_dir and run_id and attempt):
            return None
        resume_from = environ.get("LTUI_RESUME_FROM")
        return cls(
            run_dir=Path(run_dir),
            run_id=run_id,
            attempt=int(attempt),
            queue_bytes=int(environ.get("LTUI_QUEUE_BYTES") or QUEUE_BYTES),
            resume_from=Path(resume_from) if resume_from else None,
            checkpoint_every_s=float(environ.get("LTUI_CHECKPOINT_EVERY_S") or 0),
            checkpoint_keep=max(1, int(environ.get("LTUI_CHECKPOINT_KEEP") or CHECKPOINTS_KEPT)),
            overrides=tuple(json.loads(environ.get("LTUI_CHANGED") or "[]")),
            best_metric=environ.get("LTUI_CHECKPOINT_BEST") or None,
            best_mode=environ.get("LTUI_CHECKPOINT_BEST_MODE") or "min",
            best_keep=max(1, int(environ.get("LTUI_CHECKPOINT_BEST_KEEP") or 1)),
            earlier_steps=_earlier_steps(environ.get("LTUI_EARLIER_STEPS")),
            nodes=max(1, int(environ.get("LTUI_NODES") or 1)),
            restarts=int(environ.get("TORCHELASTIC_RESTART_COUNT") or 0),
            worker_group=_worker_group(environ),
        )

    def variables(self) -> dict[str, str | None]:
        """Return the variables that ``read`` reads; None removes one.

        ``restarts`` and ``worker_group`` are not among them: torch elastic sets theirs.
        """
        return {
            "LTUI_RUN_DIR": str(self.run_dir),
            "LTUI_RUN_ID": self.run_id,
            "LTUI_ATTEMPT": str(self.attempt),
            "LTUI_QUEUE_BYTES": str(self.queue_bytes),
            "LTUI_RESUME_FROM": None if self.resume_from is None else str(self.resume_from),
            "LTUI_CHECKPOINT_EVERY_S": f"{self.checkpoint_every_s:g}",
            "LTUI_CHECKPOINT_KEEP": str(self.checkpoint_keep),
            "LTUI_CHANGED": json.dumps(self.overrides) if self.overrides else None,
            "LTUI_CHECKPOINT_BEST": self.best_metric,
            "LTUI_CHECKPOINT_BEST_MODE": self.best_mode,
            "LTUI_CHECKPOINT_BEST_KEEP": str(self.best_keep),
            "LTUI_EARLIER_STEPS": (
                None if self.earlier_steps is None else json.dumps(self.earlier_steps)
            ),
            "LTUI_NODES": str(self.nodes),
        }

    @property
    def queue_dir(self) -> Path:
        """The folder of the attempt's queues."""
        return self.run_dir / "queue" / str(self.attempt)

    @property
    def checkpoints_dir(self) -> Path:
        """The folder of the run's checkpoints."""
        return self.run_dir / "checkpoints"


def _earlier_steps(text: str | None) -> dict[int, int] | None:
    if not text:
        return None
    return {int(attempt): int(step) for attempt, step in json.loads(text).items()}


def _worker_group(environ: Mapping[str, str]) -> int:
    # The agents choose a free port anew for each start of the workers, the same on every node.
    port = environ.get("MASTER_PORT", "")
    return int(port) if "TORCHELASTIC_RUN_ID" in environ and port.isdigit() else 0


def rank_from_environment(environ: Mapping[str, str]) -> int | None:
    """Return the global rank if a launcher such as torch elastic has set it, else None."""
    if environ.get("RANK", "").isdigit() and "WORLD_SIZE" in environ:
        return int(environ["RANK"])
    return None
