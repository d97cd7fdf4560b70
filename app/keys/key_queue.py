"""Handle keys in the order in which they were pressed.

Textual passes a printable character to the focused widget at once. A key with a binding (backspace,
arrows, Tab, a command) first travels up to the app, so characters typed soon after it overtake it:
``backspace 1`` becomes ``1 backspace``, and text after Tab goes to the previous field. Therefore
each key waits here until the previous one has been handled.
"""

from __future__ import annotations

from collections import deque

from textual import events
from textual.app import App
from textual.message_pump import MessagePump

ROUNDS = 2
"""Passes through the message queues: one for the key itself, one for the messages that it
caused, such as a field's Submitted."""
LOST_AFTER_S = 0.5
"""Seconds after which the next key is handled anyway. A key may never be reported as handled if
its widget was removed."""


class OrderedKeysApp(App[None]):
    """An app that handles one key at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting_keys: deque[events.Key] = deque()
        self._current_key: events.Key | None = None

    async def on_event(self, event: events.Event) -> None:
        if not isinstance(event, events.Key) or event.is_forwarded:
            await super().on_event(event)
        elif self._current_key is None:
            await self._dispatch(event)
        else:
            self._waiting_keys.append(event)
            if len(self._waiting_keys) == 1:
                self._limit_wait(self._current_key)

    async def _dispatch(self, key: events.Key) -> None:
        self._current_key = key
        target = self.focused or self.screen
        await super().on_event(key)
        self._follow_key(target, target, key, ROUNDS)

    def _follow_key(
        self, target: MessagePump, node: MessagePump, key: events.Key, rounds: int
    ) -> None:
        """Travel through the message queues that the key travels through, behind it, up to the
        app."""
        if node is not self:
            # Message queues are first in, first out. A closed queue is skipped.
            above = node._parent or self
            if not node.call_later(self._follow_key, target, above, key, rounds):
                self._follow_key(target, above, key, rounds)
        elif rounds:
            # Messages that the key's action sent to the app are handled before this call.
            self.call_later(self._follow_key, target, target, key, rounds - 1)
        else:
            self.call_later(self._finish_key, key)

    async def _finish_key(self, key: events.Key) -> None:
        if key is not self._current_key:
            return
        self._current_key = None
        if self._waiting_keys:
            await self._dispatch(self._waiting_keys.popleft())
            if self._waiting_keys and self._current_key is not None:
                self._limit_wait(self._current_key)

    def _limit_wait(self, key: events.Key) -> None:
        """Continue with the next key even if ``key`` is never reported as handled."""
        self.set_timer(LOST_AFTER_S, lambda: self.call_later(self._finish_key, key))
