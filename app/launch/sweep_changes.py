"""Read a sweep and change it: stop, resume, run trials again, more or fewer values.

A change is one of the record. The dispatcher of the run queue does what follows from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace

from ltui.training.lifecycle.dispatcher_process import ensure_dispatcher, wake_dispatcher
from ltui.training.problem import ProblemError
from ltui.training.store.run_directory import ltui_home
from ltui.training.sweep.decide import RETRIED, named_trial, resumed, retry
from ltui.training.sweep.record import IN_FLIGHT, State, Sweep, Trial
from ltui.training.sweep.space import Dimension, check_grid, narrowed, parse_dimension, widened
from ltui.training.sweep.sweep_files import SweepDir, active_sweeps, find_sweep, list_sweeps


def sweep(name: str) -> Sweep:
    """Return the sweep of this name, or the ``last`` one. Raises ``ProblemError``."""
    home = ltui_home(to_write=False)
    revive(home)
    return find_sweep(home, name).read()


def sweeps() -> tuple[list[Sweep], list[ProblemError]]:
    """Return all sweeps, the one that was started last first, and why others cannot be read."""
    home = ltui_home(to_write=False)
    revive(home)
    read: list[Sweep] = []
    damaged: list[ProblemError] = []
    for sweep_dir in list_sweeps(home):
        try:
            read.append(sweep_dir.read())
        except ProblemError as error:
            damaged.append(error)
    return read, damaged


def revive(home: Path) -> None:
    """Start the dispatcher if it was killed while a sweep goes on."""
    if active_sweeps(home):
        ensure_dispatcher(home)


def stop_sweep(name: str) -> Sweep:
    """Stop a sweep; its trials stop with a checkpoint. Raises ``ProblemError``."""

    def change(sweep: Sweep) -> Sweep:
        if sweep.state() == State.FINISHED:
            raise ProblemError.of(where=sweep.name, what="it has finished.")
        return replace(sweep, stopped=True)

    return _change(name, change)


def resume_sweep(name: str) -> Sweep:
    """Let a stopped sweep go on, with its stopped trials first. Raises ``ProblemError``."""
    return _change(name, resumed)


def retry_trials(name: str, trials: Sequence[str] = (), kinds: Sequence[str] = ()) -> Sweep:
    """Run trials again: those of these numbers, cells or runs, else those of these ``kinds``, which
    are ``failed`` (the default), ``missing``, ``stopped`` and ``all``. Raises ``ProblemError``."""
    if unknown := [kind for kind in kinds if kind not in RETRIED]:
        remedy = f"Choose from: {', '.join(RETRIED)}."
        raise ProblemError.of(where=unknown[0], what="there are no such trials.", remedy=remedy)
    states = {state for kind in kinds or ["failed"] for state in RETRIED[kind]}
    runs = ltui_home() / "runs"

    def change(sweep: Sweep) -> Sweep:
        if trials or State.MISSING in states:
            sweep = _with_missing(runs, sweep)
        named = {named_trial(sweep, text).number for text in trials}
        return retry(sweep, lambda t: t.number in named if trials else t.state in states)

    return _change(name, change)


def _with_missing(runs: Path, sweep: Sweep) -> Sweep:
    """Return the sweep with the trials marked whose runs were deleted."""

    def marked(trial: Trial) -> Trial:
        gone = trial.state not in IN_FLIGHT and not (runs / sweep.run_id(trial)).exists()
        return replace(trial, state=State.MISSING) if gone else trial

    return replace(sweep, tried=tuple(map(marked, sweep.tried)))


def append_to_sweep(name: str, settings: Sequence[str] = (), trials: int | None = None) -> Sweep:
    """Try more combinations, or more values of keys. Raises ``ProblemError``."""
    if (not settings and trials is None) or (trials is not None and trials < 1):
        raise ProblemError.of(
            where=f"ltui sweep append {name}",
            what="nothing is to be appended.",
            remedy="Give --trials N, or --set 'KEY=choice(a,b)'.",
        )

    def change(sweep: Sweep) -> Sweep:
        space = _space(sweep, settings, widened)
        if sweep.sampler == "grid":
            check_grid(space)
        limit = sweep.trials
        if trials is not None and limit is not None:
            # Of a grid without a limit, all combinations are tried anyway.
            limit = max(limit, sweep.suggested) + trials
        return replace(sweep, space=space, trials=limit, exhausted=False, stopped=False)

    return _change(name, change)


def narrow_sweep(name: str, settings: Sequence[str]) -> Sweep:
    """Leave values out of later trials. Raises ``ProblemError``."""
    if not settings:
        raise ProblemError.of(where=f"ltui sweep narrow {name}", what="no values are named.")
    return _change(name, lambda sweep: replace(sweep, space=_space(sweep, settings, narrowed)))


def _space(
    sweep: Sweep, settings: Sequence[str], change: Callable[[Dimension, Dimension], Dimension]
) -> tuple[Dimension, ...]:
    space = {dimension.key: dimension for dimension in sweep.space}
    for text in settings:
        new = parse_dimension(text)
        if new.key not in space:
            raise ProblemError.of(
                where=f"--set {text}",
                what="the sweep has no such key.",
                remedy=f"Its keys are {', '.join(space)}.",
            )
        space[new.key] = change(space[new.key], new)
    return tuple(space.values())


def _change(name: str, change: Callable[[Sweep], Sweep]) -> Sweep:
    return change_sweep(find_sweep(ltui_home(), name), change)


def change_sweep(sweep_dir: SweepDir, change: Callable[[Sweep], Sweep]) -> Sweep:
    """Change a record and let the dispatcher know. Raises ``ProblemError``."""
    changed = sweep_dir.change(change)
    wake_dispatcher(sweep_dir.home)
    return changed
