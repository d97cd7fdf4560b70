"""Streams for text of others that goes to a terminal."""

from __future__ import annotations

from typing import Any, TextIO


class PlainText:
    """A stream that removes escape sequences, of which text of files and libraries may consist."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        # Imported here: most commands write nothing to such a stream.
        from ltui.widgets.sanitise import without_controls

        self._stream.write(without_controls(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
