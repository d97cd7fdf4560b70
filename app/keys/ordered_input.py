"""Handle keys in the order in which they were pressed, and ignore input for a closing screen.

Textual passes a printable character to the focused widget at once. A key with a binding (backspace,
arrows, Tab, a command) first travels up to the app, so characters typed soon after it overtake it:
``backspace 1`` becomes ``1 backspace``, and text after Tab goes to the previous field. Therefore
each key waits here until the previous one has been handled.

A key that is held down sends itself again and again. Its repeats move cursors and type text, but
they give no command. A text that was meant for another window gives no grave one either: what ends,
removes or starts something asks here whether there was a pause before the key.

A screen is removed in several steps. What was sent to it before still arrives in between: an action
of a key or of the palette, a click, a timer, a watcher, the result of a worker. It would not find
the widgets of the screen, and the dashboard would crash.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any

from textual import events
from textual._context import active_message_pump
from textual.actions import ActionParseResult
from textual.app import App
from textual.css.query import NoMatches
from textual.dom import DOMNode, NoScreen
from textual.errors import NoWidget
from textual.message_pump import MessagePump
from textual.screen import Screen
from textual.timer import Timer
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

    async def run_action(
        self,
        action: str | ActionParseResult,
        default_namespace: DOMNode | None = None,
        namespaces: Mapping[str, DOMNode] | None = None,
    ) -> bool:
        """Ignore an action of the widget with the focus if no widget has it any more."""
        target = action.partition(".")[0] if isinstance(action, str) else action[0]
        if target == "focused" and self.focused is None:
            return False
        return await super().run_action(action, default_namespace, namespaces)

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


ROUNDS = 2
"""Passes through the message queues: one for the key itself, one for the messages that it
caused, such as a field's Submitted."""
LOST_AFTER_S = 0.5
"""Seconds after which the next key is handled anyway. A key may never be reported as handled if
its widget was removed."""
UNMOUNTED_S = 0.02
"""Seconds until a key is tried again for whose screen the widgets are not there yet."""
FIRST_REPEAT_S = 0.7
"""Maximum seconds until a terminal repeats a held key for the first time."""
NEXT_REPEAT_S = 0.15
"""Maximum seconds between two further repeats."""
PAUSE_S = 0.5
"""Minimum seconds without a key that tell a chosen key from the next one of a typed text."""
COMMANDS = frozenset(
    """answer back checkpoint delete interrupt kill label launch leave pause press rerun resume star
    start stop stop_when submit undo""".split()  # noqa: SIM905 - easier to read than a list of strings
)
"""Actions that the repeats of a held key do not carry out."""
REFUSAL = "answer(False)"
"""The action that answers no: it changes nothing, and no key for it is ever ignored."""
LONGEST_HOLD_S = 10.0
"""Seconds after which held keys are discarded: nobody waits that long for what they were for."""


class HeldKey:
    """Tells the repeats of a held key from keys that were pressed. Pure: times are arguments."""

    def __init__(self) -> None:
        self._key, self._at, self._repeats = "", 0.0, 0

    def is_repeat(self, key: str, at: float) -> bool:
        """Return whether ``key`` at second ``at`` repeats the previous key."""
        limit = NEXT_REPEAT_S if self._repeats else FIRST_REPEAT_S
        repeats = key == self._key and at - self._at < limit
        self._key, self._at = key, at
        self._repeats = self._repeats + 1 if repeats else 0
        return repeats


