"""The arguments of ``ltui compare``. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ltui.app.commands.data_arguments import add_flag, add_json_option

_EPILOG = """\
For each metric: its final and its best value and the step of that, and the value
at the last step, epoch or time that all these runs have reached. The step of an
old value is written ~4128 if the history holds only a window of steps around it.
Settings are those of the configuration, or the options of a command (`--lr 0.1`
is the setting lr). KEY is a name, the end of a name, or a pattern.

--json prints, among others, `parameters`: for each run the settings that differ,
and the final and the best value of each metric, for example for pandas.

examples:
  ltui compare brave-owl calm-fox
  ltui compare 'sweep-*' --metric val/acc --by epoch
  ltui compare 'seed-*' --band ci95
  ltui compare --filter 'group:sweep val/acc>0.9'
  ltui compare 'sweep-*' --group-by lr --json
  ltui compare brave-owl calm-fox --watch
"""


def add_compare(add: Callable[..., Any], run_help: str) -> None:
    """Add ``ltui compare``."""
    compare = add("compare", "compare:compare", "compare runs: metrics, speed, settings", _EPILOG)
    compare.add_argument(
        "runs",
        metavar="RUN",
        nargs="*",
        help=f"{run_help}; a pattern such as 'sweep-*' is every run whose id matches",
    )
    compare.add_argument(
        "--filter",
        metavar="EXPR",
        help="also the runs that match, such as 'group:sweep'; see `ltui runs --help`",
    )
    compare.add_argument(
        "--metric",
        metavar="GLOB",
        action="append",
        default=[],
        help="compare the metrics whose name matches, such as 'val/*'; can be repeated (default: "
        "the loss and the results of validation)",
    )
    compare.add_argument(
        "--by",
        choices=("step", "epoch", "time"),
        default="step",
        help="compare curves at the same step, epoch or training time (default: step)",
    )
    compare.add_argument(
        "--group-by",
        metavar="KEY",
        action="append",
        default=[],
        help="runs with the same value of a setting are a group; can be repeated (default: runs "
        "that differ only in the seed)",
    )
    compare.add_argument(
        "--ignore",
        metavar="KEY",
        action="append",
        default=[],
        help="runs that differ only in the seed and in this setting are a group; can be repeated",
    )
    compare.add_argument(
        "--band",
        choices=("minmax", "std", "stderr", "ci95"),
        default="minmax",
        help="the band of a group: minimum to maximum (default), standard deviation, standard "
        "error, or 95 %% interval of the mean",
    )
    add_flag(compare, "--watch", "open the comparison in the dashboard; live runs go on growing")
    add_json_option(compare)
