"""``ltui sweep``: start sweeps, show them and change them.

A command changes the record of a sweep; the dispatcher of the run queue does what follows.
"""

from __future__ import annotations

import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from ltui.app.command_output import EXIT_DONE, print_json
from ltui.training.json_codec import to_json
from ltui.training.lifecycle.dispatcher_process import ensure_dispatcher, wake_dispatcher
from ltui.training.problem import ProblemError
from ltui.training.store.run_directory import RunDir, ltui_home, new_run_id
from ltui.training.sweep.decide import RETRIED, named_trial, resumed
from ltui.training.sweep.decide import retry as retry_trials
from ltui.training.sweep.record import IN_FLIGHT, State, Sweep, Trial
from ltui.training.sweep.space import Dimension, narrowed, widened
from ltui.training.sweep.sweep_files import (
    SweepDir,
    active_sweeps,
    check_name,
    create_sweep,
    find_sweep,
    list_sweeps,
)


def start(options: Namespace) -> int:
    """Run ``ltui sweep PRESET|FILE`` and ``ltui sweep -- COMMAND``."""
    # Imported here, as below: the other commands start nothing.
    from ltui.app.commands.launch import command_spec
    from ltui.app.launch.sweep_request import preset_template, read_request, sweep_of
    from ltui.training.lifecycle.freeze_code import freeze_code

    home = ltui_home()
    request = read_request(vars(options))
    name = request.name or new_run_id(home, None)[1]
    check_name(home, name)

    sweep = sweep_of(request, name, time.time())
    if request.command:
        merged = {**vars(options), "command": request.command, "python": request.python}
        template = command_spec(Namespace(**merged), home)
    else:
        sweep, template = preset_template(request, sweep)
    template = template.with_changes(freeze=options.freeze is not False)

    def freeze(made: SweepDir) -> None:
        if template.freeze:
            freeze_code(RunDir(made.path), template)

    create_sweep(home, sweep, template, os.environ, freeze)
    wake_dispatcher(home)
    count = "" if sweep.trials is None else f"{sweep.trials} trials, "
    print(f"Sweep {name}: {count}{sweep.sampler}, {sweep.at_once} at once.")
    print(f"  To watch: ltui sweep show {name}    To stop: ltui sweep stop {name}")
    return EXIT_DONE


def list_all(options: Namespace) -> int:
    """Run ``ltui sweep list``."""
    from ltui.app.presentation.sweep_view import summary

    home = ltui_home(to_write=False)
    _revive(home)
    sweeps = []
    for sweep_dir in list_sweeps(home):
        try:
            sweeps.append(sweep_dir.read())
        except ProblemError as error:
            sys.stderr.write(f"{error}\n")
    if options.json:
        print_json([_document(sweep) for sweep in sweeps])
    elif not sweeps:
        print("No sweeps yet. Start one with: ltui sweep quickstart --set 'KEY=choice(a, b)'")
    else:
        print("\n".join(f"{sweep.name}: {summary(sweep)}" for sweep in sweeps))
    return EXIT_DONE


def _revive(home: Path) -> None:
    """Start the dispatcher if it was killed while a sweep goes on."""
    if active_sweeps(home):
        ensure_dispatcher(home)


def _document(sweep: Sweep) -> dict[str, object]:
    runs = {trial.number: sweep.run_id(trial) for trial in sweep.tried}
    document = to_json(sweep)
    for trial in document["tried"]:
        trial["run"] = runs[trial["number"]]
    return {**document, "state": sweep.state()}


def show(options: Namespace) -> int:
    """Run ``ltui sweep show SWEEP``: the screen on a terminal, else a table."""
    home = ltui_home(to_write=False)
    sweep_dir = find_sweep(home, options.sweep)
    sweep = sweep_dir.read()
    _revive(home)
    if options.json:
        print_json(_document(sweep))
        return EXIT_DONE
    if not options.plain and sys.stdin.isatty() and sys.stdout.isatty():
        from ltui.app.open_dashboard import run_dashboard

        return run_dashboard(home, sweep=sweep_dir)
    from ltui.app.presentation.run_report import columns
    from ltui.app.presentation.sweep_view import (
        best_trial,
        importance_text,
        summary,
        trial_columns,
        trial_texts,
    )
    from ltui.training.sweep.importance import importance

    titles, best = trial_columns(sweep), best_trial(sweep)
    rows = [[title.upper() for title in titles.values()]]
    for trial in sweep.tried:
        texts = trial_texts(sweep, trial, is_best=trial is best)
        rows.append([texts[key] for key in titles])
    print("\n".join([f"{sweep.name}: {summary(sweep)}", *columns(rows)]))
    print(importance_text(sweep, *importance(sweep_dir, sweep)))
    return EXIT_DONE


