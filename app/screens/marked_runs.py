"""The commands of the home screen for marked runs, or for the selected one without marks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from textual import work

from ltui.app.keys.footer import KeyFooter
from ltui.app.panels.launch_panel import READONLY
from ltui.app.screens.dialog import ConfirmScreen, CountQuestion, call_screen, do_after, show_error
from ltui.app.screens.home_runs import RunListScreen
from ltui.widgets.sanitise import clean_name

if TYPE_CHECKING:
    from ltui.app.runs.label_changes import Outcome
    from ltui.app.runs.run_entry import RunEntry
    from ltui.app.screens.run_questions import ExportChoice
    from ltui.training.state.run_labels import RunLabels
    from ltui.training.store.run_directory import RunDir

ACTIONS = frozenset({"stop", "resume", "delete", "star", "label", "export"})
"""Actions on marked runs, or on the selected one. All but the export change runs."""
MARK_TWO = "Mark at least two runs with Space, then press C to compare them."


class MarkedRunsScreen(RunListScreen):
    """A screen with keys that act on the marked runs."""

    def __init__(self, *, readonly: bool) -> None:
        super().__init__(readonly=readonly)
        self._undo_last: Callable[[], tuple[Outcome, str]] | None = None
        """Undoes the last change of labels or the last deletion. Returns how it went, and in words,
        with ``{}`` in place of the runs, what was undone."""

    def refusal_of(self, action: str) -> str | None:
        """Return the reason why ``action`` can't be done now; None if it can."""
        name = action.partition("(")[0]
        if name == "undo":
            if self.readonly:
                return READONLY
            nothing = "There is no change of labels and no deletion to undo."
            return None if self._undo_last is not None else nothing
        if name == "compare":
            return MARK_TWO if len(self.runs_panel.shown_marks()) < 2 else None
        if name not in ACTIONS or (name == "resume" and not self._several()):
            return super().refusal_of(action)
        # In a browser, a person who only watches would write files on another machine.
        if self.readonly and (name != "export" or self.app.is_web):
            return READONLY
        entries = self.runs_panel.targets()
        return _nothing_to(name, entries) if entries else "There is no run."

    def _several(self) -> bool:
        return len(self.runs_panel.shown_marks()) > 1

    def _targets_of(self, action: str) -> list[RunEntry]:
        """Return the runs that ``action`` is for; none, after the reason was shown, if it can't be
        done."""
        reason = self.refusal_of(action)
        if reason is not None:
            self.notify(reason, severity="warning", markup=False)
            return []
        return self.runs_panel.targets()

    def _named(self, entries: Sequence[RunEntry]) -> str:
        """Return the name of a single run; else how many there are."""
        return entries[0].name if len(entries) == 1 else f"{len(entries)} runs"

    def _hidden_marks(self) -> str:
        """Return a line about marked runs that the filter hides; empty if there are none."""
        hidden = len(self.runs_panel.marked) - len(self.runs_panel.shown_marks())
        if not hidden:
            return ""
        runs, verb = ("run is", "stays") if hidden == 1 else ("runs are", "stay")
        return f"\n{hidden} marked {runs} hidden by the filter and {verb}."

    def action_mark(self) -> None:
        self.runs_panel.toggle_mark()
        self._marks_changed()

    def action_mark_all(self) -> None:
        self.runs_panel.toggle_all_marks()
        self._marks_changed()

    def _marks_changed(self) -> None:
        # The footer omits keys that can't be used for the marked runs.
        self.query_one(KeyFooter).refresh()

    def action_compare(self) -> None:
        if entries := self._targets_of("compare"):
            # Imported here: the first frame compares nothing.
            from ltui.app.screens.compare import CompareScreen

            self.app.push_screen(CompareScreen([entry.run_dir for entry in entries]))

    # -- questions ---------------------------------------------------------------------------------

    def action_stop(self) -> None:
        entries = self._targets_of("stop")
        if not entries:
            return
        # Imported here: the first frame stops nothing.
        from ltui.app.live.run_requests import send_request
        from ltui.app.screens.run_commands import question_for_several, stop_question

        live = [entry for entry in entries if entry.live]
        snapshots = [entry.snapshot for entry in live if entry.snapshot is not None]
        one = len(snapshots) == 1
        text = (
            stop_question(snapshots[0])
            if one
            else question_for_several(self._named(live), snapshots)
        )
        it = "it" if one else "them"
        question = ConfirmScreen(text, yes=f"stop {it}", no=f"keep {it} running")
        saved = all(snapshot.saves_checkpoints for snapshot in snapshots)
        self._do_after(
            question,
            "Stopping {} after the current step, with a checkpoint" if saved else "Stopping {}",
            entries,
            lambda run_dir: send_request(run_dir, {"cmd": "stop"}),
        )

    def action_resume(self) -> None:
        if not self._several():
            super().action_resume()
            return
        entries = self._targets_of("resume")
        if not entries:
            return
        # Imported here: the first frame starts nothing.
        from ltui.app.screens.run_questions import MOST_NAMES, names_below, with_more
        from ltui.training.lifecycle.resume_run import resume

        resumable = [entry for entry in entries if _is_resumable(entry)]
        each, them = ("each ", "them") if len(resumable) > 1 else ("", "it")
        text = f"Resume {self._named(resumable)}, {each}from its last checkpoint?"
        text += names_below(resumable)
        text += f"\n{'They all start' if each else 'It starts'} now."
        others = [entry for entry in entries if not _is_resumable(entry)]
        if others:
            reasons = [f"{entry.name} ({_not_resumable(entry)})" for entry in others[:MOST_NAMES]]
            text += f"\nNot resumed: {with_more(reasons, len(others))}."
        question = ConfirmScreen(text, yes=f"resume {them}", no="start nothing")
        self._do_after(question, "Resumed {}", entries, resume)

    def action_delete(self) -> None:
        entries = self._targets_of("delete")
        if not entries:
            return
        # Imported here: the first frame deletes nothing.
        from ltui.app.screens.run_questions import delete_question
        from ltui.training.lifecycle.delete_runs import delete
        from ltui.training.problem import ProblemError

        ended = [entry for entry in entries if not entry.live]
        question = delete_question(ended)
        live = {entry.id for entry in entries if entry.live}
        if live:
            verb = "is" if len(live) == 1 else "are"
            question += f"\n{len(live)} of the marked runs {verb} live and kept."

        def delete_unless_live(run_dir: RunDir) -> None:
            # The question says that it is kept, even if it has ended since.
            if run_dir.id in live:
                raise ProblemError.of(where=run_dir.id, what="it is live.")
            delete(run_dir)

        if len(ended) == 1:
            confirm = ConfirmScreen(question, yes="delete it", no="keep it")
        else:
            confirm = CountQuestion(question, len(ended), yes="delete them", no="keep them")
        self._do_after(confirm, "Deleted {}", entries, delete_unless_live, self._can_restore)

    def _can_restore(self, outcome: Outcome) -> str:
        """Let an undo restore the runs that were deleted, and return how to do it."""
        # Imported here: the first frame deletes nothing.
        from ltui.app.screens.run_questions import restore_runs

        self._undo_last = partial(restore_runs, self.runs_panel.home, outcome.done)
        return f"u restores {'it' if len(outcome.done) == 1 else 'them'}; for a week: " + " ".join(
            ["ltui restore", *map(clean_name, outcome.done)]
        )

    def action_star(self) -> None:
        entries = self._targets_of("star")
        if not entries:
            return
        # Imported here: the first frame changes no run.
        from msgspec.structs import replace

        from ltui.app.screens.run_questions import current_labels

        star = not all(labels.star for labels in current_labels(entries))
        self._change_labels(self._unmarked(entries), lambda labels: replace(labels, star=star))

    def action_label(self, kind: str) -> None:
        entries = self._targets_of("label")
        if not entries:
            return
        if kind == "name" and len(entries) > 1:
            self.notify("Only one run can be named at a time.", severity="warning")
            return
        # Imported here: the first frame asks nothing.
        from ltui.app.screens.run_questions import LabelQuestion, current_labels

        def answered(change: Callable[[RunLabels], RunLabels] | None) -> None:
            if change is not None:
                self._change_labels(self._unmarked(entries), change, named=kind == "name")

        groups = {entry.labels.group for entry in self.runs_panel.lines.values()} - {""}
        used = groups if kind == "group" else set()
        question = LabelQuestion(kind, self._named(entries), current_labels(entries), used)
        self.app.push_screen(question, answered)

    @work(thread=True, group="marked runs")
    def _change_labels(
        self,
        run_dirs: Sequence[RunDir],
        change: Callable[[RunLabels], RunLabels],
        *,
        named: bool = False,
    ) -> None:
        # Imported here: the first frame changes no run.
        from ltui.app.runs.label_changes import change_several, what_changed
        from ltui.app.screens.run_questions import new_name_note, undo_labels

        outcome, changes = change_several(run_dirs, change)
        if changes:
            call_screen(self, self._remember, partial(undo_labels, changes))
        text = what_changed(changes)
        sentence = f"{text[:1].upper()}{text[1:]}." if changes else "Nothing changed."
        if outcome.failed:
            sentence = outcome.sentence("Changed the labels of {}")
        note = new_name_note(changes) if named else ""
        call_screen(self, self._report, f"{sentence} {note}".rstrip(), not outcome.failed)

    def _remember(self, undo: Callable[[], tuple[Outcome, str]]) -> None:
        self._undo_last = undo

    def action_undo(self) -> None:
        """Take back the last change of labels, or the last deletion."""
        if reason := self.refusal_of("undo"):
            self.notify(reason, severity="warning", markup=False)
            return
        undo, self._undo_last = self._undo_last, None
        if undo is not None:
            self._undo(undo)

    @work(thread=True, group="marked runs")
    def _undo(self, undo: Callable[[], tuple[Outcome, str]]) -> None:
        outcome, text = undo()
        call_screen(self, self._report, outcome.sentence(text), not outcome.failed)

    def action_export(self) -> None:
        entries = self._targets_of("export")
        if not entries:
            return
        # Imported here: the first frame exports nothing.
        from ltui.app.screens.run_questions import ExportQuestion

        def answered(choice: ExportChoice | None) -> None:
            if choice is not None:
                self._export(self._unmarked(entries), choice)

        name = entries[0].id if len(entries) == 1 else "runs"
        self.app.push_screen(ExportQuestion(self._named(entries), name, Path.cwd()), answered)

    # -- carrying out ------------------------------------------------------------------------------

    def _unmarked(self, entries: Sequence[RunEntry]) -> list[RunDir]:
        """Return the directories of runs, and remove their marks for the next action."""
        for entry in entries:
            self.runs_panel.marked.pop(entry.id, None)
        self.runs_panel.fill_list()
        self._marks_changed()
        return [entry.run_dir for entry in entries]

    def _do_after(
        self,
        question: ConfirmScreen,
        text: str,
        entries: Sequence[RunEntry],
        action: Callable[[RunDir], object],
        hint: Callable[[Outcome], str] = lambda _: "",
    ) -> None:
        """Ask, and carry out an action on each run if the answer is yes. ``hint`` returns what is
        shown after it if it worked for a run."""
        question.question += self._hidden_marks()
        do_after(self, question, lambda: self._do(text, self._unmarked(entries), action, hint))

    @work(thread=True, group="marked runs")
    def _do(
        self,
        text: str,
        run_dirs: Sequence[RunDir],
        action: Callable[[RunDir], object],
        hint: Callable[[Outcome], str],
    ) -> None:
        """Carry out an action on each run, and report in one sentence how it went.

        ``text`` has ``{}`` in place of the runs.
        """
        # Imported here: the first frame does nothing to a run.
        from ltui.app.runs.label_changes import for_each

        outcome = for_each(run_dirs, action)

        def done() -> None:
            after = hint(outcome) if outcome.done else ""
            self._report(f"{outcome.sentence(text)} {after}".rstrip(), not outcome.failed)

        call_screen(self, done)

    @work(thread=True, group="marked runs")
    def _export(self, run_dirs: Sequence[RunDir], choice: ExportChoice) -> None:
        # Imported here: the first frame exports nothing.
        from ltui.app.runs.export_runs import export_runs, select_metrics
        from ltui.app.runs.label_changes import for_each

        # A run that cannot be read must not keep the others from being exported.
        outcome = for_each(run_dirs, lambda run_dir: select_metrics({run_dir.id: run_dir}, ()))
        readable = {run_dir.id: run_dir for run_dir in run_dirs if run_dir.id in outcome.done}
        sentences: list[str] = []
        try:
            if readable:
                sentences = export_runs(readable, choice.form, choice.target)
        except Exception as error:  # noqa: BLE001 - the thread's top: it becomes a message
            show_error(self, "nothing was exported", error)
            return
        text = outcome.sentence(f"Exported {{}} to {choice.target}")
        call_screen(self, self._report, " ".join([text, *sentences]), not outcome.failed)

    def _report(self, message: str, complete: bool) -> None:
        if complete:
            self.notify(message, markup=False)
        else:
            # A sentence with reasons needs more time to be read.
            self.notify(message, severity="warning", timeout=15.0, markup=False)
        self.runs_panel.refresh_runs()


def _not_resumable(entry: RunEntry) -> str:
    if entry.summary is None:
        return "cannot be read"
    return "running" if entry.live else "no checkpoint"


def _is_resumable(entry: RunEntry) -> bool:
    return not entry.live and entry.summary is not None and entry.summary.resumable


def _nothing_to(action: str, entries: Sequence[RunEntry]) -> str | None:
    """Return why none of the runs can be stopped, resumed or deleted."""
    one = entries[0].name if len(entries) == 1 else None
    if action == "stop" and not any(entry.live for entry in entries):
        return f"{one or 'None of the marked runs'} is {'not ' if one else ''}running."
    if action == "delete" and all(entry.live for entry in entries):
        return f"{one or 'Every marked run'} is running. Stop it first."
    if action == "resume" and not any(_is_resumable(entry) for entry in entries):
        return "None of the marked runs has ended with a checkpoint to resume from."
    return None
