"""A process that loads one GPU as it is told: idle, product, copy, upload or spin.

python -m tests.gpu.hardware.gpu_load cuda|cpu

It prints one JSON line about itself, then begins each kind of load that it reads from standard
input, and answers with its name. It ends with the input. A process of its own, so that the one that
measures uses no GPU.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable

import torch

KINDS = ("idle", "product", "copy", "upload", "spin")
HELD_BYTES = 512 << 20
"""Memory that the process holds from the beginning to the end."""
LARGEST_BYTES = 1 << 30
UPLOAD_BYTES = 256 << 20
SPIN_CYCLES = 500_000_000


def main() -> None:
    """Run the load until standard input ends."""
    device = torch.device(sys.argv[1], 0)
    on_gpu = device.type == "cuda"
    held = torch.zeros(HELD_BYTES if on_gpu else 1, dtype=torch.uint8, device=device)
    uuid = str(torch.cuda.get_device_properties(device).uuid) if on_gpu else None
    facts = {"pid": os.getpid(), "uuid": uuid, "held_bytes": held.nbytes}
    print(json.dumps(facts), flush=True)
    kind = ["idle"]
    thread = threading.Thread(target=_work, args=(_steps(device), kind), daemon=True)
    thread.start()
    for line in sys.stdin:
        kind[0] = line.strip()
        print(kind[0], flush=True)


def _steps(device: torch.device) -> dict[str, Callable[[], object]]:
    """Return a step of each kind, complete when it returns, which takes tens of milliseconds."""
    if device.type != "cuda":
        small = torch.ones(64, 64)
        return dict.fromkeys(KINDS, lambda: small @ small)
    free = torch.cuda.mem_get_info(device)[0]
    size = 8192 if free > 4 << 30 else 2048
    # Before Ampere, bfloat16 is emulated.
    bf16 = torch.cuda.get_device_capability(device) >= (8, 0)
    dtype = torch.bfloat16 if bf16 else torch.float16
    matrix = torch.randn(size, size, device=device, dtype=dtype)
    product = torch.empty_like(matrix)
    source = torch.empty(min(LARGEST_BYTES, free // 8), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def products() -> None:
        for _ in range(20):
            torch.mm(matrix, matrix, out=product)
        torch.cuda.synchronize(device)

    def copies() -> None:
        for _ in range(50):
            target.copy_(source)
        torch.cuda.synchronize(device)

    on_host = torch.empty(min(source.nbytes, UPLOAD_BYTES), dtype=torch.uint8, pin_memory=True)

    def uploads() -> None:
        for _ in range(20):
            target[: on_host.nbytes].copy_(on_host, non_blocking=True)
        torch.cuda.synchronize(device)

    def spin() -> None:
        torch.cuda._sleep(SPIN_CYCLES)
        torch.cuda.synchronize(device)

    steps = {"product": products, "copy": copies, "upload": uploads, "spin": spin}
    return {**steps, "idle": lambda: None}


def _work(steps: dict[str, Callable[[], object]], kind: list[str]) -> None:
    while True:
        steps[kind[0]]()
        # On the GPU a loaded step must follow the other at once.
        if kind[0] == "idle" or sys.argv[1] == "cpu":
            time.sleep(0.05)


if __name__ == "__main__":
    main()
