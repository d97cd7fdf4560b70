"""Ignore what arrives for a screen while Textual removes it.

A screen is removed in several steps. What was sent to it before still arrives in between: an action
of a key or of the palette, a click, a timer, a watcher, the result of a worker. It would not find
the widgets of the screen, and the dashboard would crash.
"""

from __future__ import annotations

from typing import Any

from textual import events
from textual._context import active_message_pump
from textual.app import App
from textual.css.query import NoMatches
from textual.dom import DOMNode, NoScreen
from textual.errors import NoWidget
from textual.message_pump import MessagePump
from textual.screen import Screen
from textual.worker import WorkerFailed


def is_closing(node: MessagePump) -> bool:
    """Return whether a widget, its screen or the app is being removed, or was removed."""
    if isinstance(node, App):
        return node._exit
    if not isinstance(node, DOMNode) or node._pruning or node._closing or not node.is_attached:
        return True
    try:
        return node.screen not in node.app.screen_stack
    except NoScreen:
        return True


class ClosingScreensApp(App[None]):
    """An app whose screens may be closed while input for them is on its way."""

    async def on_event(self, event: events.Event) -> None:
        if isinstance(event, events.InputEvent) and not self.screen_stack:
            return  # The app is closing.
        if not self._is_on_removed_widget(event):
            await super().on_event(event)

    def _is_on_removed_widget(self, event: events.Event) -> bool:
        """Return whether the mouse is on a widget that was removed after the last painting.

        Textual begins to select text there, which needs the widget's parent.
        """
        if not isinstance(event, events.MouseEvent) or event.is_forwarded:
            return False
        try:
            widget, _ = self.get_widget_at(event.x, event.y)
        except NoWidget:
            return False
        return not isinstance(widget, Screen) and not widget.is_attached

    async def _dispatch_action(self, namespace: DOMNode, action_name: str, params: Any) -> bool:
        """Ignore an action of a screen that is closing, or whose widgets are not there yet."""
        if is_closing(namespace) or not (namespace is self or namespace.screen.is_mounted):
            return False
        return await super()._dispatch_action(namespace, action_name, params)

    def _handle_exception(self, error: Exception) -> None:
        """Ignore that a closing widget, or its worker, has not found another one.

        Textual reports the error of a timer as the context of its own one.
        """
        missing = isinstance(error, NoMatches) or isinstance(error.__context__, NoMatches)
        excusable = missing or isinstance(error, WorkerFailed)
        if excusable and is_closing(active_message_pump.get(self)):
            return
        if isinstance(error, WorkerFailed) and isinstance(error.error, Exception):
            self.show_worker_error(error.error)
        else:
            super()._handle_exception(error)

    def show_worker_error(self, error: Exception) -> None:
        """Show an error that a worker did not expect. The screens go on."""
        super()._handle_exception(error)
