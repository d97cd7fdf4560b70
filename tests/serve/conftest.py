"""A running ``ltui serve``, and requests to it as a browser or an attacker sends them."""

from __future__ import annotations

import http.client
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from urllib.parse import parse_qs, urlsplit

import psutil
import pytest

from tests.ltui_command import LTUI
from tests.required import required

Answer = tuple[int, dict[str, str], str]
"""Status, headers and text."""


class Served:
    """One server, its address and its token."""

    def __init__(self, *options: str) -> None:
        self.process = subprocess.Popen(
            [*LTUI, "serve", "--port", "0", *options], stdout=subprocess.PIPE, text=True
        )
        self._printed = required(self.process.stdout)
        self.about = self._printed.readline()
        self.address = self._printed.readline().strip()
        parts = urlsplit(self.address)
        self.host, self.port = parts.netloc, parts.port or 0
        (self.token,) = parse_qs(parts.query)["token"]

    @property
    def cookie(self) -> str:
        # Imported here: it needs the packages of the extra `serve`.
        from ltui.app.dashboard_server import cookie_name

        return f"{cookie_name(self.token)}={self.token}"

    def get(self, path: str, *, token: bool = True, **headers: str) -> Answer:
        """Request a path with the cookie; ``Host`` and others may be replaced."""
        sent = {"Host": self.host, **({"Cookie": self.cookie} if token else {}), **headers}
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.putrequest("GET", path, skip_host=True)
            for name, value in sent.items():
                connection.putheader(name, value)
            connection.endheaders()
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read().decode()

    def pages(self) -> list[psutil.Process]:
        """The processes of the open pages, as long as the server lives."""
        children = psutil.Process(self.process.pid).children()
        return [child for child in children if child.status() != psutil.STATUS_ZOMBIE]

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._printed.close()


@pytest.fixture
def serve(private_home: object) -> Iterator[Callable[..., Served]]:
    servers: list[Served] = []

    def start(*options: str) -> Served:
        servers.append(Served(*options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for all tests of a module that leave it as it is."""
    folder = tmp_path_factory.mktemp("served")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LTUI_HOME", str(folder / "home"))
        patch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        server = Served()
    yield server
    server.close()


def ends(process: psutil.Process) -> bool:
    """Return whether a process has ended; it may wait for its parent to read how."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
