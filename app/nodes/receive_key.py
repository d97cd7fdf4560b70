"""Program that SLURM runs on the nodes of a run: it writes the key from standard input to a file.

``python -m ltui.app.nodes.receive_key NAME``. The file is in a folder that only this user can read.
"""

from __future__ import annotations

import sys

from ltui.app.nodes.launcher_key import local_key
from ltui.training.nodes.link_key import LinkKey
from ltui.training.problem import ProblemError
from ltui.training.store.run_directory import write_atomically


def main(arguments: list[str]) -> int:
    """Write the key. Return the exit code."""
    try:
        (name,) = arguments
        key = LinkKey.from_text(sys.stdin.read(1024), "standard input")
        write_atomically(local_key(name), f"{key.text}\n".encode())
    except (ProblemError, OSError) as error:
        print(f"ltui: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
