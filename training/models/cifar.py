"""The classic small network for CIFAR-10: two 5x5 convolutions, three linear layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ltui.training.models.classifier import Classifier


class CifarCNN(Classifier):
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
        self.add_metrics(10)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.learning_rate)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, self.step_size, self.gamma)
        return {"optimizer": optimizer, "lr_scheduler": schedule}
