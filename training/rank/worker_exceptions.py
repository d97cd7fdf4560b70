"""Read the original exception from one that torch forwards from a DataLoader worker.

torch raises it again in the rank, if possible with the same class. Its text contains the traceback:
``Caught ValueError in DataLoader worker process 0.``, then ``Original Traceback ...``, and at the
end the original message. This module uses only the standard library.
"""

from __future__ import annotations

import re

_CAUGHT = re.compile(
    r"Caught (?P<kind>\w+) (?P<where>in [^\n]+)\.\nOriginal (?P<traceback>.*)", re.S
)
_TRACEBACK_START = "Traceback (most recent call last):\n"


def unwrap_worker_exception(kind: str, message: str) -> tuple[str, str]:
    """Return class name and message of the exception that a DataLoader worker raised.

    The message also says where it was raised. For any other exception return the arguments.
    """
    caught = _CAUGHT.search(message)
    if caught is None:
        return kind, message
    # With chained exceptions, the last one was raised.
    lines = caught["traceback"].rpartition(_TRACEBACK_START)[2].splitlines()
    message_lines = [line for line in lines if line and not line.startswith("  ")]
    if not message_lines:
        return caught["kind"], f"no message ({caught['where']})"
    first_line = message_lines[0]
    first_line = first_line.partition(": ")[2] if ": " in first_line else ""
    text = "\n".join([first_line, *message_lines[1:]])
    return caught["kind"], f"{text} ({caught['where']})".strip()
