"""Results and errors of a worker's thread, for the screen that started it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from textual.dom import DOMNode
from textual.worker import get_current_worker

from ltui.app.closing_screens import is_closing
from ltui.app.screens.dialog import ProblemScreen


def call_screen(node: DOMNode, function: Callable[..., Any], *values: object) -> None:
    """Call ``function`` on the event loop, unless the worker was cancelled or the screen of
    ``node`` is being closed."""
    worker = get_current_worker()

    def call() -> Any:
        return None if worker.is_cancelled or is_closing(node) else function(*values)

    if not worker.is_cancelled and node.app.is_running:
        node.app.call_from_thread(call)


def error_lines(error: Exception) -> list[str]:
    """Return the problems of an error, one line each; an unexpected error with its type."""
    # Imported here: the first frame shows no problem.
    from ltui.training.problem import ProblemError

    if isinstance(error, ProblemError):
        return [str(problem) for problem in error.problems]
    return [f"{type(error).__name__}: {error}"]


def show_error(node: DOMNode, title: str, error: Exception) -> None:
    """Show the problems of an action that failed in the worker's thread."""
    lines = error_lines(error)
    call_screen(node, lambda: node.app.push_screen(ProblemScreen(title, lines)))
