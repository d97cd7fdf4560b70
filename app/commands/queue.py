"""``ltui queue``: the runs that wait to be started, and what a person changes about them."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence

from ltui.app.actions import change_queue
from ltui.app.actions.change_queue import QueueChange
from ltui.app.command_output import EXIT_DONE, EXIT_FAILED, print_envelope
from ltui.app.launch.queue_changes import place_words, queue_view
from ltui.app.launch.queue_dispatcher import SLOTS, queue_settings
from ltui.app.presentation.run_report import columns
from ltui.app.settings import read_user_config
from ltui.training.json_codec import to_json
from ltui.training.state.run_queue import QueueEntry
from ltui.training.store.run_directory import RunDir, ltui_home
from ltui.widgets.sanitise import clean_line, clean_name

_PLACE = {"run": str, "starts": bool, "reason": str, "expected_at": float | None}
DATA = {
    "list_all": {"entries": [(QueueEntry, _PLACE)], "damaged": dict[str, str]},
    **{name: {"changes": [QueueChange]} for name in ("move", "hold", "edit", "retry", "remove")},
}
"""What ``--json`` prints; see ``for_programs``."""


def report_queued(run_dir: RunDir) -> int:
    """Print what a run waits for that was just queued."""
    run = clean_name(run_dir.id)
    view = queue_view(run_dir.home)
    places = (place_words(view, place) for place in view.places if place.run == run_dir.id)
    print(f"{run}: {clean_line(next(places, 'it has just been started'))}")
    print(f"  To watch it: ltui attach {run}    To take it out: ltui stop {run}")
    return EXIT_DONE


def list_all(options: Namespace) -> int:
    """Run ``ltui queue``."""
    view = change_queue.queue()
    _print_faulty_settings()
    if options.json:
        entries = [to_json(view.entries[place.run]) | to_json(place) for place in view.places]
        print_envelope({"entries": entries, "damaged": view.damaged})
        return EXIT_DONE
    rows = [("", "RUN", "PRIORITY", "WAITS FOR")]
    for number, place in enumerate(view.places, 1):
        priority = str(view.entries[place.run].priority)
        rows.append(
            (str(number), clean_name(place.run), priority, clean_line(place_words(view, place)))
        )
    rows += [("-", clean_name(run), "", clean_line(why)) for run, why in view.damaged.items()]
    print("\n".join(columns(rows)) if len(rows) > 1 else "The run queue is empty.")
    return EXIT_DONE


def _print_faulty_settings() -> None:
    """Say so if mistakes in the configuration file are why the slots are the default."""
    config = read_user_config()
    if config.problems and config.origin(SLOTS) is None:
        slots, _ = queue_settings(ltui_home(to_write=False))
        lines = [*map(str, config.problems), f"Until that is corrected, {SLOTS} is {slots}."]
        print(*map(clean_line, lines), sep="\n", file=sys.stderr)


def move(options: Namespace) -> int:
    """Run ``ltui queue move RUN --to N``."""
    if options.to is None:
        return _report(options, [change_queue.edit_queued(options.run, priority=options.priority)])
    return _report(options, [change_queue.move_queued(options.run, options.to)])


def hold(options: Namespace) -> int:
    """Run ``ltui queue hold RUN...`` or ``ltui queue release RUN...``."""
    change = change_queue.hold_queued if options.held else change_queue.release_queued
    return _report(options, change(options.runs))


def edit(options: Namespace) -> int:
    """Run ``ltui queue edit RUN``."""
    change = change_queue.edit_queued(
        options.run,
        options.overrides,
        priority=options.priority,
        after=options.after,
        not_before=options.not_before,
        slots=options.slots,
    )
    return _report(options, [change])


def retry(options: Namespace) -> int:
    """Run ``ltui queue retry RUN...``."""
    return _report(options, change_queue.retry_queued(options.runs))


def remove(options: Namespace) -> int:
    """Run ``ltui queue remove RUN...``."""
    return _report(options, change_queue.remove_queued(options.runs))


def _report(options: Namespace, changes: Sequence[QueueChange]) -> int:
    """Print what became of each run. Return 1 if a part of them could not be changed."""
    if options.json:
        print_envelope({"changes": changes})
    else:
        for one in changes:
            print(f"{clean_name(one.run)}: {clean_line(one.detail)}")
    return EXIT_DONE if all(one.done for one in changes) else EXIT_FAILED