class OrderedKeysApp(ClosingScreensApp):
    """An app that handles one key at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.clock: Callable[[], float] = time.monotonic
        """Seconds, for what depends on when a key was pressed."""
        self.input_at = self.clock()
        """Time of the clock at which the key or the click was pressed that is handled now."""
        self.is_repeat = False
        """Whether the key that is handled now repeats a held one."""
        self._last_key_at = self._key_before_at = -math.inf
        """Times of the newest key, and of the last one before the input that is handled now."""
        self._pause = (-math.inf, -math.inf)
        """Begin and end of the last pause of at least ``PAUSE_S``."""
        self._held_key = HeldKey()
        self._waiting_keys: deque[events.Key] = deque()
        self._current_key: events.Key | None = None
        self._allowed_keys: Collection[str] | None = None
        """The keys that are handled while the others are held; None if no key is held."""
        self._hold_timer: Timer | None = None

    def hold_keys(self, allowed: Collection[str]) -> None:
        """Keep keys until ``release_keys``, because what they are for is not on the screen yet.

        The ``allowed`` ones are handled at once.
        """
        self._allowed_keys = allowed
        self._hold_timer = self.set_timer(LONGEST_HOLD_S, self._discard_keys)

    def release_keys(self) -> None:
        """Handle the keys that were held, in their order."""
        if self._allowed_keys is None:
            return
        self._allowed_keys = None
        if self._hold_timer is not None:
            self._hold_timer.stop()
        if self._current_key is None:
            self.call_later(self._handle_next_key)

    def _discard_keys(self) -> None:
        self._waiting_keys.clear()
        self.release_keys()

    async def on_event(self, event: events.Event) -> None:
        closing = not self.screen_stack
        if closing or not isinstance(event, events.Key) or event.is_forwarded:
            if isinstance(event, (events.MouseDown, events.MouseUp)) and not event.is_forwarded:
                self._note_input(event)
            await super().on_event(event)
        elif self._allowed_keys is not None and event.key in self._allowed_keys:
            await super().on_event(event)
        elif self._current_key is None and not self._waiting_keys and self._allowed_keys is None:
            await self._dispatch(event)
        else:
            self._waiting_keys.append(event)
            if len(self._waiting_keys) == 1 and self._current_key is not None:
                self._limit_wait(self._current_key)

    def _note_input(self, event: events.Event) -> None:
        """Take the time of an input; it may have waited while the app was busy."""
        self.input_at = self.clock() - max(0.0, time.monotonic() - event.time)
        self._key_before_at = self._last_key_at
        if self.input_at - self._key_before_at >= PAUSE_S:
            self._pause = (self._key_before_at, self.input_at)
        if isinstance(event, events.Key):
            self._last_key_at = self.input_at

    def follows_pause(self, since: float) -> bool:
        """Return whether no key came in the last half second before the input that is handled now,
        nor that input within half a second after ``since``."""
        return self.input_at - max(self._key_before_at, since) >= PAUSE_S

    def had_pause(self, since: float) -> bool:
        """Return whether there was half a second without keys after ``since``, up to the input that
        is handled now, or no key at all."""
        begin, end = self._pause
        return self._last_key_at <= since or end - max(begin, since) >= PAUSE_S

    async def _dispatch(self, key: events.Key) -> None:
        if not self.screen.is_mounted:
            # An action of the screen would not find its widgets yet.
            self._current_key = key
            self._waiting_keys.appendleft(key)
            self.set_timer(UNMOUNTED_S, lambda: self.call_later(self._finish_key, key))
            return
        self._note_input(key)
        self.is_repeat = self._held_key.is_repeat(key.key, self.input_at)
        if self.is_repeat and self._gives_command(key):
            return
        self._current_key = key
        target = self.focused or self.screen
        await super().on_event(key)
        self._follow_key(target, target, key, ROUNDS)

    def _gives_command(self, key: events.Key) -> bool:
        """Return whether a key would carry out a command where the focus is."""
        focused = self.focused
        if focused is not None and focused.check_consume_key(key.key, key.character):
            return False
        active = self.screen.active_bindings.get(key.key)
        if active is None:
            return False
        # Imported here: few keys are repeats.
        from textual.widgets import OptionList

        call = active.binding.action.rpartition(".")[2]
        action = call.partition("(")[0]
        if action == "select":
            # Enter in a list may start what is selected.
            return isinstance(active.node, OptionList)
        return action in COMMANDS and call != REFUSAL

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
        await self._handle_next_key()

    async def _handle_next_key(self) -> None:
        while self._waiting_keys and self._allowed_keys is None and self._current_key is None:
            await self._dispatch(self._waiting_keys.popleft())
        if self._waiting_keys and self._current_key is not None:
            self._limit_wait(self._current_key)

    def _limit_wait(self, key: events.Key) -> None:
        """Continue with the next key even if ``key`` is never reported as handled."""
        self.set_timer(LOST_AFTER_S, lambda: self.call_later(self._finish_key, key))
