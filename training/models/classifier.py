"""Base of the classifiers: loss, and the metrics of validation and test."""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy


def one_cycle(optimizer: torch.optim.Optimizer, peak: float, trainer: Any) -> dict[str, Any]:
    """Return ``optimizer`` with a one-cycle schedule, as a result for ``configure_optimizers``.

    The learning rate rises to ``peak`` and falls again over all steps of the trainer. It is
    constant if the number of steps is unknown.
    """
    steps = trainer.estimated_stepping_batches
    if not math.isfinite(steps) or steps < 2:
        return {"optimizer": optimizer}
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak, total_steps=int(steps))
    return {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": schedule, "interval": "step"},
    }


def decay_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the trainable parameters in two groups. Norms and biases have no weight decay."""
    trainable = [p for p in module.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trainable if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim <= 1], "weight_decay": 0.0},
    ]


NO_LABEL = -1
"""Label of a sample that only pads a batch. It is neither trained on nor counted."""


class Classifier(LightningModule):
    """Classifier for batches of inputs and labels, which logs the loss and the accuracy.

    ``forward`` gets all parts of a batch except the labels, and returns scores (samples, classes).
    By default it calls ``network``.
    """

    label_smoothing = 0.0
    network: Any

    def forward(self, *inputs: Any) -> torch.Tensor:
        scores: torch.Tensor = self.network(*inputs)
        return scores

    def add_metrics(self, classes: int, top5: bool = False) -> None:
        """Create the metrics. Call it once, when the number of classes is known."""
        self.val_metrics = _metrics(classes, top5, "val/")
        self.test_metrics = _metrics(classes, top5, "test/")

    def training_step(self, batch: Any) -> torch.Tensor:
        *inputs, labels = batch
        return functional.cross_entropy(
            self(*inputs), labels, ignore_index=NO_LABEL, label_smoothing=self.label_smoothing
        )

    def validation_step(self, batch: Any) -> None:
        *inputs, labels = batch
        self.measure(self.val_metrics, self(*inputs), labels)

    def test_step(self, batch: Any) -> None:
        *inputs, labels = batch
        self.measure(self.test_metrics, self(*inputs), labels)

    def measure(
        self, metrics: MetricCollection, scores: torch.Tensor, labels: torch.Tensor
    ) -> None:
        """Update and log the metrics."""
        loss, counted = mean_loss(scores, labels)
        metrics["loss"].update(loss, weight=counted)
        for name, metric in metrics.items(keep_base=True):
            if name != "loss":
                metric.update(scores, labels)
            self.log(
                f"{metrics.prefix}{name}",
                metric,
                prog_bar=name == "accuracy",
                batch_size=len(labels),
            )


def mean_loss(scores: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean loss of the labelled samples and their number.

    It is the weight of the mean in a ``MeanMetric``, which sums over batches and ranks.
    """
    counted = (labels != NO_LABEL).sum()
    total = functional.cross_entropy(scores.float(), labels, ignore_index=NO_LABEL, reduction="sum")
    return total / counted.clamp(min=1), counted


def _metrics(classes: int, top5: bool, prefix: str) -> MetricCollection:
    metrics: dict[str, Any] = {"loss": MeanMetric(), "accuracy": _accuracy(classes, 1)}
    if top5:
        metrics["accuracy_top5"] = _accuracy(classes, 5)
    return MetricCollection(metrics, prefix=prefix, compute_groups=False)


def _accuracy(classes: int, top_k: int) -> MulticlassAccuracy:
    return MulticlassAccuracy(classes, top_k=top_k, average="micro", ignore_index=NO_LABEL)
