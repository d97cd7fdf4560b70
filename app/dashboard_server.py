"""The web server of ``ltui serve``: textual-serve's pages and packets behind the checks of ltui.

The server listens on the loopback interface only. That does not keep out other users of the
machine, nor web pages in the user's own browser, which may send requests to any address. So every
request must name this machine as its host (DNS rebinding), must not come from another page
(cross-site requests and websockets), and must have the token.

textual-serve checks neither who asks nor from which page, and passes a shell string to ``sh``. So
every request goes through ``_checked`` first, and the process of a page is started here.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import hashlib
import hmac
import ipaddress
import logging
import os
import re
import signal
import socket
import time
import weakref
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from textual_serve.app_service import AppService
from textual_serve.download_manager import DownloadManager
from textual_serve.server import Server

from ltui.training.json_codec import WRONG_CONTENT
from ltui.widgets.sanitise import clean_lines

TOKEN_PARAMETER = "token"  # noqa: S105 - a name, not a secret
"""Parameter of the address that is printed."""

HEADERS = {
    "Cache-Control": "no-store",
    # Nothing is loaded from other servers, and no other page can put this one into a frame.
    "Content-Security-Policy": "default-src 'self'; script-src 'self' 'unsafe-inline'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data:; font-src 'self' data:; "
    "connect-src 'self' ws://{host}; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Headers of every answer. ``{host}`` is the host of the request."""


def is_loopback(name: str) -> bool:
    """Return whether ``name`` is an address of the loopback interface, or ``localhost``."""
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def refusal(host: str | None, origin: str | None, *, is_websocket: bool) -> str | None:
    """Return why a request with these headers is refused, or None if it is not.

    The port in ``host`` may be another one, because ``ssh -L`` may forward from any.
    """
    if host is None or not _names_loopback(host):
        return "The host of this address is not localhost."
    if origin is None and not is_websocket:
        # Browsers leave it out when a person opens an address. They always send it for websockets.
        return None
    if origin != f"http://{host}":
        return "The request comes from another page."
    return None


def _names_loopback(host: str) -> bool:
    try:
        parts = urlsplit(f"//{host}")
        parts.port  # noqa: B018 - raises ValueError if it is none
    except ValueError:
        return False
    # urlsplit ignores what stands between the bracket of an address and its port.
    whole = parts.netloc == host and re.fullmatch(r"\[[^][@]*\](:\d*)?|[^][@]*", host) is not None
    return whole and is_loopback(parts.hostname or "")


def has_token(token: str, query: Mapping[str, str], cookies: Mapping[str, str]) -> bool:
    """Return whether a request has the token, compared in constant time."""
    given = query.get(TOKEN_PARAMETER) or cookies.get(cookie_name(token)) or ""
    return hmac.compare_digest(given.encode(errors="surrogateescape"), token.encode())


def cookie_name(token: str) -> str:
    """Return the name of the cookie that holds the token after the first request.

    Browsers do not separate the cookies of two servers on one host, so each has its own name.
    """
    return f"ltui-{hashlib.sha256(token.encode()).hexdigest()[:16]}"


