"""The arguments of ``ltui runs`` and ``prune``, which share filters. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ltui.app.commands.data_arguments import add_flag, add_json_option

AddCommand = Callable[..., Any]


def add_runs_command(add: AddCommand) -> None:
    """Add ``ltui runs``."""
    runs = add("runs", "runs:list_all", "list the runs, newest first", _RUNS_EPILOG)
    runs.add_argument(
        "--filter", metavar="EXPR", default="", help="only the runs that match, see below"
    )
    runs.add_argument(
        "--sort",
        metavar="FIELD",
        help="sort by a field, metric or setting, lowest first; --sort=-FIELD: highest first",
    )
    runs.add_argument(
        "--columns", metavar="FIELD,...", help="print the id and these fields, metrics or settings"
    )
    add_json_option(runs)


def add_prune_command(add: AddCommand) -> None:
    """Add ``ltui prune``."""
    prune = add("prune", "prune:prune", "delete the ended runs that match a filter", _PRUNE_EPILOG)
    prune.add_argument("--filter", metavar="EXPR", help="which runs, see below")
    add_flag(prune, "--now", "free the space at once; the runs can't be restored")
    add_flag(prune, "--bin", "remove the deleted runs in the bin for ever")
    add_flag(prune, "--dry-run", "only print what would be deleted, with its disk use")


def add_restore_command(add: AddCommand) -> None:
    """Add ``ltui restore``."""
    restore = add("restore", "prune:restore", "bring a deleted run back, or list the bin")
    restore.add_argument(
        "run", metavar="RUN", nargs="?", help="id, name or a prefix; without it, list the bin"
    )


FILTER_HELP = """\
filter:
  fox quickstart            both words occur in name, program, state, tags, group or note
  tag:base* name:/^a.*9$/   a field matches a pattern (* ? [abc]), a part or an expression
  state=failed epoch>=3     = != < <= > >= on fields and metrics
  val/loss<0.2 lr.max<1e-3  a metric's last value; .min and .max are its extremes
  started>3d ago            a time; also 2026-11-20 or 2026-11-20T18:30
  elapsed<1h30m size>5GB    durations and sizes
  config.lr<1e-3 config.optimizer:adam*  settings, by their name or its end
  has:note not has:star     the run has a value
  (a or b) and not c        terms next to each other are joined by `and`

fields: id name program state tag group note detail star running created started ended
elapsed step epoch attempt ranks exit progress speed metric size; config.NAME is a
setting or hyperparameter; other names are metrics.
"""

_RUNS_EPILOG = f"""\
{FILTER_HELP}
examples:
  ltui runs --filter 'tag:baseline val/loss<0.2' --sort val/loss
  ltui runs --filter 'state=failed started>2d ago' --columns program,step,detail
  ltui runs --columns size,tag --sort=-size --json
  ltui runs --columns config.lr,val/acc --sort=-val/acc
"""

_PRUNE_EPILOG = f"""\
Live runs, runs with a star and runs that cannot be read are never deleted. A deleted
run is in the bin for a week, from which `ltui restore RUN` brings it back.

{FILTER_HELP}
examples:
  ltui prune --filter 'state=failed ended<30d ago' --dry-run
  ltui prune --filter 'size>10GB not has:tag' --now
  ltui prune --bin
"""
