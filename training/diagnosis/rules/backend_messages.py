"""What torch's back ends say in a rank whose partner has gone. Pure.

Phrases of torch, gloo, NCCL and Lightning, as they stand in their sources; a single word such as
"store" or "peer" may as well be of the user's own error.
"""

from __future__ import annotations

import re

_SAID = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused)|broken pipe|closed by (remote )?peer|"
    r"socket timeout|timed out waiting|client socket has (failed|timed out)|"
    r"timed out after \S+ seconds waiting for clients|wait timeout after|"
    r"recv(Value)?(WithTimeout)? failed|Application timeout caused pair closure|gloo.*timed out|"
    r"(failed to pass|timed out in|reached) monitoredBarrier|"
    r"nccl.*(abort|remote)|remote process exited|collective operation timeout|"
    r"\bDist(Network|Store)Error\b|\bSIGTERMException\b|\bSignalException\b",
    re.IGNORECASE,
)


def is_consequence(said: str) -> bool:
    """Whether an exception, as ``Type: message``, is what follows from another rank's end.

    Not the cause, then, where another rank says more.
    """
    return _SAID.search(said) is not None
