"""What is wrong and what every rank does, in words: verdicts with evidence, phases with ages."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from ltui.app.frame import Frame
from ltui.app.screens.keys import bindings
from ltui.app.translate import RANK_TONES, notes
from ltui.training.run.snapshot import RankSnapshot, Verdict
from ltui.widgets import formats
from ltui.widgets.sanitise import clean_line, clean_name
from ltui.widgets.shapes import Tone

_LOUD = {Tone.BAD: "bold"}


class DiagnoseScreen(ModalScreen[None]):
    """Reads the run screen's frame once a second while it is open."""

    BINDINGS: ClassVar[list[BindingType]] = bindings(
        "diagnose",
        """
        escape,q,d | close | close | Back
        """,
    )

    def __init__(self, frame_of: Callable[[], Frame | None]) -> None:
        super().__init__()
        self._frame_of = frame_of
        self._shown: Text | None = None

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog -wide"):
            yield Static(id="diagnosis", markup=False)
            yield Static(Text("esc back"), id="answers")

    def on_mount(self) -> None:
        self._look()
        self.set_interval(1.0, self._look)

    def _look(self) -> None:
        frame = self._frame_of()
        text = Text("nothing is known of the run yet") if frame is None else diagnosis(frame)
        if text != self._shown:
            self._shown = text
            self.query_one("#diagnosis", Static).update(text)

    def action_close(self) -> None:
        self.dismiss(None)


def diagnosis(frame: Frame) -> Text:
    """The page; plain text but for weight."""
    out = Text()
    run = frame.snapshot
    standing = [v for v in run.verdicts if v.ended is None]
    if not standing:
        out.append("nothing stands against this run\n", "bold")
    for verdict in standing:
        _verdict(out, verdict, frame.now)
    for note in notes(frame):
        out.append(f"{note}\n")
    out.append("\nranks\n", "bold")
    for rank in run.ranks:
        _rank(out, rank)
    over = [v for v in run.verdicts if v.ended is not None]
    if over:
        out.append("\nover\n", "bold")
    for verdict in over[-8:]:
        lasted = (
            formats.age((verdict.ended or 0.0) - (verdict.began or 0.0)) if verdict.began else ""
        )
        out.append(f"{verdict.level} {lasted}: {clean_line(verdict.cause)}\n")
    return out


def _verdict(out: Text, verdict: Verdict, now: float) -> None:
    since = f" since {formats.age(now - verdict.began)}" if verdict.began is not None else ""
    out.append(f"{verdict.level.upper()}{since}: {clean_line(verdict.cause)}\n", "bold")
    if verdict.place:
        out.append(f"  where: {clean_line(verdict.place)}\n")
    if verdict.waiting:
        out.append(f"  waiting for it: rank {formats.ranks(verdict.waiting)}\n")
    for name, value in verdict.evidence.items():
        out.append(f"  {clean_name(str(name))}: {clean_line(str(value))}\n")
    if verdict.confidence < 1:
        out.append(f"  confidence: {formats.percent(verdict.confidence)}\n")
    if verdict.remedy:
        out.append(f"  to do: {clean_line(verdict.remedy)}\n")


def _rank(out: Text, rank: RankSnapshot) -> None:
    style = _LOUD.get(RANK_TONES[rank.state], "")
    step = formats.count(rank.global_step)
    phase = clean_name(rank.phase or "phase unknown")
    age = formats.age(rank.age_s)
    line = f"r{rank.rank}  {rank.state.value:<8}  step {step:>8}  {phase:<12} {age:>8}"
    note = f"  {clean_line(rank.note)}" if rank.note else ""
    out.append(f"{line}{note}\n", style)
