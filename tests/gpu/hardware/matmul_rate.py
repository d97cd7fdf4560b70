"""What a GPU reaches in large matrix products, beside the peak in its data sheet.

python -m tests.gpu.hardware.matmul_rate ACCELERATOR RESULT

``RESULT`` receives JSON: the name of the device and floating point operations per second.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

SIZE, SMALL_SIZE = 8192, 256
MEASURED_S = 1.0


def bf16_rate(device: torch.device) -> float:
    """Multiply bf16 matrices for about a second."""
    size = SIZE if device.type == "cuda" else SMALL_SIZE
    one, other = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    count, seconds = 1, 0.0
    while seconds < MEASURED_S / 2:  # the last round is the measured one; the others warm up
        count *= 2
        began = time_when_idle(device)
        for _ in range(count):
            torch.mm(one, other)
        seconds = time_when_idle(device) - began
    return 2.0 * size**3 * count / seconds


def time_when_idle(device: torch.device) -> float:
    """Wait for everything that the device was given, and return the time in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


if __name__ == "__main__":
    on_gpu = sys.argv[1] == "cuda"
    rate = bf16_rate(torch.device("cuda:0" if on_gpu else "cpu"))
    name = torch.cuda.get_device_name(0) if on_gpu else "CPU"
    Path(sys.argv[2]).write_text(json.dumps([name, rate]))
