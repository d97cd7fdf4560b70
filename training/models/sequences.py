"""Sequence classifier with a convolution and a transformer encoder."""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from ltui.training.models.schedules import one_cycle

NO_LABEL = -1
"""Label of a sequence that only pads a batch. It is neither trained on nor counted."""
_MAX_WAVELENGTH = 10_000.0
_ROWS_SEEN = 7
"""Kernel size of the first layer in rows."""


class SequenceClassifier(LightningModule):
    """Classifier for batches of (values (samples, rows, columns), mask (samples, rows), labels)."""

    def __init__(  # noqa: PLR0913  (a configuration file names each parameter)
        self,
        columns: int = 8,
        classes: int = 8,
        width: int = 64,
        layers: int = 2,
        heads: int = 4,
        dropout: float = 0.1,
        learning_rate: float = 0.001,
        weight_decay: float = 0.01,
        compile: bool = False,  # noqa: A002  (as Lightning and torch name it)
    ) -> None:
        """``columns``: columns of a row in the file. ``width``: width of a layer, a multiple of
        ``heads``. ``compile``: use ``torch.compile``, which compiles at most once for each length
        of
        a batch."""
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.enter = nn.Conv1d(columns, width, _ROWS_SEEN, padding=_ROWS_SEEN // 2)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.leave = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))
        if compile:
            self.encoder.compile(dynamic=True)
        self.val_loss, self.val_accuracy = MeanMetric(), _accuracy(classes)
        self.test_loss, self.test_accuracy = MeanMetric(), _accuracy(classes)

    def forward(self, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return scores (samples, classes). Masked rows have no effect."""
        values = values * mask.unsqueeze(-1).to(values.dtype)
        inner = functional.gelu(self.enter(values.transpose(1, 2)).transpose(1, 2))
        inner = inner + positions(inner.shape[1], inner.shape[2]).to(inner)
        inner = self.encoder(inner, src_key_padding_mask=~mask)
        weights = mask.unsqueeze(-1).to(inner.dtype)
        mean = (inner * weights).sum(1) / weights.sum(1).clamp(min=1)
        scores: torch.Tensor = self.leave(mean)
        return scores

    def training_step(self, batch: Any) -> torch.Tensor:
        values, mask, labels = batch
        return functional.cross_entropy(self(values, mask), labels, ignore_index=NO_LABEL)

    def validation_step(self, batch: Any) -> None:
        self._measure("val", batch, self.val_loss, self.val_accuracy)

    def test_step(self, batch: Any) -> None:
        self._measure("test", batch, self.test_loss, self.test_accuracy)

    def _measure(
        self, part: str, batch: Any, loss: MeanMetric, accuracy: MulticlassAccuracy
    ) -> None:
        values, mask, labels = batch
        scores = self(values, mask)
        counted = (labels != NO_LABEL).sum()
        total = functional.cross_entropy(scores, labels, ignore_index=NO_LABEL, reduction="sum")
        # The mean is weighted by the number of labelled samples; torchmetrics sums over the ranks.
        loss.update(total / counted.clamp(min=1), weight=counted)
        accuracy.update(scores, labels)
        self.log(f"{part}/loss", loss, batch_size=len(labels))
        self.log(f"{part}/accuracy", accuracy, prog_bar=True, batch_size=len(labels))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=self.learning_rate, weight_decay=self.weight_decay
        )
        return one_cycle(optimizer, self.learning_rate, self.trainer)


def positions(rows: int, width: int) -> torch.Tensor:
    """Return sines and cosines of row numbers (rows, width), as in "Attention is all you need"."""
    numbers = torch.arange(rows, dtype=torch.float32).unsqueeze(1)
    frequencies = torch.exp(torch.arange(0, width, 2) * (-math.log(_MAX_WAVELENGTH) / width))
    angles = numbers * frequencies
    return torch.stack([angles.sin(), angles.cos()], dim=-1).reshape(rows, -1)[:, :width]


def _accuracy(classes: int) -> MulticlassAccuracy:
    return MulticlassAccuracy(num_classes=classes, average="micro", ignore_index=NO_LABEL)
