"""DDP's buckets on three ranks: ``python -m tests.rank.exactness.bucketed FOLDER``.

Writes ``FOLDER/buckets.json``: what ``ddp_buckets.py`` read and set in a model that uses its
parameters in another order in its first step than later.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ltui.training.rank.resume.ddp_buckets import apply_bucket_layout, read_bucket_layout
from tests.rank.exactness import world
from tests.rank.exactness.world import HERE
from tests.required import required

STEPS, STOP = 6, 3


class Turning(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(6))

    def forward(self, rows: torch.Tensor, turned: bool) -> torch.Tensor:
        for number in (3, 0, 5, 1, 4, 2) if turned else range(6):
            rows = self.layers[number](rows)
        return rows.pow(2).mean()


def made(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(Turning(), bucket_cap_mb=0.002, **options)


def sums(model: DistributedDataParallel, steps: range) -> list[Any]:
    """Gradients after each step."""
    found = []
    for step in steps:
        model.zero_grad()
        drawn = torch.Generator().manual_seed(100 * step + HERE.rank)
        model(torch.randn(8, 16, generator=drawn), step == 0).backward()
        found.append([required(p.grad).tolist() for p in model.parameters()])
    return found


def compare(folder: Path) -> None:
    dist.init_process_group("gloo", rank=HERE.rank, world_size=HERE.ranks)
    never = made()
    reference = sums(never, range(STEPS))[STOP:]
    layout = read_bucket_layout(never)
    found: dict[str, Any] = {"layout": layout, "anew": sums(made(), range(STOP, STEPS))}
    given = made()
    # Of the other ranks another one was read: rank 0's holds.
    found["given"] = apply_bucket_layout(given, layout if HERE.rank == 0 else [])
    found["kept"] = read_bucket_layout(given)
    found["same"] = sums(given, range(STOP, STEPS)) == reference
    found["kept later"] = read_bucket_layout(given)
    found["differs by itself"] = found.pop("anew") != reference
    for name, options, other in (
        ("another model", {}, [["layers.0.weight", "unheard of"]]),
        ("static graph", {"static_graph": True}, layout),
        ("none", {}, None),
    ):
        model = made(**options)
        before = read_bucket_layout(model)
        refused = not apply_bucket_layout(model, other)
        trains = len(sums(model, range(1, STEPS))) == STEPS - 1
        found[name] = [refused, before == read_bucket_layout(made(**options)), trains]
    if HERE.rank == 0:
        (folder / "buckets.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(any(world.wait(world.start(3, partial(compare, Path(sys.argv[1]))))))
