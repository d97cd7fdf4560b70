"""A program that trains on one device until FILE is removed.

python holds_memory.py cuda|cpu FILE FACTS

It writes about itself into FACTS, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch

HELD_BYTES = 512 << 20


def main() -> None:
    running, facts = map(Path, sys.argv[2:])
    device = torch.device(sys.argv[1], 0)
    on_gpu = device.type == "cuda"
    held = torch.zeros(HELD_BYTES if on_gpu else 1, dtype=torch.uint8, device=device)
    model = torch.nn.Linear(64, 64).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    uuid = str(torch.cuda.get_device_properties(device).uuid) if on_gpu else None
    about = {"pid": os.getpid(), "uuid": uuid, "device": str(device), "held_bytes": held.nbytes}
    temporary = facts.with_suffix(".new")
    temporary.write_text(json.dumps(about))
    temporary.rename(facts)
    while running.exists():
        optimizer.zero_grad()
        model(torch.ones(8, 64, device=device)).sum().backward()
        optimizer.step()
        time.sleep(0.05)


main()
