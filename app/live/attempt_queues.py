"""The queue files of one attempt, as the dashboard reads them.

The dashboard only reads records and pulses. Whether a rank's process is alive is decided by the
supervisor (``training/lifecycle/rank_queue_poller.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ltui.training.lifecycle.rank_queue_poller import queue_files
from ltui.training.process.open_files import allow_queues_of
from ltui.training.tensor_queue.queue_reader import Poll, QueueFileError, QueueReader
from ltui.training.tensor_queue.record_types import PulseState

RECORDS_PER_READ = 4000
"""Maximum number of records that one read of a queue returns."""
MAX_READS_PER_POLL = 4
"""Maximum number of reads of one queue in one poll, so that a backlog does not delay the frame."""


class AttemptQueues:
    """A reader for each queue file of one attempt, opened when the file appears."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._readers: dict[int, QueueReader] = {}
        self._replaced: set[int] = set()

    @property
    def ranks(self) -> list[int]:
        """The ranks whose queues are open."""
        return sorted(self._readers)

    def open_files(self) -> set[int]:
        """Open the files that appeared since the last call, and return the restarted ranks.

        A rank that torch elastic restarts creates another file of the same name.
        """
        restarted = self._replaced
        for rank in restarted:
            self._readers.pop(rank).close()
        files = queue_files(self._folder)
        if len(files) > len(self._readers):
            allow_queues_of(len(files))
        for rank, path in files.items():
            if rank not in self._readers:
                # A file that is still being created has no header yet: the next call tries again.
                with suppress(OSError, QueueFileError):
                    self._readers[rank] = QueueReader(path)
        # Checked before the read, so that the read includes the last records of a replaced file.
        self._replaced = {rank for rank, reader in self._readers.items() if reader.replaced()}
        return restarted

    def poll(self) -> Iterator[tuple[int, Poll]]:
        """Yield the new records of each rank."""
        for rank, reader in self._readers.items():
            for _ in range(MAX_READS_PER_POLL):
                poll = reader.poll(RECORDS_PER_READ)
                yield rank, poll
                if len(poll.records) < RECORDS_PER_READ:
                    break

    def pulses(self) -> dict[int, PulseState | None]:
        """Return the current pulse of each rank."""
        return {rank: reader.pulse() for rank, reader in self._readers.items()}

    def close(self) -> None:
        """Close every reader."""
        for reader in self._readers.values():
            reader.close()
