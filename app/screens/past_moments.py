"""The time cursor of a run screen: it chooses a moment of the past, reads its frame and plays on.

``RunScreen`` draws the frames. What is shown is a moment of the past from the key press on, so that
no key changes the run while the person looks at its past.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, ClassVar

from msgspec.structs import replace
from rich.text import Text
from textual import on, work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.timer import Timer
from textual.widgets import Input, Static
from textual.worker import get_current_worker

from ltui.app.live.curve_arithmetic import LatestCurveRequest
from ltui.app.live.frame import Frame
from ltui.app.presentation.notifications import CONTROLS
from ltui.app.screens.dialog import Dialog, call_screen, error_lines
from ltui.app.screens.run_commands import RunCommandScreen
from ltui.training.problem import ProblemError
from ltui.training.state.asked_moment import AskedMoment, parse_moment
from ltui.training.state.run_snapshot import LIVE, RunSnapshot
from ltui.training.store.run_directory import RunDir
from ltui.widgets.charts.chart import Chart
from ltui.widgets.make_bindings import bindings

if TYPE_CHECKING:
    from ltui.app.live.past_frames import PastFrames

SPEEDS = (1, 2, 5, 10, 30, 60)
"""How many times as fast as it was a run plays."""
TICK_S = 0.25
"""Seconds between two moments of a run that plays."""
NEAR_S = 1e-3
"""Marks that are nearer to the shown moment, in seconds, are this moment."""
OF_THE_PRESENT = {"diagnose": "diagnosis", "profile": "profile"}
"""Actions that show what is measured now, and what they show."""
OF_THE_PAST = "This is the past of the run: nothing was requested. Esc returns to now."
NO_MOMENT = "This is the present. `,` goes to the mark before, `b` asks for a moment."


class PastMomentScreen(RunCommandScreen):
    """A screen of a run that shows the present, or a moment of the past."""

    def __init__(
        self,
        run_dir: RunDir,
        requests: LatestCurveRequest,
        *,
        readonly: bool,
        asked: str | None = None,
    ) -> None:
        """``asked``: the moment that is shown first, as a person writes it."""
        super().__init__(run_dir, readonly=readonly)
        self.present: Frame | None = None
        """The newest frame of the run, whatever is shown."""
        self._requests, self._asked = requests, asked
        self._past_at: float | None = None
        """The moment that is shown or being read; None for the present."""
        self._about = ""
        self._speed = 0
        self._is_reading = False
        self._frames: PastFrames | None = None
        self._lock = threading.Lock()
        self._timer: Timer | None = None
        self._ticked_at = 0.0

    @property
    def in_past(self) -> bool:
        """Whether a moment of the past is shown, or is about to be."""
        return self._past_at is not None

    @property
    def plays(self) -> bool:
        """Whether the shown moment moves on."""
        return self._speed > 0

    @property
    def snapshot(self) -> RunSnapshot | None:
        """The newest snapshot of the run, also while its past is shown."""
        return self.present.snapshot if self.present is not None else None

    def show_frame(self, frame: Frame) -> None:
        """Draw a frame of the present or of the past."""
        raise NotImplementedError

    def refusal_of(self, action: str) -> str | None:
        if self.in_past and action in OF_THE_PRESENT:
            return f"The {OF_THE_PRESENT[action]} is about the present. Esc returns to now."
        if self.in_past and action in (*CONTROLS, "stop_when"):
            return OF_THE_PAST
        if action in ("play", "return_to_now") and not self.in_past:
            return NO_MOMENT
        return super().refusal_of(action)

    def takes_key(self, action: str) -> bool:
        """Return whether the screen has the key of an action of a chart or a table itself."""
        return action == "mark" or (self.in_past and action in ("clear", "fold"))

    # -- choosing a moment -------------------------------------------------------------------------

    def use_present(self, frame: Frame) -> None:
        """Take the newest frame of the run."""
        self.present = frame
        if self._asked is not None:
            asked, self._asked = self._asked, None
            try:
                self.show_moment(parse_moment(asked, self.newest))
            except ProblemError as error:
                self._say(error)
        if not self.in_past:
            self.show_frame(frame)

    @property
    def newest(self) -> float:
        """The present in unix seconds; of a run that has ended, its end."""
        run = self.snapshot
        if run is not None and run.state not in LIVE and run.ended_at is not None:
            return run.ended_at
        return self.present.now if self.present is not None else time.time()

    def show_moment(self, asked: AskedMoment, about: str = "") -> None:
        """Show a moment. ``about``: what happened then."""
        if self.present is not None:
            self._play(0)
            self._about = about
            self._past_at = self.newest if asked.at is None else asked.at
            self._read(asked, self.present, playing=False)

    def read_again(self) -> None:
        """Read the shown moment again, because the screen requests other curves."""
        if self._past_at is not None and self.present is not None and not self.plays:
            self._read(AskedMoment(at=self._past_at), self.present, playing=False)

    def action_past_mark(self, direction: int) -> None:
        """Show the moment of the next mark, or of the one before."""
        if self.present is None:
            return
        now = float("inf") if self._past_at is None else self._past_at
        marks = [(mark.at, mark.text) for mark in self.present.marks if mark.at is not None]
        beyond = [(at, text) for at, text in marks if (at - now) * direction > NEAR_S]
        if beyond:
            at, text = max(beyond) if direction < 0 else min(beyond)
            self.show_moment(AskedMoment(at=at), text)
        elif direction > 0:
            self.notify(
                "There is no later mark. Esc returns to now." if self.in_past else NO_MOMENT
            )
        else:
            self.show_moment(AskedMoment(), "the first moment that was recorded")

    @on(Chart.MarkClicked)
    def _mark_clicked(self, message: Chart.MarkClicked) -> None:
        message.stop()
        if message.mark.time is not None:
            self.show_moment(AskedMoment(at=message.mark.time), message.mark.text)

    def action_ask_moment(self) -> None:
        def answered(asked: AskedMoment | None) -> None:
            if asked is not None:
                self.show_moment(asked)

        self.app.push_screen(MomentScreen(self.newest), answered)

    def return_to_now(self) -> None:
        """Show the present again."""
        self._play(0)
        self.workers.cancel_group(self, "past")
        self._past_at = None
        if self.present is not None:
            self.show_frame(self.present)

    # -- reading -----------------------------------------------------------------------------------

    @work(thread=True, exclusive=True, group="past")
    def _read(self, asked: AskedMoment, present: Frame, *, playing: bool) -> None:
        """Read the frame of a moment. A later call cancels this one."""
        worker = get_current_worker()
        try:
            with self._lock:
                if worker.is_cancelled:
                    return
                if self._frames is None:
                    # Imported here: most people look at the present.
                    from ltui.app.live.past_frames import PastFrames

                    self._frames = PastFrames(self.run_dir, self._requests)
                at = self._frames.time_of(asked, present)
                frame = self._frames.frame(at, present, playing=playing)
        except Exception as error:  # noqa: BLE001 - the thread's top: it becomes a message
            call_screen(self, self._failed, error)
        else:
            call_screen(self, self._arrived, frame, playing)

    def _arrived(self, frame: Frame, playing: bool) -> None:
        self._is_reading = False
        if frame.moment is None or self._past_at is None:
            return
        at = frame.moment.at
        self._past_at = max(self._past_at, at) if playing else at
        moment = replace(frame.moment, about=self._about, speed=self._speed, newest=self.newest)
        self.show_frame(replace(frame, moment=moment))

    def _failed(self, error: Exception) -> None:
        self._is_reading = False
        self._say(error)
        self.return_to_now()

    def _say(self, error: Exception) -> None:
        self.notify(" ".join(error_lines(error)), severity="warning", timeout=8, markup=False)

    # -- playing -----------------------------------------------------------------------------------

    def action_play(self) -> None:
        """Let the shown moment move on, or hold it."""
        if not self.is_refused("play"):
            self._play(0 if self.plays else SPEEDS[0])

    def change_speed(self, by: int) -> bool:
        """Play faster or slower. Return False if nothing plays."""
        if self.plays:
            place = SPEEDS.index(self._speed) + by
            self._play(SPEEDS[min(len(SPEEDS) - 1, max(0, place))])
        return self.plays

    def _play(self, speed: int) -> None:
        if self._timer is not None and not speed:
            self._timer.stop()
            self._timer = None
        if speed and self._timer is None:
            self._ticked_at = time.monotonic()
            self._timer = self.set_interval(TICK_S, self._tick)
        if speed != self._speed:
            self._speed = speed
            self.speed_changed(speed)

    def speed_changed(self, speed: int) -> None:
        """Show the speed, 0 if nothing plays."""
        raise NotImplementedError

    def _tick(self) -> None:
        now = time.monotonic()
        passed_s, self._ticked_at = now - self._ticked_at, now
        if self._past_at is None or self.present is None:
            return
        self._past_at += passed_s * self._speed
        self._about = ""
        if self._past_at >= self.newest:
            if self.present.snapshot.state in LIVE:
                self.return_to_now()
                self.notify("This is the present.", timeout=2)
                return
            self._past_at = self.newest
            self._play(0)
        if not self._is_reading:
            self._is_reading = True
            self._read(AskedMoment(at=self._past_at), self.present, playing=self.plays)


ABOUT = """\
03:12, 03:12:40     the last such time; 2026-11-26T03:12 with its date
-12m, -90s, -2h     before now, or before the end of a run that has ended
step 4000           when this step was trained"""


KEYS = "⏎ show   f1 help   esc cancel"


class MomentScreen(Dialog[AskedMoment]):
    """Return a moment of the past, or None."""

    BINDINGS: ClassVar[list[BindingType]] = bindings(
        "moment",
        """
        escape | dismiss | cancel | Stay where you are
        """,
    )

    def __init__(self, newest: float) -> None:
        super().__init__()
        self._newest = newest

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static("Show the run as it was at:", markup=False)
            yield Static(Text(ABOUT, "dim"), classes="about")
            yield Input(placeholder="moment", id="moment", compact=True)
            yield Static(Text(KEYS), id="answers")

    def on_mount(self) -> None:
        self.query_one(".dialog").border_title = "a moment of the past"
        self.query_one(Input).focus()

    @on(Input.Submitted)
    def _apply(self, event: Input.Submitted) -> None:
        event.stop()
        try:
            self.dismiss(parse_moment(event.value, self._newest) if event.value.strip() else None)
        except ProblemError as error:
            text = Text(f"{error.problems[0]}\n", "bold red").append(KEYS, "not bold default")
            self.query_one("#answers", Static).update(text)
