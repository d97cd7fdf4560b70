"""Sequence classifier with a convolution and a transformer encoder."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ltui.training.models.classifier import Classifier, one_cycle

_MAX_WAVELENGTH = 10_000.0
_ROWS_SEEN = 7
"""Kernel size of the first layer in rows."""


class SequenceClassifier(Classifier):
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
        self.add_metrics(classes)

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
