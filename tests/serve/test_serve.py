"""``ltui serve`` against real requests and websockets, wrong ones above all."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from ltui.app.cli import main
from ltui.training.process.python_environment import module_command
from tests.serve.conftest import Served, ends
from tests.store.test_export_formats import make_run
from tests.waiting import wait_for

aiohttp = pytest.importorskip("aiohttp")
pytest.importorskip("textual_serve")

READS_ONLY = "READ-ONLY"


@contextlib.asynccontextmanager
async def page(served: Served, **headers: str | None) -> AsyncIterator[Any]:
    """Open a websocket as the page does; a header may be replaced or, with None, left out."""
    sent = {"Origin": f"http://{served.host}", "Cookie": served.cookie, **headers}
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(
            f"http://127.0.0.1:{served.port}/ws?width=160&height=50",
            headers={name: value for name, value in sent.items() if value is not None},
        ) as websocket,
    ):
        yield websocket


async def until_shown(websocket: Any, text: str) -> None:
    """Read what is drawn until ``text`` is among it."""
    shown = ""
    while text not in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown):
        message = await websocket.receive(timeout=100)
        assert message.type is aiohttp.WSMsgType.BINARY, f"{message}; shown: {shown[-500:]}"
        shown += message.data.decode()


async def status_of(served: Served, **headers: str | None) -> int:
    """Return the status with which a websocket is refused."""
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        async with page(served, **headers):
            pass
    return int(refused.value.status)


# -- pages -----------------------------------------------------------------------------------------


def test_the_printed_address_sets_a_cookie_and_leaves_the_token_behind(served: Served) -> None:
    status, headers, _ = served.get(f"/?token={served.token}", token=False)
    assert (status, headers["Location"]) == (303, "/")
    cookie = headers["Set-Cookie"]
    assert cookie.startswith(served.cookie)
    assert {"HttpOnly", "SameSite=Strict"} <= set(cookie.split("; "))
    status, headers, text = served.get("/", token=False, Cookie=cookie.partition(";")[0])
    assert status == 200
    assert f"ws://{served.host}/ws" in text
    assert served.token not in text
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize("path", ["/", "/static/js/textual.js", "/download/x", "/nothing", "/ws"])
def test_nothing_is_answered_without_the_token(served: Served, path: str) -> None:
    origin = f"http://{served.host}"
    for more in ("", "?token=", f"?token={served.token[:-1]}", f"?token={served.token}x"):
        status, headers, text = served.get(path + more, token=False, Origin=origin)
        assert (status, "Set-Cookie" in headers) == (401, False)
        assert "Open the address that `ltui serve` printed" in text
        assert served.token not in text


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "10.0.0.1", ""])
def test_a_name_that_points_here_is_refused(served: Served, host: str) -> None:
    """DNS rebinding: the browser believes that the page of evil.example is on this machine."""
    for path in ("/", f"/?token={served.token}", "/static/js/textual.js"):
        status, headers, _ = served.get(path, Host=host and f"{host}:{served.port}")
        assert (status, "Set-Cookie" in headers) == (403, False)


def test_other_names_of_this_machine_and_forwarded_ports_work(served: Served) -> None:
    for host in (f"localhost:{served.port}", "localhost:9000", "[::1]:9000"):
        status, _, text = served.get("/", Host=host)
        assert (status, f"ws://{host}/ws" in text) == (200, True)


def test_another_page_cannot_request_anything(served: Served) -> None:
    for origin in ("http://evil.example", "null", f"http://localhost:{served.port}"):
        assert served.get("/", Origin=origin)[0] == 403


def test_others_without_the_token_keep_nobody_out_and_fill_no_log(
    serve: Callable[..., Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any user of the machine can connect, and send anything."""
    from ltui.app.dashboard_server import MAX_STRANGERS

    with (tmp_path / "log").open("w") as log:
        monkeypatch.setattr("subprocess.Popen", partial(subprocess.Popen, stderr=log))
        served = serve()
    idle = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(4 * MAX_STRANGERS)]
    assert served.get("/")[0] == 200
    idle[0].settimeout(60)
    with contextlib.suppress(ConnectionResetError):
        assert idle[0].recv(1) == b""
    wait_for(lambda: len(psutil.Process(served.process.pid).net_connections()) < 2 * MAX_STRANGERS)
    for stranger in idle:
        stranger.close()
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", served.port)) as stranger:
            stranger.sendall(b"no HTTP \x1b]0;x\x07" * 1000 + b"\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert b" 400 " in stranger.recv(100)
    served.end()
    assert (tmp_path / "log").read_text() == ""


# -- websockets ------------------------------------------------------------------------------------


async def test_a_page_is_not_made_larger_than_any_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    from ltui.app.dashboard_server import _Page

    sent: list[Any] = []

    async def send_meta(_: object, message: dict[str, object]) -> None:
        sent.append((message["width"], message["height"]))

    monkeypatch.setattr(_Page, "send_meta", send_meta)
    server_side: Any = aiohttp.web.WebSocketResponse()
    opened = _Page(("true",), server_side, None)  # type: ignore[arg-type]
    for width, height in ((20000, 20000), (-1, 0), (160, 50)):
        await opened.set_terminal_size(width, height)
    assert sent == [(500, 500), (1, 1), (160, 50)]


async def test_a_page_imports_nothing_from_the_current_folder(
    imported: Path, serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.serve.conftest.LTUI", module_command("ltui.app.cli"))
    async with page(serve()) as websocket:
        await until_shown(websocket, READS_ONLY)
    assert not imported.exists()


async def test_a_websocket_of_another_page_is_refused(served: Served) -> None:
    for origin in ("http://evil.example", "null", f"http://127.0.0.1:{served.port + 1}", None):
        assert await status_of(served, Origin=origin) == 403
    for cookie in (None, served.cookie[:-1], f"other={served.token}"):
        assert await status_of(served, Cookie=cookie) == 401
    evil = f"evil.example:{served.port}"
    assert await status_of(served, Host=evil, Origin=f"http://{evil}") == 403
    assert served.pages() == []


def test_a_request_that_is_no_websocket_is_answered_with_an_error(served: Served) -> None:
    for _ in range(20):
        assert served.get("/ws", Origin=f"http://{served.host}")[0] == 400


async def test_the_dashboard_of_a_page_is_read_only_and_ends_with_it(served: Served) -> None:
    assert "is read-only" in served.about
    async with page(served) as websocket:
        await until_shown(websocket, READS_ONLY)
        (process,) = served.pages()
        assert "--control" not in process.cmdline()
    wait_for(lambda: ends(process))
    assert served.process.poll() is None


@pytest.mark.parametrize("keys", ["c", "3x"], ids=["check", "export"])
async def test_a_read_only_page_neither_imports_classes_nor_writes_files(
    serve: Callable[..., Served], private_home: Path, keys: str
) -> None:
    make_run(private_home, "owl-0001")
    served = serve()
    async with page(served) as websocket:
        await until_shown(websocket, "owl")
        for key in keys:
            await websocket.send_json(["stdin", key])
        await until_shown(websocket, "This dashboard only")


async def test_the_dashboard_has_control_only_if_asked(serve: Callable[..., Served]) -> None:
    served = serve("--control")
    assert "can start and stop runs" in served.about
    async with page(served) as websocket:
        await until_shown(websocket, "quickstart")
        (process,) = served.pages()
        assert process.cmdline()[-1] == "--control"


@pytest.mark.parametrize("message", ['{"no": "list"}', "[" * 200_000], ids=["object", "deep"])
async def test_what_no_page_sends_closes_the_page(served: Served, message: str) -> None:
    async with page(served) as websocket:
        await until_shown(websocket, READS_ONLY)
        (process,) = served.pages()
        await websocket.send_str(message)
        await _until_closed(websocket)
    wait_for(lambda: ends(process))
    assert served.get("/")[0] == 200


async def test_a_page_that_sends_more_than_its_dashboard_reads_leaves_nothing(
    served: Served,
) -> None:
    async with page(served) as websocket:
        await until_shown(websocket, READS_ONLY)
        (process,) = served.pages()
        process.suspend()
        for _ in range(3):
            await websocket.send_json(["stdin", "x" * 1_000_000])
    wait_for(lambda: ends(process))
    assert served.get("/")[0] == 200


async def test_a_dashboard_that_dies_closes_its_page_only(served: Served) -> None:
    async with page(served) as one, page(served) as two:
        await until_shown(one, READS_ONLY)
        await until_shown(two, READS_ONLY)
        served.pages()[0].kill()
        closed = [asyncio.ensure_future(_until_closed(websocket)) for websocket in (one, two)]
        done, rest = await asyncio.wait(closed, timeout=100, return_when="FIRST_COMPLETED")
        assert len(done) == 1
        # A process closes its pipes a moment before it has ended.
        wait_for(lambda: len(served.pages()) == 1)
        rest.pop().cancel()


async def _until_closed(websocket: Any) -> None:
    while not websocket.closed:
        await websocket.receive()


# -- the end ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "pages"),
    [(signal.SIGINT, 1), (signal.SIGTERM, 2), (signal.SIGHUP, 1), (signal.SIGKILL, 1)],
)
async def test_nothing_is_left_when_the_server_ends(
    serve: Callable[..., Served], number: signal.Signals, pages: int
) -> None:
    served = serve()
    async with contextlib.AsyncExitStack() as opened:
        for _ in range(pages):
            await until_shown(await opened.enter_async_context(page(served)), READS_ONLY)
        processes = served.pages()
        assert len(processes) == pages
        code = await asyncio.to_thread(served.end, number)
    assert code == (-signal.SIGKILL if number is signal.SIGKILL else 0)
    for process in processes:
        wait_for(partial(ends, process))


# -- mistakes --------------------------------------------------------------------------------------


def test_a_port_in_use_is_refused(private_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
    error = capsys.readouterr().err
    assert error == (
        f"--port {port}: another program uses this port. "
        "Choose another port; --port 0 takes a free one.\n"
    )


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org", ""])
def test_an_address_that_others_reach_is_refused(
    private_home: Path, capsys: pytest.CaptureFixture[str], host: str
) -> None:
    assert main(["serve", "--host", host]) == 2
    error = capsys.readouterr().err
    assert f"--host {host}: the dashboard is served only on addresses of the loopback" in error
    assert "ssh -L 8765:127.0.0.1:8765" in error


def test_a_missing_package_is_named_with_its_remedy(
    private_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "textual_serve", None)
    monkeypatch.delitem(sys.modules, "textual_serve.server", raising=False)
    assert main(["serve"]) == 2
    error = capsys.readouterr().err
    assert "ltui serve: the package `textual_serve` cannot be imported" in error
    assert "-m pip install 'textual-serve" in error


def test_an_unknown_run_is_refused(private_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "nobody"]) == 2
    assert "nobody: there is no such run." in capsys.readouterr().err


async def test_a_chart_is_downloaded_and_not_written_on_the_server(
    serve: Callable[..., Served], private_home: Path
) -> None:
    run = make_run(private_home, "owl-0001")
    files = set(private_home.rglob("*.svg")) | set(Path.cwd().glob("*.svg"))
    served = serve(run.id)
    async with page(served) as websocket:
        await until_shown(websocket, "READ-ONLY")
        await websocket.send_json(["stdin", "M"])
        await until_shown(websocket, "val/acc")
        key = await _saved_chart(websocket)
        status, headers, text = await asyncio.to_thread(served.get, f"/download/{key}")
    assert (status, text[:4]) == (200, "<svg")
    assert headers["Content-Disposition"].startswith("attachment; filename=ltui-owl")
    assert set(private_home.rglob("*.svg")) | set(Path.cwd().glob("*.svg")) == files


async def _saved_chart(websocket: Any) -> str:
    """Press ``w`` after all that is drawn, until it is a curve; return the key of the download."""
    while True:
        await websocket.send_json(["stdin", "w"])
        message = await websocket.receive(timeout=100)
        if message.type is aiohttp.WSMsgType.TEXT:
            kind, key = message.json()
            assert kind == "deliver_file_start"
            return str(key)
        assert message.type is aiohttp.WSMsgType.BINARY, message
