"""The diagnosis of a run: problem and remedy, collectives, stacks and processes.

The headline follows the run's frames. Evidence is requested when the screen is opened, when a
verdict begins or ends, and on demand. Collecting it takes seconds, in a worker thread.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from io import StringIO
from pathlib import Path
from typing import ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll

from ltui.app.diagnosis.diagnosis_view import DiagnosisContext, diagnosis_view_model
from ltui.app.diagnosis.request_diagnosis import DiagnosisResult, from_snapshot, request_diagnosis
from ltui.app.keys.footer import KeyFooter, KeyHint
from ltui.app.live.frame import Frame
from ltui.app.panels.panel import Panel, TabBar
from ltui.app.presentation.run_view import note_lines
from ltui.app.screens.dialog import call_screen
from ltui.app.screens.panel_screen import PanelScreen
from ltui.training.problem import ProblemError
from ltui.training.shared.defaults import SAMPLE_S
from ltui.training.state.run_snapshot import LIVE, RunSnapshot
from ltui.training.store.run_directory import RunDir
from ltui.widgets import diagnosis_lines as parts
from ltui.widgets.diagnosis_lines import file_name, report
from ltui.widgets.line_sheet import LineSheet
from ltui.widgets.make_bindings import bindings
from ltui.widgets.tone import Tone
from ltui.widgets.view_models import Cell, DiagnosisViewModel

REFRESH_S = 1.0
"""Seconds between two updates of the screen."""
MIN_REQUEST_INTERVAL_S = 10.0
"""Minimum seconds between two automatic requests for evidence."""
MAX_HEADLINE_LINES = 5
TITLES = {
    "verdict": "problem and what to do",
    "collectives": "collectives",
    "stacks": "stacks",
    "processes": "processes",
}
HINTS = (
    KeyHint("y", "copy", "screen.copy", keep=True),
    KeyHint("w", "save a file", "screen.write", keep=True),
    KeyHint("a", "refresh", "screen.again", keep=True),
    KeyHint("f", "sample", "screen.sample", keep=True),
    KeyHint("q", "back", "screen.dismiss", keep=True),
    KeyHint("1-4", "panel", "screen.panel('verdict')"),
    KeyHint("z", "maximise", "screen.zoom"),
    KeyHint("?", "help", "app.help", keep=True),
    KeyHint("tab", "next panel", "app.focus_next"),
)

Find = Callable[..., DiagnosisResult]
NOTHING = [(Cell(text="Nothing was recorded", tone=Tone.DIM),)]
"""What an empty panel shows."""


class DiagnoseScreen(PanelScreen):
    """The diagnosis screen of one run."""

    PANELS: ClassVar[Mapping[str, str]] = {**TITLES, "verdict": "what to do"}
    MIN_HEIGHT: ClassVar[int] = 34
    ABOUT = "The diagnosis does not disturb the ranks. ≠ marks where one rank differs."
    BINDINGS: ClassVar[list[BindingType]] = bindings(
        "diagnose",
        """
        [Diagnosis]
        a      | again                | refresh     | Refresh: ask the ranks again
        f      | sample               | sample      | Sample a slow and a normal rank for 10 s
        y      | copy                 | copy        | Copy the report; save it with the run too
        w      | write                | save a file | Save the report in the current folder
        [Screen]
        1      | panel('verdict')     | problem     | Go to the problem and what to do
        2      | panel('collectives') | collectives | Go to the collectives
        3      | panel('stacks')      | stacks      | Go to the stacks
        4      | panel('processes')   | processes   | Go to the processes
        z      | zoom                 | maximise    | Maximise the panel in focus, or restore all
        escape | cancel               | cancel      | Restore a maximised panel, or go back
        q,d    | dismiss              | close       | Go back to the run
        """,
    )

    def __init__(
        self,
        run_dir: RunDir,
        frame_of: Callable[[], Frame | None],
        *,
        find: Find = request_diagnosis,
        folder: Path | None = None,
    ) -> None:
        """``frame_of`` returns the newest frame of the run.

        ``folder`` is the folder for reports, by default the current one.
        """
        super().__init__()
        self.run_dir, self._frame_of, self._find = run_dir, frame_of, find
        self._folder = folder or Path()
        self.result: DiagnosisResult | None = None
        self._requesting = False
        self._requested_at = 0.0
        self._requested_for: object = None
        self._problem: str | None = None
        self._shown: DiagnosisViewModel | None = None

    def compose(self) -> ComposeResult:
        yield LineSheet(id="headline")
        yield TabBar(id="tabs")
        with Vertical(id="body"):
            panels = list(enumerate(TITLES.items(), 1))
            for row in (panels[:2], panels[2:]):
                with Horizontal(classes="panels"):
                    for number, (name, title) in row:
                        with (
                            Panel(number, title, id=name),
                            VerticalScroll(id=f"{name}-scroll"),
                        ):
                            yield LineSheet(id=f"{name}-sheet")
        yield KeyFooter(HINTS, id="keys")

    def on_mount(self) -> None:
        self.action_panel(self.chosen)
        self.action_again()
        self._update()
        self.set_interval(REFRESH_S, self._update)

    # -- drawing -----------------------------------------------------------------------------------

    def _update(self) -> None:
        frame = self._frame_of()
        if frame is not None and self._requested_for not in (None, _evidence_key(frame.snapshot)):
            self._request_again(frame.snapshot)
        view_model = self.view_model()
        if view_model is None or view_model == self._shown:
            return
        self._shown = view_model
        self.query_one("#headline", LineSheet).show(
            lambda w: parts.headline_lines(view_model, w)[:MAX_HEADLINE_LINES]
        )
        for name, draw in (
            ("verdict", parts.verdicts_lines),
            ("collectives", parts.collectives_lines),
            ("stacks", parts.output_and_stack_lines),
            ("processes", parts.processes_lines),
        ):
            self.query_one(f"#{name}-sheet", LineSheet).show(
                lambda width, draw=draw: draw(view_model, width) or NOTHING  # type: ignore[misc]
            )

    def view_model(self, *, full_paths: bool = False) -> DiagnosisViewModel | None:
        """Return the view model of the collected evidence and the present verdicts."""
        frame = self._frame_of()
        if frame is None:
            return None
        run = frame.snapshot
        diagnosis = from_snapshot(run)
        earlier = tuple(c.verdict for c in frame.resolved_verdicts)
        if self.result is not None:
            diagnosis, earlier = self.result.diagnosis, self.result.earlier
            if run.state in LIVE:
                diagnosis = from_snapshot(run, base=diagnosis)
        note_texts = (
            note_lines(frame) if self._problem is None else (*note_lines(frame), self._problem)
        )
        context = DiagnosisContext(
            snapshot=run,
            # In whole seconds, so that the view model changes only once a second.
            now=float(int(frame.now)),
            earlier=earlier,
            notes=note_texts,
            full_paths=full_paths,
            asking=self._requesting and self.result is None,
        )
        return diagnosis_view_model(diagnosis, context)

    # -- evidence ----------------------------------------------------------------------------------

    def action_sample(self) -> None:
        frame = self._frame_of()
        if frame is None or frame.snapshot.state not in LIVE:
            self.notify("Only ranks that train can be sampled", timeout=3)
        elif not self._requesting:
            text = f"Sampling the stacks of two ranks for {SAMPLE_S:.0f} s ..."
            self.notify(text, timeout=SAMPLE_S)
            self.action_again(sample=True)

    def action_again(self, *, sample: bool = False) -> None:
        if self._requesting:
            return
        frame = self._frame_of()
        self._requesting, self._requested_at = True, time.monotonic()
        self._requested_for = _evidence_key(frame.snapshot) if frame is not None else None
        self._request(sample)

    def _request_again(self, run: RunSnapshot) -> None:
        if time.monotonic() - self._requested_at >= MIN_REQUEST_INTERVAL_S or run.state not in LIVE:
            self.action_again()

    @work(thread=True, exclusive=True, group="diagnose")
    def _request(self, sample: bool) -> None:
        result, problem = None, None
        try:
            result = self._find(self.run_dir, sample=sample)
        except ProblemError as error:
            problem = "; ".join(str(p) for p in error.problems)
        except Exception as error:  # noqa: BLE001 - the thread's top: it becomes a message
            problem = f"the diagnosis failed: {type(error).__name__}: {error}"
        call_screen(self, self._use_result, result, problem)

    def _use_result(self, result: DiagnosisResult | None, problem: str | None) -> None:
        self._requesting, self._problem = False, problem
        self.result = result or self.result
        self._update()

    # -- the report --------------------------------------------------------------------------------

    def _report(self) -> str | None:
        view_model = self.view_model(full_paths=True)
        return None if view_model is None else report(view_model)

    def action_copy(self) -> None:
        text = self._report()
        if text is None:
            return
        self.app.copy_to_clipboard(text)
        saved = self._save(self.run_dir.path / "diagnosis.txt", text)
        # A terminal may ignore the copy without an error, so the report is saved as well.
        self.notify(f"Copied to the clipboard, if your terminal allows it. {saved}", markup=False)

    def action_write(self) -> None:
        text = self._report()
        if text is None:
            return
        stamp = time.strftime("%H%M%S")
        name = f"{file_name(self.run_dir.id)}-{stamp}.txt"
        if self.app.is_web:
            self.app.deliver_text(StringIO(text), save_filename=name)
            return
        saved = self._save(self._folder / name, text)
        self.notify(saved, markup=False)

    def _save(self, path: Path, text: str) -> str:
        """Save the report; return a sentence with its path, or with the reason for the failure."""
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            return f"Not saved: {path} can't be written ({error.strerror})"
        return f"Saved: {path.absolute()}"


def _evidence_key(run: RunSnapshot) -> tuple[object, ...]:
    """Return a key that changes when a verdict begins or ends, or when the run ends.

    Evidence that was collected for another key is outdated.
    """
    standing = ((v.kind, v.culprits) for v in run.verdicts if v.ended is None)
    return run.attempt, run.state in LIVE, *sorted(standing)
