"""A small convolutional network for images of digits."""

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


class DigitsCNN(LightningModule):
    """Classifier for images (n, 1, 8, 8) with three convolutions and a linear layer."""

    def __init__(self, learning_rate: float = 0.002, width: int = 32, classes: int = 10) -> None:
        """``width``: channels of the first convolution. The others have twice as many."""
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.network = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.25),
            nn.Linear(2 * width * 16, classes),
        )
        self.validation_loss = MeanMetric()
        self.validation_accuracy = MulticlassAccuracy(
            num_classes=classes, average="micro", ignore_index=NO_LABEL
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.network(images)
        return scores

    def training_step(self, batch: Any) -> torch.Tensor:
        images, labels = batch
        return functional.cross_entropy(self(images), labels)

    def validation_step(self, batch: Any) -> None:
        images, labels = batch
        scores = self(images)
        counted = (labels != NO_LABEL).sum()
        total = functional.cross_entropy(scores, labels, ignore_index=NO_LABEL, reduction="sum")
        # The mean is weighted by the number of labelled samples; torchmetrics sums over the ranks.
        self.validation_loss.update(total / counted.clamp(min=1), weight=counted)
        self.validation_accuracy.update(scores, labels)
        self.log("val/loss", self.validation_loss)
        self.log("val/accuracy", self.validation_accuracy, prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
        steps = max(1, int(self.trainer.estimated_stepping_batches))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }
