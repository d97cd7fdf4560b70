"""A small convolutional network for images of digits."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ltui.training.models.classifier import Classifier


class DigitsCNN(Classifier):
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
        self.add_metrics(classes)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
        steps = max(1, int(self.trainer.estimated_stepping_batches))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }
