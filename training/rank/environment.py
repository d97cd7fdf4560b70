"""Read the environment variables by which a run reaches its ranks.

They are listed in ``docs/protocols.md``, "Environment of ltui's processes".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DEFAULT_QUEUE_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnvironment:
    """What a rank is told about its run."""

    run_dir: Path
    run_id: str
    attempt: int
    queue_bytes: int = DEFAULT_QUEUE_BYTES
    resume_from: Path | None = None
    checkpoint_every_s: float = 0.0
    """Seconds between periodic checkpoints; 0 for none."""
    checkpoint_keep: int = 2
    changed: tuple[str, ...] = ()
    """What ``--set`` changed for this attempt: ``optimizer.init_args.lr=0.01``."""
    best: str | None = None
    """The metric by which the best checkpoints are kept; None for none."""
    best_mode: str = "min"
    best_keep: int = 1
    restarts: int = 0
    """How often torch elastic restarted its workers within this attempt."""

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> RankEnvironment | None:
        """None where the process belongs to no run. Raises ``ValueError`` for a number that is
        none."""
        run_dir, run_id = environ.get("LTUI_RUN_DIR"), environ.get("LTUI_RUN_ID")
        attempt = environ.get("LTUI_ATTEMPT")
        if not (run_dir and run_id and attempt):
            return None
        resume_from = environ.get("LTUI_RESUME_FROM")
        return cls(
            run_dir=Path(run_dir),
            run_id=run_id,
            attempt=int(attempt),
            queue_bytes=int(environ.get("LTUI_QUEUE_BYTES") or DEFAULT_QUEUE_BYTES),
            resume_from=Path(resume_from) if resume_from else None,
            checkpoint_every_s=float(environ.get("LTUI_CHECKPOINT_EVERY_S") or 0),
            checkpoint_keep=max(1, int(environ.get("LTUI_CHECKPOINT_KEEP") or 2)),
            changed=tuple(json.loads(environ.get("LTUI_CHANGED") or "[]")),
            best=environ.get("LTUI_CHECKPOINT_BEST") or None,
            best_mode=environ.get("LTUI_CHECKPOINT_BEST_MODE") or "min",
            best_keep=max(1, int(environ.get("LTUI_CHECKPOINT_BEST_KEEP") or 1)),
            restarts=int(environ.get("TORCHELASTIC_RESTART_COUNT") or 0),
        )

    @property
    def queue_dir(self) -> Path:
        return self.run_dir / "queue" / str(self.attempt)

    @property
    def checkpoints_dir(self) -> Path:
        return self.run_dir / "checkpoints"


def rank_from_environment(environ: Mapping[str, str]) -> int | None:
    """The global rank where a launcher has said it (torch elastic does), else None."""
    if environ.get("RANK", "").isdigit() and "WORLD_SIZE" in environ:
        return int(environ["RANK"])
    return None
