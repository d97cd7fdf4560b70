"""Which checkpoints are the best by a metric: rank 0 decides, manifests keep it over attempts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ltui.training.rank.checkpoint_files import best_values, prune_best
from ltui.training.rank.environment import RankEnvironment


class BestCheckpoints:
    """Asks after every validation and epoch whether the metric is among the best so far."""

    def __init__(self, environment: RankEnvironment) -> None:
        self.metric = environment.best
        self._mode, self._keep = environment.best_mode, environment.best_keep
        self._folder = environment.checkpoints_dir
        self._seen: float | None = None
        self.value: float | None = None
        """That deserves a checkpoint now."""

    def look(self, metrics: Mapping[str, Any]) -> bool:
        """Whether a checkpoint is due. A value that was looked at before is no news."""
        if self.metric is None or self.metric not in metrics:
            return False
        value = float(metrics[self.metric])
        if not math.isfinite(value) or value == self._seen:
            return False
        self._seen = value
        kept = [found for found, _ in best_values(self._folder, self.metric)]
        sign = -1.0 if self._mode == "max" else 1.0
        better = sum(sign * other <= sign * value for other in kept)
        self.value = value if better < self._keep else None
        return self.value is not None

    def take(self) -> dict[str, Any]:
        """What the manifest of the checkpoint says; it is no longer due."""
        value, self.value = self.value, None
        return {"best": {"metric": self.metric, "value": value, "mode": self._mode}}

    def prune(self) -> None:
        if self.metric is not None:
            prune_best(self._folder, self.metric, self._mode, self._keep)
