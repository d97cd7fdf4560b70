"""The best checkpoints by a metric: rank 0 decides, manifests keep the values over attempts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ltui.training.rank.checkpoint_files import read_manifest, remove_checkpoint
from ltui.training.rank.environment import RankEnvironment
from ltui.training.rank.weights_check import INFINITE, NAN


class BestCheckpoints:
    """Decides after every validation and epoch if the metric is among the best so far."""

    def __init__(self, environment: RankEnvironment) -> None:
        self.metric = environment.best_metric
        self._mode, self._keep = environment.best_mode, environment.best_keep
        self._folder = environment.checkpoints_dir
        self._last_value: float | None = None
        self.pending_value: float | None = None
        """The value for which a checkpoint is due; None if none is due."""

    def update(self, metrics: Mapping[str, Any]) -> bool:
        """Return True if a checkpoint is due. A value equal to the last one is ignored."""
        if self.metric is None or self.metric not in metrics:
            return False
        value = float(metrics[self.metric])
        if not math.isfinite(value) or value == self._last_value:
            return False
        self._last_value = value
        sign = -1.0 if self._mode == "max" else 1.0
        at_least_as_good = sum(sign * saved <= sign * value for saved, _ in self._saved())
        self.pending_value = value if at_least_as_good < self._keep else None
        return self.pending_value is not None

    def take_manifest_fields(self) -> dict[str, Any]:
        """Return the manifest fields of the checkpoint that is due. Then none is due."""
        value, self.pending_value = self.pending_value, None
        return {"best": {"metric": self.metric, "value": value, "mode": self._mode}}

    def prune(self) -> None:
        """Remove the best checkpoints that are no longer among the best, or are not finite."""
        kept = sorted(self._saved(), reverse=self._mode == "max")[: self._keep]
        for manifest in {path for _, path in self._saved(finite=False)} - {p for _, p in kept}:
            remove_checkpoint(manifest.with_suffix(""))

    def _saved(self, *, finite: bool = True) -> list[tuple[float, Path]]:
        """Return value and manifest path of each checkpoint that was saved for the metric.

        Without ``finite``, also of those whose weights or value are NaN or infinite.
        """
        saved = []
        for path in self._folder.glob("step-*-best*.ckpt.json"):
            manifest = read_manifest(path)
            try:
                best = manifest["best"]
                value, is_ours = float(best["value"]), best["metric"] == self.metric
            except (ValueError, KeyError, TypeError):
                continue
            bad = manifest.get("weights") in (NAN, INFINITE) or not math.isfinite(value)
            if is_ours and not (finite and bad):
                saved.append((value, path))
        return saved