def _changed(options: Namespace, change: Callable[[Sweep], Sweep]) -> tuple[Sweep, Sweep]:
    """Change the record of the sweep and wake the dispatcher. Return it before and after."""
    home = ltui_home()
    sweep_dir = find_sweep(home, options.sweep)
    before: list[Sweep] = []

    def noted(sweep: Sweep) -> Sweep:
        before.append(sweep)
        return change(sweep)

    after = sweep_dir.change(noted)
    wake_dispatcher(home)
    return before[0], after


def stop(options: Namespace) -> int:
    """Run ``ltui sweep stop SWEEP``."""
    _, sweep = _changed(options, lambda sweep: replace(sweep, stopped=True))
    live = sum(trial.state != State.PLANNED for trial in sweep.lives)
    print(f"{sweep.name} stops; {live} live or queued trials stop with a checkpoint.")
    print(f"  To resume: ltui sweep resume {sweep.name}")
    return EXIT_DONE


def resume(options: Namespace) -> int:
    """Run ``ltui sweep resume SWEEP``: go on, with the stopped trials first."""
    before, sweep = _changed(options, resumed)
    print(f"{sweep.name} goes on; {_planned(before, sweep)} stopped trials are resumed.")
    return EXIT_DONE


def _planned(before: Sweep, after: Sweep) -> int:
    pairs = zip(before.tried, after.tried, strict=False)
    return sum(old.state != State.PLANNED and new.state == State.PLANNED for old, new in pairs)


def retry(options: Namespace) -> int:
    """Run ``ltui sweep retry SWEEP [TRIAL...]``: run ended trials again that did not finish."""
    chosen = [kind for kind in RETRIED if getattr(options, kind)]
    states = {state for kind in chosen or ["failed"] for state in RETRIED[kind]}
    runs = ltui_home() / "runs"

    def change(sweep: Sweep) -> Sweep:
        if options.numbers or State.MISSING in states:
            sweep = _with_missing(runs, sweep)
        named = {named_trial(sweep, text).number for text in options.numbers}
        return retry_trials(
            sweep, lambda t: t.number in named if options.numbers else t.state in states
        )

    before, sweep = _changed(options, change)
    count = _planned(before, sweep)
    print(
        f"{count} {'trial' if count == 1 else 'trials'} of {sweep.name} "
        f"{'runs' if count == 1 else 'run'} again."
    )
    left = [trial for trial in sweep.tried if trial.state in RETRIED["all"]]
    if left:
        listed = ", ".join(f"{trial.number} ({trial.state})" for trial in left)
        print(f"  Not run again: {listed}. Name them, or give --all.")
    return EXIT_DONE


def _with_missing(runs: Path, sweep: Sweep) -> Sweep:
    """Return the sweep with the trials marked whose runs were deleted."""

    def marked(trial: Trial) -> Trial:
        gone = trial.state not in IN_FLIGHT and not (runs / sweep.run_id(trial)).exists()
        return replace(trial, state=State.MISSING) if gone else trial

    return replace(sweep, tried=tuple(map(marked, sweep.tried)))


def append(options: Namespace) -> int:
    """Run ``ltui sweep append SWEEP``: more trials, or more values."""
    if not options.set and options.trials is None:
        raise ProblemError.of(
            where="ltui sweep append",
            what="nothing is to be appended.",
            remedy="Give --trials N, or --set 'KEY=choice(a,b)'.",
        )

    def change(sweep: Sweep) -> Sweep:
        space = _space(sweep, options.set, widened)
        trials = sweep.trials
        if options.trials is not None:
            # Of a grid without a limit, all combinations are tried anyway.
            trials = None if trials is None else max(trials, sweep.suggested) + options.trials
        return replace(sweep, space=space, trials=trials, exhausted=False, stopped=False)

    _, sweep = _changed(options, change)
    return _print_space(sweep)


def narrow(options: Namespace) -> int:
    """Run ``ltui sweep narrow SWEEP``: leave values out of later trials."""

    def change(sweep: Sweep) -> Sweep:
        return replace(sweep, space=_space(sweep, options.set, narrowed))

    _, sweep = _changed(options, change)
    return _print_space(sweep)


def _print_space(sweep: Sweep) -> int:
    limit = "" if sweep.trials is None else f", {sweep.trials} trials"
    print(f"{sweep.name}: {'; '.join(f'{one.key}={one}' for one in sweep.space)}{limit}")
    return EXIT_DONE


def _space(
    sweep: Sweep, settings: list[str], change: Callable[[Dimension, Dimension], Dimension]
) -> tuple[Dimension, ...]:
    from ltui.training.sweep.space import parse_dimension

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
