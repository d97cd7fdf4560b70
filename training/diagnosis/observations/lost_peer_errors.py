"""Error messages that torch's communication back ends raise when another rank has ended. Pure.

The patterns are complete phrases from the sources of torch, gloo, NCCL and Lightning. A single word
such as "store" or "peer" may as well belong to an error of the user's own code.
"""

from __future__ import annotations

import re

_CONSEQUENCE = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused)|broken pipe|closed by (remote )?peer|"
    r"socket timeout|timed out waiting|client socket has (failed|timed out)|"
    r"timed out after \S+ seconds waiting for clients|wait timeout after|"
    r"recv(Value)?(WithTimeout)? failed|Application timeout caused pair closure|gloo.*timed out|"
    r"(failed to pass|timed out in|reached) monitoredBarrier|"
    # An agent ends the other ranks by SIGTERM, and with them the workers of their loaders.
    r"DataLoader worker \(pid \d+\) is killed by signal: Terminated|"
    r"nccl.*(abort|remote)|remote process exited|collective operation timeout|"
    r"\bDist(Network|Store)Error\b|\bSIGTERMException\b|\bSignalException\b",
    re.IGNORECASE,
)


def is_consequence(error: str) -> bool:
    """Return True if an error, as ``Type: message``, is a consequence of another rank's end.

    Such an error is not the cause of a failure if another rank reports a different error.
    """
    return _CONSEQUENCE.search(error) is not None
