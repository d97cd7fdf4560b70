"""torch elastic's agent as the engine of a preset: torchrun that exits quickly.

Before Python exits it searches all objects for cycles several times, which takes a second of a
processor with torch imported. Nothing that such a cycle holds is needed after the ranks have ended.
"""

from __future__ import annotations

import atexit
import gc


def main() -> None:
    """Run torchrun with the arguments of this process."""
    from torch.distributed.run import main as torchrun

    atexit.register(gc.freeze)
    torchrun()


if __name__ == "__main__":
    main()
