"""Warn if workers that read the sources of the program again run what they should not.

A child of ``multiprocessing`` by ``spawn`` or ``forkserver`` imports the main script, and what it
needs, anew. Without ``if __name__ == "__main__":`` it runs the whole script. DataLoader workers are
started in each epoch, so an edit of a file in the middle of a run lets them run other code than
their rank.
"""

from __future__ import annotations

import ast
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
        self.missing_guard = ""
        """Why each worker runs the whole script; empty if it does not."""
        self.changed()

    def changed(self) -> list[str]:
        """Return the files that have changed, and remember those that are new."""
        changed = []
        for module in [*sys.modules.values()]:
            file = getattr(module, "__file__", None)
            if not isinstance(file, str) or not file.endswith(".py"):
                continue
            if any(part in file for part in _LIBRARIES):
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
        script = None if self.missing_guard else _unguarded_script()
        if script is not None:
            self.missing_guard = (
                f'{os.path.basename(script)} has no `if __name__ == "__main__":`, so each worker'
                f" runs the whole script again (start method {method})"
            )
            remedy = "Put what trains below such a line, or use the start method fork."
            self._report(f"{self.missing_guard}.", remedy)
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


def with_missing_guard(message: str) -> str:
    """Return the message of an exception, with the reason if workers ran the whole script."""
    reason = "" if _watch is None else _watch.missing_guard
    return f"{message}: {reason}" if reason and message.endswith("exited unexpectedly") else message


def _unguarded_script() -> str | None:
    """Return the path of the main script if a child that imports it runs all of it."""
    main = sys.modules["__main__"]
    file, name = getattr(main, "__file__", None), getattr(main.__spec__, "name", "")
    if file is None or name.endswith("__main__"):  # of a package: it is not imported again
        return None
    with open(file, "rb") as source:
        conditions = [
            ast.unparse(statement.test)
            for statement in ast.parse(source.read()).body
            if isinstance(statement, ast.If)
        ]
    # A script may also ask whether it has a parent process.
    guarded = any("__name__" in text or "process" in text for text in conditions)
    return None if guarded else file
