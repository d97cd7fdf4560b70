"""Warn if workers read sources of the program again that have changed since the rank read them.

A child of ``multiprocessing`` by ``spawn`` or ``forkserver`` imports the main script, and what it
needs, anew. DataLoader workers are started in each epoch, so an edit of a file in the middle of a
run lets them run other code than their rank.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import sys
import sysconfig
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

_LIBRARIES = (
    *("/site-packages/", "/dist-packages/", "/ltui/training/"),
    f"{sysconfig.get_path('stdlib')}/",
)
"""Parts of the paths of files that are not the user's."""

Report = Callable[[str, str], None]
"""Sends a warning: what has happened, and what to do."""


class SourceWatch:
    """The sources that this process has read, with the times of their last changes."""

    def __init__(self, report: Report) -> None:
        self._report, self._pid = report, os.getpid()
        self._changed_ns: dict[str, int] = {}
        self._reported: set[str] = set()
        self.changed()

    def changed(self) -> list[str]:
        """Return the files that have changed, and remember those that are new."""
        changed = []
        for module in [*sys.modules.values()]:
            file = getattr(module, "__file__", None)
            if not isinstance(file, str) or not file.endswith(".py") or _is_library(file):
                continue
            with contextlib.suppress(OSError):
                now_ns = os.stat(file).st_mtime_ns
                if self._changed_ns.setdefault(file, now_ns) != now_ns:
                    changed.append(file)
        return changed

    def check(self, process: Any) -> None:
        """Report what has changed if ``process``, which starts, reads sources again."""
        method = getattr(process, "_start_method", None) or multiprocessing.get_start_method()
        if method == "fork" or os.getpid() != self._pid:
            return
        new = [file for file in self.changed() if file not in self._reported]
        if new:
            self._reported.update(new)
            names = ", ".join(os.path.basename(file) for file in new[:3])
            self._report(
                f"{names} changed since this rank read it, and the workers that it starts now read"
                f" it again (start method {method}): they may run other code than their rank.",
                "Undo the change, or restart the run. persistent_workers=True starts workers once.",
            )


_watch: SourceWatch | None = None


def watch_sources(report: Report) -> None:
    """Warn by ``report`` when this process starts workers that read changed sources."""
    global _watch
    if _watch is None:
        start = BaseProcess.start

        @functools.wraps(start)
        def checked_start(process: Any) -> None:
            with contextlib.suppress(Exception):  # an error must not reach the program's workers
                if _watch is not None:
                    _watch.check(process)
            start(process)

        BaseProcess.start = checked_start  # type: ignore[assignment,method-assign]
    _watch = SourceWatch(report)


def _is_library(file: str) -> bool:
    return any(part in file for part in _LIBRARIES)
