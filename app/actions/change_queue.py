"""Change the run queue: hold, release, move, edit, retry and remove runs.

Every run is checked before the first one is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from msgspec import Struct

from ltui.app.actions.check_arguments import check, texts
from ltui.app.launch import queue_changes
from ltui.app.launch.queue_changes import QueueView, dependencies, place_words, queue_view
from ltui.training.lifecycle.run_queue import retry, take_out
from ltui.training.problem import Problem, ProblemError
from ltui.training.store.find_run import find_run, find_runs
from ltui.training.store.queue_files import check_changeable, read_entry
from ltui.training.store.run_directory import RunDir, ltui_home

NOTHING = "none"
"""Value of ``after`` and ``not_before`` that removes what was asked for."""


class QueueChange(Struct, frozen=True, kw_only=True):
    """What a change of the run queue has led to for one run."""

    run: str
    done: bool
    detail: str
    """What the run waits for now, or why it was not changed."""


def queue() -> QueueView:
    """Return the order of the run queue and what each entry waits for."""
    return queue_view(ltui_home(to_write=False))


def hold_queued(runs: str | Sequence[str]) -> tuple[QueueChange, ...]:
    """Keep queued runs from starting.

    This and the functions below raise ``ProblemError`` if one of the runs cannot be changed; then
    none is.
    """
    return _change(runs, partial(queue_changes.hold, held=True))


def release_queued(runs: str | Sequence[str]) -> tuple[QueueChange, ...]:
    """Let held runs start again."""
    return _change(runs, partial(queue_changes.hold, held=False))


def retry_queued(runs: str | Sequence[str]) -> tuple[QueueChange, ...]:
    """Let runs wait again that could not be started or were removed."""
    return _change(runs, retry, must_wait=False)


def remove_queued(runs: str | Sequence[str]) -> tuple[QueueChange, ...]:
    """Take runs out of the run queue."""
    gone = "it is not in the run queue any more"
    return _change(runs, take_out, must_wait=False, may_be_damaged=True, otherwise=gone)


def move_queued(run: str, to: int) -> QueueChange:
    """Move a run to a place of the order, from 1; it takes the priority of that place."""
    check("to", to, int)
    return _change(run, partial(queue_changes.move, number=to))[0]


def edit_queued(
    run: str,
    settings: Sequence[str] = (),
    *,
    priority: int | None = None,
    after: str | Sequence[str] = (),
    not_before: str | None = None,
    slots: int | None = None,
) -> QueueChange:
    """Change a queued run: its configuration by ``settings`` (``KEY=VALUE``), or when it starts.

    ``after`` has ``RUN`` or ``RUN:ok``, ``not_before`` is ``18:30`` or ``+2h``; ``none`` removes
    what was asked for.
    """
    home, settings = ltui_home(), texts("settings", settings, may_be_empty=True)
    names = texts("after", after, may_be_empty=True)
    for where, value, kind in (
        ("priority", priority, int), ("not_before", not_before, str), ("slots", slots, int)
    ):  # fmt: skip
        check(where, value, kind, type(None))
    run_dir = find_run(home, run)
    ids = () if names == [NOTHING] else dependencies(home, names) if names else None
    at: float | None = None
    if not_before is not None:
        at = 0.0 if not_before == NOTHING else queue_changes.start_time(not_before)
    if not settings and (priority, ids, at, slots) == (None, None, None, None):
        what = "there is nothing to change."
        raise ProblemError.of(where=f"ltui queue edit {run}", what=what)
    change = partial(
        queue_changes.edit,
        overrides=settings, priority=priority, after=ids, not_before=at, slots=slots,
    )  # fmt: skip
    return _change(run_dir.id, change)[0]


def _change(
    runs: str | Sequence[str],
    change: Callable[[RunDir], None],
    *,
    must_wait: bool = True,
    may_be_damaged: bool = False,
    otherwise: str = "it has just been started",
) -> tuple[QueueChange, ...]:
    """Change each run, after a check of all of them. ``otherwise`` is the detail of a run that is
    not in the order afterwards."""
    home = ltui_home()
    found = list(dict.fromkeys(find_runs(home, texts("runs", runs))))
    problems: list[Problem] = []
    for run_dir in found:
        try:
            _check(run_dir, must_wait=must_wait, may_be_damaged=may_be_damaged)
        except ProblemError as error:
            problems += error.problems
    if problems:
        raise ProblemError(*problems)
    failed: dict[str, str] = {}
    for run_dir in found:
        # What another command does meanwhile can still prevent it.
        try:
            change(run_dir)
        except ProblemError as error:
            problems += error.problems
            failed[run_dir.id] = "; ".join(problem.what for problem in error.problems)
    if len(failed) == len(found):
        raise ProblemError(*problems)
    view = queue_view(home)
    places = {place.run: place_words(view, place) for place in view.places}
    return tuple(
        QueueChange(
            run=run_dir.id,
            done=run_dir.id not in failed,
            detail=failed.get(run_dir.id) or places.get(run_dir.id, otherwise),
        )
        for run_dir in found
    )


def _check(run_dir: RunDir, *, must_wait: bool, may_be_damaged: bool) -> None:
    try:
        entry = read_entry(run_dir)
    except ProblemError:
        if not may_be_damaged:
            raise
        return
    check_changeable(run_dir, entry)
    if must_wait and entry is not None:
        queue_changes.check_waits(run_dir, entry)
