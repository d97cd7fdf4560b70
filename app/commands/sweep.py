"""``ltui sweep``: start sweeps, show them and change them."""

from __future__ import annotations

import sys
from argparse import Namespace

from msgspec import convert

from ltui.app.command_output import EXIT_DONE, print_envelope
from ltui.app.launch import sweep_changes
from ltui.app.presentation.sweep_view import (
    best_trials,
    importance_text,
    plan_text,
    summary,
    trial_columns,
    trial_reasons,
    trial_texts,
)
from ltui.training.json_codec import to_json
from ltui.training.store.run_directory import ltui_home
from ltui.training.sweep.decide import RETRIED
from ltui.training.sweep.record import State, Sweep
from ltui.widgets.formats import NA

_SWEEP = (Sweep, {"state": State, "runs": [str]})
DATA = {
    "list_all": [_SWEEP],
    **dict.fromkeys(("start", "show", "stop", "resume", "retry", "append", "narrow"), _SWEEP),
}
"""What ``--json`` prints; see ``for_programs``."""


def start(options: Namespace) -> int:
    """Run ``ltui sweep PRESET|FILE`` and ``ltui sweep -- COMMAND``."""
    # Imported here: the other commands start nothing.
    from ltui.app.actions.start_sweep import SweepOptions, start_sweep

    sweep = start_sweep(convert(options, SweepOptions, from_attributes=True))
    return _print(
        options,
        sweep,
        f"Sweep {sweep.name}: {plan_text(sweep)}",
        f"  To watch: ltui sweep show {sweep.name}    To stop: ltui sweep stop {sweep.name}",
    )


def list_all(options: Namespace) -> int:
    """Run ``ltui sweep list``."""
    found, damaged = sweep_changes.sweeps()
    for error in damaged:
        sys.stderr.write(f"{error}\n")
    if options.json:
        print_envelope([_document(sweep) for sweep in found], truncated=bool(damaged))
    else:
        for sweep in found:
            print(f"{sweep.name}: {summary(sweep)}")
        if not found and not damaged:
            print("No sweeps yet. Start one with: ltui sweep quickstart --set 'KEY=choice(a, b)'")
    return EXIT_DONE


def _document(sweep: Sweep) -> dict[str, object]:
    runs = [sweep.run_id(trial) for trial in sweep.tried]
    return {**to_json(sweep), "state": sweep.state(), "runs": runs}


def _print(options: Namespace, sweep: Sweep, *lines: str) -> int:
    """Print what became of a sweep."""
    if options.json:
        print_envelope(_document(sweep), [f"ltui sweep show {sweep.name} --json"])
    else:
        print("\n".join(lines))
    return EXIT_DONE


def show(options: Namespace) -> int:
    """Run ``ltui sweep show SWEEP``."""
    if not options.json and not options.plain and sys.stdin.isatty() and sys.stdout.isatty():
        # Imported here, as below: a program asks for JSON.
        from ltui.app.open_dashboard import run_dashboard
        from ltui.training.sweep.sweep_files import find_sweep

        home = ltui_home(to_write=False)
        return run_dashboard(home, sweep=find_sweep(home, options.sweep))
    sweep = sweep_changes.sweep(options.sweep)
    if options.json:
        return _print(options, sweep)
    from ltui.app.presentation.run_report import columns
    from ltui.training.sweep.importance import importance

    titles, (best, _) = trial_columns(sweep), best_trials(sweep)
    rows = [[title.upper() for title in titles.values()]]
    for trial in sweep.tried:
        texts = trial_texts(sweep, trial, is_best=trial in best)
        rows.append([texts.get(key, NA) for key in titles])
    lines = [f"{sweep.name}: {summary(sweep)}", plan_text(sweep), *columns(rows)]
    print("\n".join([*lines, *trial_reasons(sweep)]))
    print(importance_text(sweep, *importance(sweep)))
    return EXIT_DONE


def stop(options: Namespace) -> int:
    """Run ``ltui sweep stop SWEEP``."""
    sweep = sweep_changes.stop_sweep(options.sweep)
    live = sum(trial.state != State.PLANNED for trial in sweep.lives)
    return _print(
        options,
        sweep,
        f"{sweep.name} stops; {live} live or queued trials stop with a checkpoint.",
        f"  To resume: ltui sweep resume {sweep.name}",
    )


def resume(options: Namespace) -> int:
    """Run ``ltui sweep resume SWEEP``: go on, with the stopped trials first."""
    sweep = sweep_changes.resume_sweep(options.sweep)
    line = f"{sweep.name} goes on; {_planned(sweep)} stopped trials are resumed."
    return _print(options, sweep, line)


def _planned(sweep: Sweep) -> int:
    return sum(trial.state == State.PLANNED for trial in sweep.tried)


def retry(options: Namespace) -> int:
    """Run ``ltui sweep retry SWEEP [TRIAL...]``: run ended trials again that did not finish."""
    kinds = [kind for kind in RETRIED if getattr(options, kind)]
    before = _planned(sweep_changes.sweep(options.sweep))
    sweep = sweep_changes.retry_trials(options.sweep, options.numbers, kinds)
    count = max(0, _planned(sweep) - before)
    lines = [
        f"{count} {'trial' if count == 1 else 'trials'} of {sweep.name} "
        f"{'runs' if count == 1 else 'run'} again."
    ]
    left = [trial for trial in sweep.tried if trial.state in RETRIED["all"]]
    if left and not options.numbers:
        listed = ", ".join(f"{trial.number} ({trial.state})" for trial in left)
        lines.append(f"  Not run again: {listed}. Name them, or give --all.")
    return _print(options, sweep, *lines)


def append(options: Namespace) -> int:
    """Run ``ltui sweep append SWEEP``: more trials, or more values."""
    return _print_space(
        options, sweep_changes.append_to_sweep(options.sweep, options.set, options.trials)
    )


def narrow(options: Namespace) -> int:
    """Run ``ltui sweep narrow SWEEP``: leave values out of later trials."""
    return _print_space(options, sweep_changes.narrow_sweep(options.sweep, options.set))


def _print_space(options: Namespace, sweep: Sweep) -> int:
    return _print(options, sweep, f"{sweep.name}: {plan_text(sweep)}")
