"""The exception that ends ``trainer.fit`` on a rank after all ranks agreed to stop."""

from __future__ import annotations


class RunStopped(SystemExit):
    """Exit with code 0, so that launchers count the rank as finished.

    ``except Exception`` in a user's script does not catch a ``SystemExit``, so nothing after
    ``fit`` runs there. Lightning tears its loops down on the way, which ends the DataLoader's
    workers.
    """

    def __init__(self, global_step: int) -> None:
        super().__init__(0)
        self.global_step = global_step
