"""The dialog of the last profile of a run, in which the next one is begun."""

from __future__ import annotations

import time
from functools import partial
from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical, VerticalScroll
from textual.widgets import Static

from ltui.app.presentation.profile_text import profile_lines
from ltui.app.screens.dialog import Dialog, call_screen, show_error
from ltui.training.diagnosis.profile_summary import Profile
from ltui.training.store.profile_files import read_profile
from ltui.training.store.run_directory import RunDir
from ltui.widgets import formats
from ltui.widgets.make_bindings import bindings
from ltui.widgets.sanitise import clean_line

POLL_S = 0.5
"""Seconds between two reads of the profile."""
ABOUT = (
    "torch.profiler for 5 steps of the slowest, the median and rank 0. These steps are slower;"
    " the losses stay the same."
)


class ProfileScreen(Dialog[None]):
    """Shows a profile while it is made, and its result."""

    BINDINGS: ClassVar[list[BindingType]] = bindings(
        "profile",
        """
        enter    | start(False) | profile     | Profile five steps now
        m        | start(True)  | with memory | The same, with what the operators allocate
        escape,q | dismiss      | close       | Close; a profile that is made goes on
        """,
    )

    def __init__(self, run_dir: RunDir, *, refusal: str | None) -> None:
        """``refusal`` says why no profile can be made now."""
        super().__init__()
        self._run_dir, self._refusal = run_dir, refusal
        self._profile: Profile | None = None

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog -wide") as dialog:
            dialog.border_title = "Profile"
            yield Static(clean_line(self._refusal or ABOUT), classes="about", markup=False)
            with VerticalScroll(id="profile-lines"):
                yield Static("", id="profile", markup=False)
            keys = "" if self._refusal else "⏎ profile     m with memory     "
            yield Static(Text(f"{keys}esc close"), id="answers")

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()
        self.set_interval(POLL_S, self._read)
        self._read()

    @work(thread=True, exclusive=True, group="profile")
    def _read(self) -> None:
        found = read_profile(self._run_dir)
        call_screen(self, partial(self._show, found))

    def _show(self, found: Profile | None) -> None:
        self._profile = found
        if found is None:
            text = "There is no profile of this run yet."
        else:
            text = "\n".join(profile_lines(found))
            if found.is_over:
                text = f"{formats.ago(time.time() - found.requested_at)}: {text}"
        self.query_one("#profile", Static).update(Text(text))

    def action_start(self, memory: bool) -> None:
        """Begin a profile unless one is made or none can be made."""
        if self._refusal is not None:
            self.notify(self._refusal, severity="warning", markup=False)
        elif self._profile is not None and not self._profile.is_over:
            self.notify("a profile is being made", markup=False)
        else:
            self._start(memory)

    @work(thread=True, exclusive=True, group="start profile")
    def _start(self, memory: bool) -> None:
        # Imported here: what starts supervisors is not needed to show a profile.
        from ltui.app.live.run_requests import send_request

        try:
            send_request(self._run_dir, {"cmd": "profile", "memory": memory})
        except Exception as error:  # noqa: BLE001 - the thread's top: it becomes a message
            show_error(self, "The profile was refused", error)
