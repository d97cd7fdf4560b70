"""What an exception said that came from a DataLoader's worker. Standard library.

torch raises it again in the rank with its traceback as the text, where possible as the same class:
``Caught ValueError in DataLoader worker process 0.``, ``Original Traceback ...``, and at the end
what it was about.
"""

from __future__ import annotations

import re

_CAUGHT = re.compile(
    r"Caught (?P<kind>\w+) (?P<where>in [^\n]+)\.\nOriginal (?P<traceback>.*)", re.S
)
_BEGIN = "Traceback (most recent call last):\n"


def unwrap_worker_exception(kind: str, message: str) -> tuple[str, str]:
    """Class and text of the exception that the worker raised, with where it was; of any other
    exception as they are."""
    caught = _CAUGHT.search(message)
    if caught is None:
        return kind, message
    # Of exceptions that caused each other the last is what was raised.
    lines = caught["traceback"].rpartition(_BEGIN)[2].splitlines()
    said = [line for line in lines if line and not line.startswith("  ")]
    if not said:
        return caught["kind"], f"no more is known ({caught['where']})"
    first = said[0].partition(": ")[2] if ": " in said[0] else ""
    text = "\n".join([first, *said[1:]])
    return caught["kind"], f"{text} ({caught['where']})".strip()
