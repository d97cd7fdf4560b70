"""The lives of a run under SLURM: one start of its job each, and whether another may follow. Pure.

A job that is requeued runs its script again. Each such life is one attempt of the run. A life makes
progress if it leaves a good checkpoint of a later step than the one it began with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ltui.training.state.json_decoder import from_json

LIVES_WITHOUT_PROGRESS = 3
"""Number of lives in a row without progress after which a run is not started again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Life:
    """One start of the job of a run."""

    job_id: str
    restart: int = 0
    """How often SLURM had restarted this job before."""
    host: str | None = None
    started_at: float
    start_step: int = 0
    """Step of the checkpoint that it began with; 0 without one."""
    ended_at: float | None = None
    """None while it runs, or if it was killed before it could record its end."""
    end_step: int | None = None
    """Step of the last good checkpoint when it ended."""
    outcome: str | None = None
    """State of the run when it ended."""
    requeued: bool = False
    """True if the job was then requeued, or followed by another one, to continue the run."""

    @property
    def made_progress(self) -> bool:
        return self.end_step is not None and self.end_step > self.start_step

    def to_document(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Life:
        """Return the life that ``to_document`` wrote. Raise ``ValueError``."""
        return from_json(cls, document)


def refusal(lives: Sequence[Life]) -> str | None:
    """Return why the run must not be started again, or None. All ``lives`` have ended."""
    last = lives[-LIVES_WITHOUT_PROGRESS:]
    if len(last) < LIVES_WITHOUT_PROGRESS or any(life.made_progress for life in last):
        return None
    step = last[-1].end_step if last[-1].end_step is not None else last[-1].start_step
    position = f"still at step {step}" if step else "it has no checkpoint yet"
    return f"no progress in {LIVES_WITHOUT_PROGRESS} starts of its job ({position})"
