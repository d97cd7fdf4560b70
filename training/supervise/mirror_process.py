"""Process that writes a run's values as event files while the run goes on (setting ``mirror``).

``python -m ltui.training.supervise.mirror_process RUN_DIR FOLDER``. The supervisor starts it and
holds its standard input open: when that closes, the supervisor has closed the attempt or is dead,
and this process writes what is left and ends. Each line of its standard output becomes an event of
the run. Nothing waits for it, and it has the lowest priority.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import select
import sys
from pathlib import Path

from ltui.training.problem import ProblemError
from ltui.training.store.database_schema import NoHistoryError, StoreError
from ltui.training.store.event_file import FollowedEvents
from ltui.training.store.run_directory import RunDir

PASS_S = 5.0
"""Seconds between two reads of the history."""
RETRY_S = 30.0
"""Seconds until the next try after the files could not be written."""
EXIT_UNUSABLE = 2
"""Exit status if the mirror cannot work in this environment, so that it is not started again."""


def main(argv: list[str] | None = None) -> int:
    """Mirror the run until standard input closes. Return the exit status."""
    parser = argparse.ArgumentParser(prog="ltui-mirror")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args(argv)
    os.nice(19)
    run_dir = RunDir(arguments.run_dir)
    began = run_dir.read_spec().created_at
    # The mirror of the previous attempt or supervisor may still write what is left.
    with open(run_dir.mirror_lock_path, "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _mirror(run_dir, arguments.folder, began)


def _mirror(run_dir: RunDir, folder: Path, began: float) -> int:
    events: FollowedEvents | None = None
    failure: str | None = None
    open_input = True
    while open_input:
        open_input = not select.select([0], [], [], RETRY_S if failure else PASS_S)[0]
        try:
            # A new run directory under this name would not be listed, but stay.
            if not run_dir.path.is_dir():
                return 0
            events = events or FollowedEvents(folder, began, "mirror")
            with contextlib.suppress(NoHistoryError):
                events.update(run_dir)
        except (OSError, StoreError) as error:
            events = None
            if failure is None:
                failure = _sentence(folder, error)
                _report(f"{failure}; ltui tries again")
        except ProblemError as error:
            # TensorBoard is not installed any more.
            _report(" ".join(str(error).splitlines()))
            return EXIT_UNUSABLE
        else:
            if failure is not None:
                _report(f"{folder} is written again, nothing is missing")
            failure = None
    return 0


def _sentence(folder: Path, error: OSError | StoreError) -> str:
    if isinstance(error, OSError):
        return f"{folder} cannot be written ({error.strerror or error})"
    return error.problems[0].what.rstrip(".")


def _report(sentence: str) -> None:
    with contextlib.suppress(OSError):  # the supervisor is gone
        os.write(1, f"TensorBoard mirror: {sentence}\n".encode(errors="replace"))


if __name__ == "__main__":
    sys.exit(main())
