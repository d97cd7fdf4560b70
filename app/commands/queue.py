"""``ltui queue``: the runs that wait to be started, and what a person changes about them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from functools import partial

from ltui.app.command_output import EXIT_DONE, print_envelope
from ltui.app.launch import queue_changes
from ltui.app.launch.queue_changes import dependencies, place_words, queue_view, start_time
from ltui.app.presentation.run_report import columns
from ltui.training.json_codec import to_json
from ltui.training.lifecycle.run_queue import retry as retry_run
from ltui.training.lifecycle.run_queue import take_out
from ltui.training.problem import ProblemError
from ltui.training.state.run_queue import QueueEntry
from ltui.training.store.find_run import find_run, find_runs
from ltui.training.store.run_directory import RunDir, ltui_home
from ltui.widgets.sanitise import clean_line, clean_name

_PLACE = {"run": str, "starts": bool, "reason": str, "expected_at": float | None}
DATA = {"list_all": {"entries": [(QueueEntry, _PLACE)], "damaged": dict[str, str]}}
"""What ``--json`` prints; see ``for_programs``."""
NOTHING = "none"
"""Value of ``--after`` and ``--not-before`` that removes what was asked for."""


def report_queued(run_dir: RunDir) -> int:
    """Print what a run waits for that was just queued."""
    _print_place(run_dir)
    run = clean_name(run_dir.id)
    print(f"  To watch it: ltui attach {run}    To take it out: ltui stop {run}")
    return EXIT_DONE


def list_all(options: Namespace) -> int:
    """Run ``ltui queue``."""
    view = queue_view(ltui_home(to_write=False))
    if options.json:
        entries = [to_json(view.entries[place.run]) | to_json(place) for place in view.places]
        print_envelope({"entries": entries, "damaged": view.damaged})
        return EXIT_DONE
    rows = [("", "RUN", "PRIORITY", "WAITS FOR")]
    for number, place in enumerate(view.places, 1):
        priority = str(view.entries[place.run].priority)
        rows.append((str(number), clean_name(place.run), priority, clean_line(place_words(place))))
    rows += [("-", clean_name(run), "", clean_line(why)) for run, why in view.damaged.items()]
    print("\n".join(columns(rows)) if len(rows) > 1 else "The run queue is empty.")
    return EXIT_DONE


def move(options: Namespace) -> int:
    """Run ``ltui queue move RUN --to N``."""

    def change(run_dir: RunDir) -> None:
        if options.to is None:
            queue_changes.edit(run_dir, priority=options.priority)
        else:
            queue_changes.move(run_dir, options.to)

    return _change([find_run(ltui_home(), options.run)], change)


def hold(options: Namespace) -> int:
    """Run ``ltui queue hold RUN...`` or ``ltui queue release RUN...``."""
    change = partial(queue_changes.hold, held=options.held)
    return _change(find_runs(ltui_home(), options.runs), change)


def edit(options: Namespace) -> int:
    """Run ``ltui queue edit RUN``."""
    home = ltui_home()
    run_dir = find_run(home, options.run)
    after = None
    if options.after:
        after = () if options.after == [NOTHING] else dependencies(home, options.after)
    not_before = None
    if options.not_before is not None:
        not_before = 0.0 if options.not_before == NOTHING else start_time(options.not_before)
    if not options.overrides and (after, not_before, options.slots) == (None, None, None):
        what = "there is nothing to change."
        raise ProblemError.of(where=f"ltui queue edit {options.run}", what=what)

    def change(run_dir: RunDir) -> None:
        queue_changes.edit(
            run_dir, options.overrides, after=after, not_before=not_before, slots=options.slots
        )

    return _change([run_dir], change)


def retry(options: Namespace) -> int:
    """Run ``ltui queue retry RUN...``."""
    return _change(find_runs(ltui_home(), options.runs), retry_run)


def remove(options: Namespace) -> int:
    """Run ``ltui queue remove RUN...``."""
    for run_dir in find_runs(ltui_home(), options.runs):
        take_out(run_dir)
        print(f"{clean_name(run_dir.id)} is not in the run queue any more.")
    return EXIT_DONE


def _change(runs: list[RunDir], change: Callable[[RunDir], None]) -> int:
    for run_dir in dict.fromkeys(runs):
        change(run_dir)
        _print_place(run_dir)
    return EXIT_DONE


def _print_place(run_dir: RunDir) -> None:
    places = {place.run: place for place in queue_view(run_dir.home).places}
    place = places.get(run_dir.id)
    words = "it has just been started" if place is None else place_words(place)
    print(f"{clean_name(run_dir.id)}: {clean_line(words)}")
