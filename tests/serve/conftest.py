"""A running ``ltui serve``, and requests to it as a browser or an attacker sends them."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from urllib.parse import parse_qs, urlsplit

import psutil
import pytest

from tests.ltui_command import LTUI

Answer = tuple[int, dict[str, str], str]
"""Status, headers and text."""


class Served:
    """One server, its address and its token."""

    def __init__(self, *options: str) -> None:
        self.process = subprocess.Popen(
            [*LTUI, "serve", "--port", "0", *options], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.about = self.process.stdout.readline()
        self.address = self.process.stdout.readline().strip()
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
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def serve(private_home: object) -> Iterator[Callable[..., Served]]:
    servers: list[Served] = []

    def start(*options: str) -> Served:
        servers.append(Served(*options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def served(serve: Callable[..., Served]) -> Served:
    return serve()


def ends(process: psutil.Process) -> bool:
    """Return whether a process has ended; it may wait for its parent to read how."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def environment_of(process: psutil.Process) -> dict[str, str]:
    with open(f"/proc/{process.pid}/environ", "rb") as file:
        entries = file.read().split(b"\0")
    return dict(os.fsdecode(entry).split("=", 1) for entry in entries if entry)
