"""Notice that the directory of a live run was moved or removed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from ltui.training.store.run_directory import RunDir


class RunFolder:
    """The directory of the run that this process supervises."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._descriptor = os.open(run_dir.path, os.O_RDONLY | os.O_DIRECTORY)

    def leave_if_gone(self, kill_all: Callable[[], object]) -> None:
        """End this process if the directory is not at its path any more.

        If it was moved, the shim starts a supervisor at its new path. If it was removed, nobody
        could find the run again, so ``kill_all`` ends it.
        """
        try:
            os.stat(self._run_dir.spec_path)
        except FileNotFoundError:
            pass
        except OSError:  # a file system that does not answer at the moment
            return
        else:
            return
        folder = f"/proc/self/fd/{self._descriptor}"
        if os.path.exists(f"{folder}/spec.yaml"):
            where = f"moved to {os.readlink(folder)}; another supervisor continues there"
        else:
            where = "removed while the run was live, so the run is killed"
            kill_all()
        print(f"{self._run_dir.path} was {where}.", file=sys.stderr, flush=True)
        os._exit(1)  # as if it was killed: nothing may be written to the old path

    def close(self) -> None:
        os.close(self._descriptor)
