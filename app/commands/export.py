"""``ltui export``: write a run's metrics as one table, CSV or JSON."""

from __future__ import annotations

import difflib
import fnmatch
import sys
from argparse import Namespace
from collections.abc import Sequence

from ltui.app.commands.output_file import output
from ltui.app.exit_codes import EXIT_DONE
from ltui.training.problem import Problem, ProblemError
from ltui.training.state.metric_name_patterns import TRAIN_LOSS
from ltui.training.store.export_file import WindowedPart, write_csv, write_json
from ltui.training.store.history_reader import STEP_SERIES, RunStore
from ltui.training.store.run_directory import find_run, ltui_home
from ltui.widgets.sanitise import clean_line

STEP_LOSS = "step/loss"
"""Name under which every step's own loss is exported if a loss is also logged as a metric."""


def export(options: Namespace) -> int:
    """Run ``ltui export RUN``."""
    store = RunStore(find_run(ltui_home(to_write=False), options.run))
    names = _select_metrics(store, options.metric)
    write = write_json if options.format == "json" else write_csv
    thinned = WindowedPart()
    with output(options.output) as stream:
        write(thinned.watch(store.export(names)), stream)
    if (sentence := thinned.sentence()) is not None:
        sys.stderr.write(f"{clean_line(sentence, 1000)}\n")
    return EXIT_DONE


def _select_metrics(store: RunStore, globs: Sequence[str]) -> list[str]:
    names = store.metric_names()
    if TRAIN_LOSS in store.logged_names():
        # The loss of the step records exists as well, under another name than the logged loss.
        names.append(STEP_LOSS)
    if not globs:
        return names
    names += [name for name in STEP_SERIES if name not in names]
    problems = [_unknown_metric(glob, names) for glob in globs if not fnmatch.filter(names, glob)]
    if problems:
        raise ProblemError(*problems)
    return [name for name in names if any(fnmatch.fnmatchcase(name, glob) for glob in globs)]


def _unknown_metric(glob: str, names: Sequence[str]) -> Problem:
    close_matches = difflib.get_close_matches(glob, names, n=1)
    logged = (
        f"Logged metrics: {', '.join(names)}." if names else "It has not logged any metric yet."
    )
    return Problem(
        where=f"--metric {glob}",
        what="the run has no such metric.",
        remedy=f"Did you mean `{close_matches[0]}`?" if close_matches else logged,
    )
