"""Watch the shim process of an attempt, for a supervisor or an agent."""

from __future__ import annotations

import subprocess

from ltui.training.lifecycle.shim_files import shim_identity
from ltui.training.process.identity import ProcessIdentity
from ltui.training.store.run_directory import RunDir


class ShimWatch:
    """The shim of one attempt, which this process or an earlier one has started."""

    def __init__(self, run_dir: RunDir, attempt: int) -> None:
        self._run_dir, self._attempt = run_dir, attempt
        self._identity: ProcessIdentity | None = None
        self.child: subprocess.Popen[bytes] | None = None
        """The shim if this process has started it, so that its exit status is collected."""

    def is_alive(self) -> bool:
        """Return True if the shim runs."""
        if self.child is not None:
            self.child.poll()
        if self._identity is None:
            self._identity = shim_identity(self._run_dir, self._attempt)
        return self._identity is not None and self._identity.alive()
