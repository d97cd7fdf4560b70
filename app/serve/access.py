"""Who may use a served dashboard: checks of one HTTP request. No network here.

The server listens on the loopback interface only. That does not keep out other users of the
machine, nor web pages in the user's own browser, which may send requests to any address. So every
request must name this machine as its host (DNS rebinding), must not come from another page
(cross-site requests and websockets), and must have the token.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

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
