"""Another machine that shares only the run directory: another host name, and folders of its own."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import pytest

from ltui.training.store.run_directory import RunDir

_PRINT_RUN = """
import sys
from pathlib import Path
from ltui.training.lifecycle.run_status import current_snapshot
from ltui.training.store.history_reader import RunStore
from ltui.training.store.run_directory import RunDir
run = RunDir(Path(sys.argv[1]))
snapshot = current_snapshot(run)
with RunStore(run) as store:
    print(len(list(store.export(["train/loss"]))))
print(snapshot.state.value)
print(snapshot.detail)
print(snapshot.history_note)
"""


class SeenRun:
    """What another machine reads of a run."""

    def __init__(self, output: str) -> None:
        rows, self.state, self.detail, self.history_note = output.splitlines()
        self.rows = int(rows)


@functools.lru_cache(maxsize=1)
def missing_rights() -> str | None:
    """Return why no namespaces can be made here; None if they can."""
    probe = ["unshare", "--mount", "--uts", "hostname", "another-machine"]
    done = subprocess.run(probe, check=False, capture_output=True, text=True)
    return done.stderr.strip() if done.returncode else None


def on_other_machine(hidden: Path, *argv: str) -> str:
    """Return what a command prints on a machine that does not see the folder ``hidden``."""
    if (reason := missing_rights()) is not None:
        pytest.skip(f"namespaces need root's rights ({reason})")
    script = 'mount -t tmpfs tmpfs "$1" && hostname another-machine && shift && exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "--uts", "sh", "-c", script, "sh", str(hidden), *argv],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def seen_from_other_machine(run: RunDir, hidden: Path) -> SeenRun:
    """Return what a machine that does not see ``hidden`` reads of the run."""
    return SeenRun(on_other_machine(hidden, sys.executable, "-c", _PRINT_RUN, str(run.path)))
