"""Who may use a served dashboard, request by request."""

from __future__ import annotations

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("textual_serve")

from ltui.app.dashboard_server import cookie_name, has_token, is_loopback, refusal

HOST = "127.0.0.1:8765"
ORIGIN = f"http://{HOST}"


def test_names_of_this_machine() -> None:
    ours = ["localhost", "127.0.0.1", "127.9.9.9", "::1"]
    others = ["", "0.0.0.0", "::", "10.0.0.1", "localhost.evil.example", "2130706433"]
    assert [name for name in (*ours, *others) if is_loopback(name)] == ours


@pytest.mark.parametrize("host", [HOST, "localhost", "localhost:9000", "[::1]:8765"])
def test_requests_of_the_own_page_are_answered(host: str) -> None:
    assert refusal(host, None, is_websocket=False) is None
    assert refusal(host, f"http://{host}", is_websocket=False) is None
    assert refusal(host, f"http://{host}", is_websocket=True) is None


@pytest.mark.parametrize(
    "host",
    [
        *(None, "", "evil.example", "evil.example:8765", "localhost.evil.example:8765"),
        *("localhost@evil.example", "127.0.0.1:8765@evil.example", "evil.example@127.0.0.1:8765"),
        *("127.0.0.1:8765/x", "127.0.0.1:http", "127.0.0.1:99999", "127.0.0.1 evil.example"),
        *("[::1", "[::1]x", "[::1]x:8765", "localhost."),
    ],
)
def test_another_host_is_refused(host: str | None) -> None:
    for origin in (None, f"http://{host}", ORIGIN):
        assert refusal(host, origin, is_websocket=False) is not None
        assert refusal(host, origin, is_websocket=True) is not None


@pytest.mark.parametrize(
    "origin",
    [
        *("null", "http://evil.example", "https://127.0.0.1:8765", "http://127.0.0.1:8766"),
        *("http://localhost:8765", "http://127.0.0.1:8765.evil.example", "http://127.0.0.1"),
    ],
)
def test_another_page_is_refused(origin: str) -> None:
    for is_websocket in (False, True):
        assert refusal(HOST, origin, is_websocket=is_websocket) is not None


def test_a_websocket_without_an_origin_is_refused() -> None:
    assert refusal(HOST, None, is_websocket=True) is not None


def test_the_token_is_in_the_address_or_in_the_cookie_of_this_server() -> None:
    assert has_token("secret", {"token": "secret"}, {})
    assert has_token("secret", {}, {cookie_name("secret"): "secret"})
    assert not has_token("secret", {}, {})
    assert not has_token("secret", {}, {cookie_name("other"): "secret"})
    for token in ("", "secre", "\udcff\u00e9"):
        assert not has_token("secret", {"token": token}, {})
