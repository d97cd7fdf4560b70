"""The queue files of one attempt, as the dashboard reads them.

The dashboard only reads records and pulses. Whether a rank's process is alive is decided by the
supervisor (``training/lifecycle/rank_queue_poller.py``).
"""

from __future__ import annotations

from pathlib import Path

from ltui.training.lifecycle.rank_queue_poller import queue_files
from ltui.training.tensor_queue.queue_reader import QueueFileError, QueueReader


class AttemptQueues:
    """A reader for each queue file of one attempt, opened when the file appears."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.readers: dict[int, QueueReader] = {}
        """Rank to the reader of its queue."""

    def open_new(self) -> None:
        """Open the queue files that appeared since the last call."""
        for rank, path in queue_files(self.folder).items():
            if rank not in self.readers:
                # A file that is still being created has no header yet: the next call tries again.
                try:
                    self.readers[rank] = QueueReader(path)
                except QueueFileError:
                    continue

    def close(self) -> None:
        """Close every reader."""
        for reader in self.readers.values():
            reader.close()
        self.readers.clear()
