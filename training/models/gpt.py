# ruff: noqa: ARG002  (save_hyperparameters keeps the arguments)
"""A small GPT on bytes, which shards itself if the strategy has a device mesh."""

from __future__ import annotations

from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional
from torchmetrics import MeanMetric

from ltui.training.models.classifier import decay_groups, mean_loss, one_cycle

BYTES = 256
_INITIAL_STD = 0.02
"""Standard deviation of the initial weights."""


class Block(nn.Module):
    """Transformer block: causal self-attention and two linear layers, with residual connections."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.enter = nn.Linear(width, 3 * width)
        self.leave = nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, inner: torch.Tensor) -> torch.Tensor:
        samples, length, width = inner.shape
        parts = self.enter(self.before_attention(inner))
        parts = parts.view(samples, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        inner = inner + self.leave(attended.transpose(1, 2).reshape(samples, length, width))
        wide = functional.gelu(self.widen(self.before_mlp(inner)))
        return inner + cast(torch.Tensor, self.narrow(wide))


class Network(nn.Module):
    """Network from bytes (samples, length) to scores of the next byte (samples, length, 256)."""

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTES, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.leave = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, BYTES))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        inner = self.bytes(text) + self.places(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            inner = block(inner)
        scores: torch.Tensor = self.leave(inner)
        return scores


class GPT(LightningModule):
    """Language model for batches of (bytes (samples, length), next bytes (samples, length))."""

    def __init__(
        self,
        width: int = 256,
        layers: int = 6,
        heads: int = 8,
        context: int = 256,
        learning_rate: float = 0.001,
        weight_decay: float = 0.1,
        meta_device: bool = False,
        compile: bool = False,  # noqa: A002  (as torch names it)
    ) -> None:
        """``width``: a multiple of ``heads``. ``context``: at least the context of the data.
        ``meta_device``: with a sharding strategy, build the model on the meta device, so that each
        rank only allocates its own part. ``compile``: use ``torch.compile`` for each block."""
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is no multiple of heads {heads}")
        self.save_hyperparameters()
        self.network: Network | None = None
        self.val_loss, self.test_loss = MeanMetric(), MeanMetric()

    def configure_model(self) -> None:
        """Build and shard the network."""
        if self.network is not None:
            return
        options, mesh = self.hparams, self.device_mesh
        on_meta = mesh is not None and options["meta_device"]
        with torch.device("meta"):
            network = Network(
                options["width"], options["layers"], options["heads"], options["context"]
            )
        if options["compile"]:
            for block in network.blocks:
                block.compile()
        if not on_meta:
            network.to_empty(device="cpu")
            initialise_weights(network)
        if mesh is not None:
            shard(network, mesh["data_parallel"])
        if on_meta:
            # Lightning's own initialisation would leave the counts of the metrics uninitialised.
            network.to_empty(device=self.trainer.strategy.root_device)
            initialise_weights(network)
        self.network = network

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        assert self.network is not None
        scores: torch.Tensor = self.network(text)
        return scores

    def _loss(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean loss of all counted bytes in nats, and their number."""
        text, following = batch
        return mean_loss(self(text).flatten(0, 1), following.flatten())

    def training_step(self, batch: Any) -> torch.Tensor:
        return self._loss(batch)[0]

    def validation_step(self, batch: Any) -> None:
        self._measure("val", batch, self.val_loss)

    def test_step(self, batch: Any) -> None:
        self._measure("test", batch, self.test_loss)

    def _measure(self, part: str, batch: Any, loss: MeanMetric) -> None:
        value, counted = self._loss(batch)
        loss.update(value, weight=counted)
        self.log(f"{part}/loss", loss, prog_bar=True, batch_size=len(batch[0]))

    def configure_optimizers(self) -> Any:
        groups = decay_groups(self, self.hparams["weight_decay"])
        rate = self.hparams["learning_rate"]
        optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))
        return one_cycle(optimizer, rate, self.trainer)


def shard(network: Network, mesh: Any) -> None:
    """Shard by FSDP2: a rank keeps a part of each block and gathers the block to compute it."""
    from torch.distributed.fsdp import fully_shard  # only sharding needs it

    for block in network.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(network, mesh=mesh)


@torch.no_grad()
def initialise_weights(network: nn.Module) -> None:
    """Initialise the weights as in GPT-2.

    The result depends only on the seed and not on the sharding: every parameter is drawn completely
    from its own seed, and a rank keeps its part.
    """
    seed = torch.initial_seed()
    for number, (name, parameter) in enumerate(network.named_parameters()):
        generator = torch.Generator().manual_seed(seed + number)
        # Explicitly on the CPU: under most strategies a GPU is the default device.
        full = torch.zeros(parameter.shape, device="cpu")
        if parameter.ndim > 1:
            full.normal_(0.0, _INITIAL_STD, generator=generator)
        elif name.endswith("weight"):  # weight of a LayerNorm
            full.fill_(1.0)
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is None:
            parameter.copy_(full)
            continue
        part = cast(Any, parameter).to_local()
        begin = -(-len(full) // mesh.size()) * mesh.get_local_rank()
        part.copy_(full[begin : begin + len(part)])
