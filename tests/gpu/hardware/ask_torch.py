"""What torch says about the first GPU that it may use.

It is asked in another process, because a CUDA context in this one would take memory of the GPU.
"""

from __future__ import annotations

import subprocess
import sys

GIB = 1 << 30
_TIMEOUT_S = 120.0


def ask_torch(expression: str) -> str:
    """Return the value of an expression with ``torch``, as text without spaces.

    Raises ``OSError`` if torch cannot say; what it printed is in the output of this process.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import torch; print({expression})"],
            stdout=subprocess.PIPE,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
        return done.stdout.split()[-1]
    except subprocess.SubprocessError as error:
        raise OSError(str(error)) from error


def free_device_bytes() -> int:
    """Return the memory that is free on the first GPU. Raises ``OSError`` as ``ask_torch``."""
    return int(ask_torch("torch.cuda.mem_get_info(0)[0]"))
