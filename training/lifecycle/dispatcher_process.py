"""Start the dispatcher: the process that starts queued runs, one for each home and machine.

Nothing has to be installed. Whoever puts a run into the run queue starts it, and so does every
command, dashboard and supervisor that finds a queue without one. It ends when nothing waits.
"""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from ltui.training.problem import ProblemError
from ltui.training.process.python_environment import module_command
from ltui.training.store.queue_files import dispatcher_runs, queue_folder, queue_lock
from ltui.training.store.run_directory import open_private_log

MODULE = "ltui.app.launch.queue_dispatcher"
"""It is a module of the app, because it reads the user's configuration file."""
_RETRY_S = 10.0
"""Seconds between two attempts of one process to start a dispatcher."""
_tried_at: dict[Path, float] = {}


def wake_dispatcher(home: Path) -> None:
    """Start the dispatcher unless it runs. Raise ``ProblemError`` if that is not possible."""
    # A dispatcher ends only under this lock, so one that runs sees what was queued before.
    with queue_lock(home):
        if dispatcher_runs(home):
            return
    python, option, program, *words = module_command(MODULE, str(home))
    # It is no child of this process, which need not wait for it. Of two, the second one ends.
    program = f"import os; os.fork() and os._exit(0); {program}"
    try:
        with open_private_log(queue_folder(home) / "dispatcher.log") as log:
            subprocess.run(
                [python, option, program, *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=home,
                env={k: v for k, v in os.environ.items() if not k.startswith("LTUI_RUN_")},
                start_new_session=True,
                check=False,
            )
    except OSError as error:
        raise ProblemError.of(
            where="run queue",
            what=f"the process that starts queued runs cannot be started ({error}).",
            remedy="The queue is complete: the next ltui command tries again.",
        ) from error


def ensure_dispatcher(home: Path) -> None:
    """Start the dispatcher if it is dead. Does nothing if that fails, or failed just now."""
    if not dispatcher_runs(home) and time.monotonic() - _tried_at.get(home, -_RETRY_S) >= _RETRY_S:
        _tried_at[home] = time.monotonic()
        with suppress(ProblemError):  # The runs are shown as they are.
            wake_dispatcher(home)
