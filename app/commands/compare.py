"""``ltui compare``: what differs between runs, and how their metrics compare."""

from __future__ import annotations

import shutil
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ltui.app.actions import run_queries
from ltui.app.actions.run_queries import compared_runs
from ltui.app.command_output import EXIT_DONE, EXIT_FAILED, print_envelope
from ltui.app.commands.dashboard import require_terminal
from ltui.app.compare.comparison import Grouping, check_grouping
from ltui.app.compare.comparison_report import comparison_json, report_lines
from ltui.app.compare.read_run import read_runs
from ltui.app.open_dashboard import open_app
from ltui.training.lifecycle.run_status import current_snapshot
from ltui.training.problem import ProblemError
from ltui.training.state.run_snapshot import RunState
from ltui.training.store.run_directory import RunDir, ltui_home

if TYPE_CHECKING:
    from ltui.app.textual_app import LtuiApp


_RUN = {"id": str, "name": str, "state": RunState, "state_word": str, "step": int | None,
        "epoch": int | None, "time_s": float | None, "samples_per_s": float | None,
        "peak_memory_bytes": float | None, "goodput": float | None,
        "time_us": dict[str, int], "metrics": dict[str, dict[str, Any]]}  # fmt: skip
_PARAMETERS = {"run": str, "settings": dict[str, float | str | None], "final": dict[str, float],
               "best": dict[str, float | None]}  # fmt: skip
_GROUP = {"label": str, "runs": list[str], "metrics": dict[str, dict[str, Any]]}
_COMPARISON = {"by": str, "band": str, "metrics": list[str], "runs": [_RUN],
               "settings": dict[str, dict[str, str | None]], "equal_settings": dict[str, str],
               "differing_variables": list[str],
               "parameters": [_PARAMETERS], "curves": dict[str, dict[str, Any]],
               "groups": [_GROUP]}  # fmt: skip
DATA = {"compare": _COMPARISON}


def compare(options: Namespace) -> int:
    """Run ``ltui compare RUN RUN...``."""
    if options.group_by and options.ignore:
        raise ProblemError.of(
            where="--ignore",
            what="it cannot be used with --group-by, which names the only settings that count.",
            remedy="Give one of the two.",
        )
    grouping = Grouping(by=tuple(options.group_by), ignored=tuple(options.ignore))
    if options.watch:
        return _watch(options, compared_runs(options.runs, options.filter), grouping)
    result = run_queries.compare(
        options.runs,
        filter_text=options.filter,
        metrics=options.metric,
        axis=options.by,
        band=options.band,
        grouping=grouping,
    )
    if options.json:
        error = ProblemError(*result.problems) if result.problems else None
        print_envelope(comparison_json(result.comparison), error=error)
    else:
        print("\n".join(report_lines(result.comparison, shutil.get_terminal_size().columns)))
    for problem in result.problems:
        sys.stderr.write(f"{problem}\n")
    return EXIT_FAILED if result.problems else EXIT_DONE


def _watch(options: Namespace, run_dirs: Sequence[RunDir], grouping: Grouping) -> int:
    """Open the comparison in the dashboard."""
    require_terminal("ltui compare --watch", "Without --watch the comparison is printed.")
    # A key or a metric that does not exist is an error before the dashboard opens.
    read = read_runs(run_dirs, options.metric, current_snapshot)
    check_grouping(grouping, [run.settings for run in read.runs])

    def make() -> LtuiApp:
        # Local: importing Textual takes half a second, which the errors above need not wait for.
        from ltui.app.compare.comparison_charts import ViewSettings
        from ltui.app.presentation.metric_charts import ChartSettings
        from ltui.app.screens.compare import CompareScreen
        from ltui.app.textual_app import LtuiApp

        settings = ViewSettings(
            chart=ChartSettings(axis=options.by),
            band=options.band,
            grouped=bool(options.group_by or options.ignore),
        )

        def first() -> CompareScreen:
            return CompareScreen(
                run_dirs, globs=options.metric, settings=settings, grouping=grouping
            )

        return LtuiApp(ltui_home(to_write=False), first=first)

    return open_app(make)
