"""The terminal of a debugger that runs in a rank of another process group.

The rank connects to a socket in a folder that only this user can read. What is typed goes there,
and what comes from there is printed.
"""

from __future__ import annotations

import os
import select
import shutil
import socket
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

_POLL_S = 0.2
_BYTES = 1 << 16


class DebuggerTerminal:
    """Relays the terminal of this process to the debugger, in a thread, within a ``with``."""

    def __enter__(self) -> DebuggerTerminal:
        self._folder = tempfile.mkdtemp(prefix="ltui-pdb-")
        self.path = str(Path(self._folder, "pdb"))
        """The socket to which the rank connects."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(1)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._relay, name="debugger", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _relay(self) -> None:
        while not self._closed.is_set():
            if select.select([self._listener], [], [], _POLL_S)[0]:
                link, _ = self._listener.accept()
                with link, suppress(OSError):  # the rank may have ended
                    self._relay_link(link)
                return

    def _relay_link(self, link: socket.socket) -> None:
        # Imported here: it is light, but only a debugger needs it.
        from ltui.widgets.sanitise import without_controls

        sources: list[socket.socket | int] = [link, sys.stdin.fileno()]
        while not self._closed.is_set():
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
