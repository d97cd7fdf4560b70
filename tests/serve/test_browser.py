"""A served dashboard in a real browser: headless Chromium, driven by its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.serve.conftest import Served

aiohttp = pytest.importorskip("aiohttp")
pytest.importorskip("aiohttp.web")
pytest.importorskip("textual_serve")
images = pytest.importorskip("PIL.Image")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
SECONDS = 120


class Tab:
    """One tab of the browser."""

    def __init__(self, websocket: Any) -> None:
        self._websocket = websocket
        self._numbers = itertools.count(1)

    async def call(self, method: str, **parameters: object) -> dict[str, Any]:
        number = next(self._numbers)
        await self._websocket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            answer: dict[str, Any] = await self._websocket.receive_json(timeout=SECONDS)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return dict(answer["result"])

    async def evaluate(self, expression: str) -> Any:
        answer = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        return answer["result"].get("value")

    async def until(self, expression: str) -> None:
        for _ in range(SECONDS * 5):
            if await self.evaluate(expression):
                return
            await asyncio.sleep(0.2)
        raise AssertionError(f"{expression}: {await self.evaluate('document.body.innerText')}")

    async def colours(self) -> int:
        """Return the number of different colours on the page."""
        picture = await self.call("Page.captureScreenshot")
        with images.open(io.BytesIO(base64.b64decode(picture["data"]))) as image:
            return len(image.convert("RGB").getcolors(1 << 24))


@asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Tab]:
    """Start a browser with one tab, for which evil.example is this machine."""
    assert CHROMIUM is not None
    command = [
        *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"),
        *(f"--user-data-dir={folder}", "--window-size=1300,800", "--no-first-run"),
        *("--host-resolver-rules=MAP evil.example 127.0.0.1", "about:blank"),
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        port_file = folder / "DevToolsActivePort"
        for _ in range(SECONDS * 5):
            if port_file.exists() and len(port_file.read_text().split()) == 2:
                break
            await asyncio.sleep(0.2)
        port = port_file.read_text().split()[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                tabs = json.loads(await answer.text())
            address = next(tab for tab in tabs if tab["type"] == "page")["webSocketDebuggerUrl"]
            async with session.ws_connect(address, max_msg_size=0) as websocket:
                yield Tab(websocket)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


OPENS_WEBSOCKET = """
new Promise(done => {
  const socket = new WebSocket("ws://%s/ws?width=80&height=24");
  socket.onmessage = () => done("opened");
  socket.onerror = () => done("refused");
})
"""


@pytest.mark.slow
async def test_the_dashboard_appears_and_other_pages_reach_nothing(
    served: Served, tmp_path: Path
) -> None:
    async with browser(tmp_path / "profile") as tab:
        await tab.call("Page.navigate", url=served.address)
        await tab.until("document.body && document.body.classList.contains('-first-byte')")
        for _ in range(SECONDS * 2):
            if await tab.colours() > 40:
                break
            await asyncio.sleep(0.5)
        assert await tab.colours() > 40, "the screen is drawn: letters, borders, panels"
        assert await tab.evaluate("location.href") == f"http://{served.host}/"
        # The page itself may open a websocket.
        assert await tab.evaluate(OPENS_WEBSOCKET % served.host) == "opened"
        assert len(served.pages()) >= 1

        # A page of another server on this machine: the browser sends it the same cookies.
        async with other_server() as other:
            await tab.call("Page.navigate", url=f"http://{other}/")
            await tab.until("document.body && document.body.innerText.includes('other')")
            assert await tab.evaluate(OPENS_WEBSOCKET % served.host) == "refused"

        # DNS rebinding: the page is of evil.example, whose address is now this machine.
        _, _, port = served.host.partition(":")
        await tab.call("Page.navigate", url=f"http://evil.example:{port}/?token={served.token}")
        await tab.until("document.body && document.body.innerText.includes('is not localhost')")
        assert await tab.evaluate(OPENS_WEBSOCKET % f"evil.example:{port}") == "refused"


@asynccontextmanager
async def other_server() -> AsyncIterator[str]:
    """Serve a page on another port of this machine; yield its host."""
    app = aiohttp.web.Application()

    async def page(_: object) -> Any:
        return aiohttp.web.Response(text="other")

    app.add_routes([aiohttp.web.get("/", page)])
    runner = aiohttp.web.AppRunner(app)
    await runner.setup()
    site = aiohttp.web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
