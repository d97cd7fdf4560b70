"""A script of Hugging Face's Trainer: ``hugging_face.py EPOCHS STEP_S [BATCHES]``.

Prints the weights. A step accumulates the gradients of so many batches.
"""

from __future__ import annotations

import sys

import torch.distributed as dist
from transformers.trainer import Trainer  # type: ignore[import-not-found]


def main(epochs: int, step_s: float) -> None:
    dist.init_process_group("gloo")
    trainer = Trainer(epochs, step_s, int(sys.argv[3]) if len(sys.argv) > 3 else 1)
    trainer.train()
    total = sum(parameter.double().sum().item() for parameter in trainer.model.parameters())
    print(f"step {trainer.state.global_step}, weights {total!r}", flush=True)
    assert trainer.args.output_dir == "out"


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
