"""The part of an attempt's logs that the head does not have yet, read in bounded pieces."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from ltui.training.nodes.messages import LogPart

_PART_BYTES = 64 << 10
"""Maximum number of bytes of one log in a report."""
_REPORT_BYTES = 512 << 10
"""Maximum number of bytes of all logs in a report, so that records do not wait for logs."""


class LogTails:
    """Reads the logs of one folder from the positions that the head has acknowledged."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sent: dict[str, int] = {}
        self.advanced = True
        """True if the head took some of the last parts. It takes no more of a very long log."""

    def parts(self) -> list[tuple[LogPart, bytes]]:
        """Return the next bytes of each log that has grown."""
        parts: list[tuple[LogPart, bytes]] = []
        total = 0
        with contextlib.suppress(OSError):
            for path in sorted(self._folder.glob("*.log")):
                at = self._sent.get(path.name, 0)
                with path.open("rb") as file:
                    file.seek(at)
                    data = file.read(min(_PART_BYTES, _REPORT_BYTES - total))
                if data:
                    parts.append((LogPart(name=path.name, at=at), data))
                    total += len(data)
        return parts

    def acknowledge(self, sizes: Mapping[str, int]) -> None:
        """Continue at ``sizes``, the number of bytes of each log that the head has."""
        self.advanced = dict(sizes) != self._sent
        self._sent = dict(sizes)
