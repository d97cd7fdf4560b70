"""Identity of a machine and of its ``$LTUI_HOME``, by which the head knows it again."""

from __future__ import annotations

import hashlib
import os
import socket
from pathlib import Path

from ltui.training.process.identity import boot_id


def machine_id(home: Path) -> str:
    """Return a text that is the same for all processes of this machine that use ``home``.

    Containers on one machine, and network namespaces, count as machines of their own.
    """
    try:
        network = os.readlink("/proc/self/ns/net")
    except OSError:
        network = ""
    facts = (boot_id() or "", network, socket.gethostname(), os.path.realpath(home))
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:32]
