"""The classic small network for CIFAR-10: two 5x5 convolutions, three linear layers."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

NO_LABEL = -1
"""Label of an image that only pads a batch. It is neither trained on nor counted."""


class CifarCNN(LightningModule):
    """Classifier for images (n, 3, 32, 32), trained by Adam with a StepLR schedule."""

    def __init__(
        self, learning_rate: float = 0.001, step_size: int = 1, gamma: float = 0.1
    ) -> None:
        """``step_size``: epochs between two reductions of the learning rate by ``gamma``."""
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.step_size = step_size
        self.gamma = gamma
        self.network = nn.Sequential(
            nn.Conv2d(3, 6, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * 5 * 5, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, 10),
        )
        self.val_loss, self.val_accuracy = MeanMetric(), _accuracy()
        self.test_loss, self.test_accuracy = MeanMetric(), _accuracy()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.network(images)
        return scores

    def training_step(self, batch: Any) -> torch.Tensor:
        images, labels = batch
        return functional.cross_entropy(self(images), labels)

    def validation_step(self, batch: Any) -> None:
        self._measure("val", batch, self.val_loss, self.val_accuracy)

    def test_step(self, batch: Any) -> None:
        self._measure("test", batch, self.test_loss, self.test_accuracy)

    def _measure(
        self, part: str, batch: Any, loss: MeanMetric, accuracy: MulticlassAccuracy
    ) -> None:
        images, labels = batch
        scores = self(images)
        counted = (labels != NO_LABEL).sum()
        total = functional.cross_entropy(scores, labels, ignore_index=NO_LABEL, reduction="sum")
        # The mean is weighted by the number of labelled samples; torchmetrics sums over the ranks.
        loss.update(total / counted.clamp(min=1), weight=counted)
        accuracy.update(scores, labels)
        self.log(f"{part}/loss", loss)
        self.log(f"{part}/accuracy", accuracy, prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.learning_rate)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, self.step_size, self.gamma)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def _accuracy() -> MulticlassAccuracy:
    return MulticlassAccuracy(num_classes=10, average="micro", ignore_index=NO_LABEL)