MAX_PAGES = 16
"""Number of pages that may be open at once; each has a process of its own."""
MAX_STRANGERS = 128
"""Connections without the token that may be open at once. One more closes the oldest of them, so
that other users of the machine keep nobody out."""
_REPEAT_S = 60.0
"""Seconds in which one message of the libraries is logged once."""
END_S = 5.0
"""Seconds that the process of a page has to end; then it is killed."""
_MAX_CELLS = 500
"""Largest width and height of a page in cells."""
_PR_SET_PDEATHSIG = 1

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class DashboardServer(Server):  # type: ignore[misc, unused-ignore]
    """Serves dashboards on a socket until it is told to end."""

    def __init__(self, command: Sequence[str], token: str) -> None:
        """``command`` starts the dashboard of one page."""
        super().__init__(command[0], title="ltui")
        self._command = tuple(command)
        self._token = token
        self._pages: set[web.WebSocketResponse] = set()
        self._with_token = weakref.WeakSet[asyncio.BaseTransport]()

    async def run(self, listener: socket.socket, on_start: Callable[[], None]) -> None:
        """Serve until SIGINT, SIGTERM or SIGHUP; then end every page and its process."""
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, ended.set)
        app = await self._make_app()
        app.middlewares.append(self._checked)
        for name in ("aiohttp.server", "asyncio"):
            logging.getLogger(name).addFilter(_OfThisServer())
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=2 * END_S)
        await runner.setup()

        def accept() -> web.RequestHandler:
            assert runner.server is not None
            open_ = (handler.transport for handler in runner.server.connections)
            strangers = [t for t in open_ if t is not None and t not in self._with_token]
            for transport in strangers[: max(0, len(strangers) - MAX_STRANGERS)]:
                transport.abort()
            return runner.server()

        listening = await loop.create_server(accept, sock=listener)
        try:
            on_start()
            await ended.wait()
        finally:
            listening.close()
            await runner.cleanup()

    async def on_startup(self, app: web.Application) -> None:
        """Print nothing: the address with the token is printed by the command."""

    async def on_shutdown(self, app: web.Application) -> None:  # noqa: ARG002 - a signal's handler
        """Close the websockets, so that their handlers end the processes."""
        await asyncio.gather(*(page.close() for page in self._pages))

    @web.middleware
    async def _checked(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Answer a request only if it may be answered."""
        host = request.headers.get("Host", "")
        is_websocket = request.path == "/ws"
        reason = refusal(host, request.headers.get("Origin"), is_websocket=is_websocket)
        response: web.StreamResponse
        if reason is not None:
            response = web.Response(status=403, text=f"{reason}\n")
        elif not has_token(self._token, request.query, request.cookies):
            text = "The token is missing or wrong. Open the address that `ltui serve` printed.\n"
            response = web.Response(status=401, text=text)
        else:
            if request.transport is not None:
                self._with_token.add(request.transport)
            response = await self._answered(request, handler, is_websocket=is_websocket)
        if not response.prepared:
            for name, value in HEADERS.items():
                response.headers[name] = value.replace("{host}", host)
        return response

    async def _answered(
        self, request: web.Request, handler: _Handler, *, is_websocket: bool
    ) -> web.StreamResponse:
        """Return the answer to a request with the token."""
        if TOKEN_PARAMETER in request.query and not is_websocket:
            # The token leaves the address, so that it is in no history and no bookmark.
            response = web.Response(status=303, headers={"Location": "/"})
            response.set_cookie(
                cookie_name(self._token), self._token, httponly=True, samesite="Strict"
            )
            return response
        try:
            return await handler(request)
        except web.HTTPException as error:
            return error

    async def handle_index(self, request: web.Request) -> Any:
        """Serve the page. Its addresses begin with the host that the browser knows."""
        self.public_url = f"http://{request.host}"
        return await super().handle_index(request)

    async def handle_websocket(self, request: web.Request) -> web.WebSocketResponse:
        """Run a dashboard for a page until one of both ends."""
        if len(self._pages) >= MAX_PAGES:
            raise web.HTTPServiceUnavailable(text="Too many pages are open.\n")
        websocket = web.WebSocketResponse(heartbeat=15)
        await websocket.prepare(request)
        self._pages.add(websocket)
        page = _Page(self._command, websocket, self.download_manager)
        try:
            await page.start(*(_cells(request, name) for name in ("width", "height")))
            await self._process_messages(websocket, page)
        except (*WRONG_CONTENT, AssertionError):
            pass  # The message is not one of the page. It is closed.
        finally:
            await page.stop()
            await websocket.close()
            self._pages.discard(websocket)
        return websocket


class _OfThisServer(logging.Filter):
    """Drops what other users of the machine could fill a terminal or a log with: requests that are
    not HTTP, and repeated messages."""

    def __init__(self) -> None:
        super().__init__()
        self._next_s: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and isinstance(record.exc_info[1], HttpProcessingError):
            return False
        text, now_s = str(record.msg).partition("\n")[0], time.monotonic()
        if now_s < self._next_s.get(text, 0.0):
            return False
        self._next_s[text] = now_s + _REPEAT_S
        return True


def _cells(request: web.Request, name: str) -> int:
    text = request.query.get(name, "")
    return _capped(int(text)) if text.isdecimal() else 80


def _capped(cells: int) -> int:
    return max(1, min(cells, _MAX_CELLS))


class _Page(AppService):  # type: ignore[misc, unused-ignore]
    """The process of one page, which never outlives the page or this server."""

    def __init__(
        self, command: Sequence[str], websocket: web.WebSocketResponse, downloads: DownloadManager
    ) -> None:

        async def close() -> None:
            await websocket.close()

        super().__init__(
            command[0],
            write_bytes=websocket.send_bytes,
            write_str=websocket.send_str,
            close=close,
            download_manager=downloads,
        )
        self._words = tuple(command)

    async def _open_app_process(self, width: int = 80, height: int = 24) -> Process:
        self._process = process = await asyncio.create_subprocess_exec(
            *self._words,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            env=self._build_environment(width=width, height=height),
            preexec_fn=functools.partial(_die_with_parent, os.getpid()),
        )
        assert process.stderr is not None
        process.stderr = _CleanStream(process.stderr)  # type: ignore[assignment]
        self._stdin = process.stdin
        return process

    async def run(self) -> None:
        """Pass packets on until the process ends; then the page is closed, too."""
        await super().run()
        await self.remote_close()

    async def set_terminal_size(self, width: int, height: int) -> None:
        """Tell the process the new size of the page."""
        await super().set_terminal_size(_capped(int(width)), _capped(int(height)))

    async def send_bytes(self, data: bytes) -> bool:
        """Pass input on. Raise ``ValueError`` if the process does not read it for some seconds: its
        page may have gone meanwhile, which nobody would notice."""
        try:
            return bool(await asyncio.wait_for(super().send_bytes(data), END_S))
        except asyncio.TimeoutError:
            raise ValueError("there is more input than the dashboard reads") from None

    async def stop(self) -> None:
        """Ask the process to end, and kill it if it does not."""
        process = self._process
        if process is None:
            return
        try:
            await asyncio.wait_for(super().stop(), END_S)
            await asyncio.wait_for(process.wait(), END_S)
        except (asyncio.TimeoutError, OSError):
            if process.returncode is None:
                process.kill()
                await process.wait()


class _CleanStream:
    """The error output of a process without what would control the terminal of this one."""

    def __init__(self, stream: asyncio.StreamReader) -> None:
        self._stream = stream

    async def read(self, size: int) -> bytes:
        """Return at most about ``size`` bytes."""
        data = await self._stream.read(size)
        return "\n".join(clean_lines(data.decode(errors="replace"))).encode()


def _die_with_parent(parent: int) -> None:
    """Let the kernel kill this new process when the server dies, however that happens."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
