"""The exception that takes a rank out of ``trainer.fit`` after an agreed stop."""

from __future__ import annotations


class RunStopped(SystemExit):
    """Exit code 0, so that launchers count the rank as done.

    A ``SystemExit`` passes ``except Exception`` of a user's script, so nothing that follows
    ``fit`` there runs; Lightning tears its loops down on the way, which ends the DataLoader's
    workers.
    """

    def __init__(self, global_step: int) -> None:
        super().__init__(0)
        self.global_step = global_step
