"""Calls from a worker's thread to the screen that started it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from textual.dom import DOMNode
from textual.worker import get_current_worker


def call_screen(node: DOMNode, function: Callable[..., Any], *values: object) -> None:
    """Call ``function`` on the event loop, unless the worker was cancelled or the app has ended."""
    if not get_current_worker().is_cancelled and node.app.is_running:
        node.app.call_from_thread(function, *values)
