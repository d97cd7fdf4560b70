"""Make text of another process safe to show: remove control characters, escapes and bidi marks.

Pure. The result is plain text and must not be parsed as markup (``rich.text.Text`` and Textual's
``Content`` do not parse it). ECMA-48 defines the sequences that are removed.
"""

from __future__ import annotations

import re

TAB_STOP = 8
MAX_LENGTH = 4000
"""Maximum characters of one line: drawing a line of megabytes would freeze the screen."""

_ESCAPES = re.compile(
    r"""
      (?:\x1b\]|\x9d) [^\x07\x1b\x9c\n]* (?:\x07|\x1b\\|\x9c)? # OSC: title, link
    | (?:\x1b[PX^_]|[\x90\x98\x9e\x9f]) [^\x1b\x9c\n]* (?:\x1b\\|\x9c)? # DCS, SOS, PM, APC
    | (?:\x1b\[|\x9b) [0-?]* [ -/]* (?:[@-~]|$) # CSI: colours, cursor, modes
    | \x1b [ -/]+ [0-~]? # character sets
    | \x1b [0-~]? # two characters
    """,
    re.VERBOSE,
)
_ERASE_LINE = re.compile(r"(?:\x1b\[|\x9b)[02]?K")
_INVISIBLE = re.compile(
    "["
    "\x00-\x08\x0a-\x1f\x7f-\x9f"  # C0 (without tab), delete, C1
    "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u3164\uffa0"  # invisible letters
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufe00-\ufe0f"  # zero width, bidi, variants
    "\ufeff\ufff0-\ufffb\ud800-\udfff"  # byte-order mark, interlinear, lone surrogates
    "\U000e0000-\U000e0fff"  # tags, variation selectors supplement
    "]"
)
# More than a few combining marks on one letter cover the lines above and below.
_MARK = "[\u0300-\u036f\u0483-\u0489\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff]"
_STACKED_MARKS = re.compile(f"({_MARK}{{3}}){_MARK}+")
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_PLAIN = re.compile(r"[ -~]*\Z")


def clean_line(text: str, max_length: int = MAX_LENGTH) -> str:
    """Return one line of output as a terminal would finally show it, as plain characters.

    Line breaks inside become spaces. Text after a carriage return overwrites the line, as in a
    progress bar. A longer line is cut and ends with the number of characters that were removed.
    """
    if len(text) <= max_length and _PLAIN.match(text):
        return text
    # This limits the work below. Escapes are short, so enough visible text remains.
    dropped = max(0, len(text) - 4 * max_length)
    text = text[-4 * max_length :] if "\r" in text else text[: 4 * max_length]
    text = replay_returns(text.rstrip("\r\n"))
    text = _ESCAPES.sub("", text)
    text = _apply_backspaces(text)
    text = text.replace("\n", " ").replace("\v", " ").replace("\f", " ")
    text = _INVISIBLE.sub("", text.expandtabs(TAB_STOP))
    text = _STACKED_MARKS.sub(r"\1", text)
    dropped += max(0, len(text) - max_length)
    return f"{text[:max_length]} … {dropped} more characters" if dropped else text


def without_controls(text: str) -> str:
    """Return a text of several lines without the characters that a terminal obeys."""
    return _CONTROLS.sub("", _ESCAPES.sub("", text))


def clean_name(text: str, max_length: int = 200) -> str:
    """Return a name, a path or another short text as one line without blanks at its ends."""
    return " ".join(clean_line(text, max_length).split())


def clean_lines(text: str, max_length: int = MAX_LENGTH) -> list[str]:
    """Return every line of ``text``, each made safe."""
    return [clean_line(line, max_length) for line in re.split(r"\r?\n", text)]


def replay_returns(text: str) -> str:
    """Return the visible text of a line after its carriage returns.

    It is the last part, and the rest of longer parts before it.
    """
    if "\r" not in text:
        return text
    shown = ""
    for part in text.split("\r"):
        if _ERASE_LINE.search(part):
            shown = ""
        part = _ESCAPES.sub("", part)
        shown = part + shown[len(part) :] if part else shown
    return shown


def _apply_backspaces(text: str) -> str:
    if "\b" not in text:
        return text
    letters: list[str] = []
    for letter in text:
        if letter != "\b":
            letters.append(letter)
        elif letters:
            letters.pop()
    return "".join(letters)
