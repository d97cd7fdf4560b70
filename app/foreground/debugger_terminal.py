"""The terminal of a debugger that runs in a rank of another process group.

The rank connects to a socket in a folder that only this user can read. What is typed goes there,
and what comes from there is printed.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_POLL_S = 0.2
_BYTES = 1 << 16


@contextmanager
def debugger_terminal() -> Iterator[str]:
    """Relay the terminal of this process to the debugger, in a thread.

    Yield the path of the socket to which the rank connects.
    """
    closed = threading.Event()
    with (
        tempfile.TemporaryDirectory(prefix="ltui-pdb-", ignore_cleanup_errors=True) as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
    ):
        path = str(Path(folder, "pdb"))
        listener.bind(path)
        listener.listen(1)
        thread = threading.Thread(
            target=_relay, args=(listener, closed), name="debugger", daemon=True
        )
        thread.start()
        try:
            yield path
        finally:
            closed.set()
            thread.join()


def _relay(listener: socket.socket, closed: threading.Event) -> None:
    while not closed.is_set():
        if select.select([listener], [], [], _POLL_S)[0]:
            link, _ = listener.accept()
            with link, suppress(OSError):  # the rank may have ended
                _relay_link(link, closed)
            return


def _relay_link(link: socket.socket, closed: threading.Event) -> None:
    # Imported here: it is light, but only a debugger needs it.
    from ltui.widgets.sanitise import without_controls

    sources: list[socket.socket | int] = [link, sys.stdin.fileno()]
    while not closed.is_set():
        ready = select.select(sources, [], [], _POLL_S)[0]
        if sources[-1] in ready and len(sources) > 1:
            typed = os.read(sys.stdin.fileno(), _BYTES)
            if typed:
                link.sendall(typed)
            else:  # the debugger quits at the end of its input
                link.shutdown(socket.SHUT_WR)
                sources.pop()
        if link in ready:
            data = link.recv(_BYTES)
            if not data:
                return
            sys.stdout.write(without_controls(data.decode("utf-8", "replace")))
            sys.stdout.flush()
