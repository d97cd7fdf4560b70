"""What a terminal shows: a small part of a terminal emulator, enough for what Textual writes."""

from __future__ import annotations

import re

_SEQUENCE = re.compile(
    rb"\x1b\[([0-9;?<>=$]*)([@A-Za-z`])|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[()][0-9A-Z]|\x1b[=>78M]"
)
_LONGEST = 40
"""Bytes after which a sequence that is not known is skipped."""
_BACKGROUND = re.compile(r"48;2;\d+;\d+;\d+")


class TerminalScreen:
    """The characters and styles in every cell."""

    def __init__(self, columns: int, lines: int) -> None:
        self._columns, self._lines = columns, lines
        self._x = self._y = 0
        self._style, self._rest = "", b""
        self._clear()

    def _clear(self) -> None:
        self._letters = [[" "] * self._columns for _ in range(self._lines)]
        self._styles = [[""] * self._columns for _ in range(self._lines)]

    def feed(self, data: bytes) -> None:
        """Take bytes as they come; what is not complete waits for the next call."""
        data, at = self._rest + data, 0
        while at < len(data):
            byte = data[at]
            if byte == 0x1B:
                match = _SEQUENCE.match(data, at)
                if match is None and len(data) - at < _LONGEST:
                    break
                at = match.end() if match else at + 1
                if match and match[2]:
                    self._obey(match[2], match[1].decode())
            elif byte < 0x20:
                self._x = 0 if byte == 0x0D else self._x
                self._y += byte == 0x0A
                at += 1
            else:
                size = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
                if at + size > len(data):
                    break
                self._put(data[at : at + size].decode("utf-8", "replace"))
                at += size
        self._rest = data[at:]

    def _obey(self, final: bytes, arguments: str) -> None:
        if final == b"H":
            line, _, column = arguments.partition(";")
            self._y, self._x = int(line or 1) - 1, int(column or 1) - 1
        elif final == b"m":
            self._style = arguments
        elif final == b"J":
            self._clear()

    def _put(self, letter: str) -> None:
        if 0 <= self._y < self._lines and 0 <= self._x < self._columns:
            self._letters[self._y][self._x] = letter
            self._styles[self._y][self._x] = self._style
        self._x += 1

    def text(self) -> str:
        return "\n".join("".join(line) for line in self._letters)

    def background(self, word: str) -> str | None:
        """The background of the first cell of ``word``; None if it is not on the screen."""
        for letters, styles in zip(self._letters, self._styles, strict=True):
            at = "".join(letters).find(word)
            if at >= 0:
                found = _BACKGROUND.search(styles[at])
                return found[0] if found else ""
        return None
