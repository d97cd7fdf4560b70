"""The arguments of the commands for the list of runs and for labels. Imports nothing heavy."""

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
        help="sort by a field or metric, lowest first; --sort=-FIELD: highest first",
    )
    runs.add_argument(
        "--columns", metavar="FIELD,...", help="print the id and these fields or metrics"
    )
    add_json_option(runs)


def add_prune_command(add: AddCommand) -> None:
    """Add ``ltui prune``."""
    prune = add("prune", "prune:prune", "delete the ended runs that match a filter", _PRUNE_EPILOG)
    prune.add_argument("--filter", metavar="EXPR", required=True, help="which runs, see below")
    add_flag(prune, "--dry-run", "only print what would be deleted, with its disk use")


def add_label_commands(add: AddCommand, run_help: str) -> None:
    """Add ``ltui tag``, ``group``, ``note`` and ``star``."""

    def labels(name: str, about: str) -> Any:
        command = add(name, f"labels:{name}", about, _LABEL_EPILOGS[name])
        command.add_argument("runs", metavar="RUN", nargs="+", help=run_help)
        return command

    tag = labels("tag", "print, add and remove the tags of runs")
    for option in ("--add", "--remove"):
        tag.add_argument(
            option,
            metavar="TAG",
            action="append",
            default=[],
            help=f"{option[2:]} a tag, or several with commas between them; can be repeated",
        )
    group = labels("group", "print or set the group of runs")
    change = group.add_mutually_exclusive_group()
    change.add_argument("--name", metavar="GROUP", help="put the runs into this group")
    add_flag(change, "--remove", "take the runs out of their group")
    note = add("note", "labels:note", "print or set the note of a run", _LABEL_EPILOGS["note"])
    note.add_argument("runs", metavar="RUN", nargs=1, help=run_help)
    note.add_argument("text", metavar="TEXT", nargs="?", help="the note; '' removes it")
    star = labels("star", "mark runs that are kept and easy to find")
    add_flag(star, "--remove", "take the star away")


def add_label_options(parser: Any) -> None:
    """Add ``--tag``, ``--group`` and ``--note`` to a command that launches a run."""
    parser.add_argument(
        "--tag",
        metavar="TAG",
        action="append",
        default=[],
        help="a tag for the run, or several with commas between them; can be repeated",
    )
    parser.add_argument("--group", metavar="GROUP", help="the group of the run")
    parser.add_argument("--note", metavar="TEXT", help="a note about the run, one line")


FILTER_HELP = """\
filter:
  fox quickstart            both words occur in name, preset, state, tags, group or note
  tag:base* name:/^a.*9$/   a field matches a pattern (* ? [abc]), a part or an expression
  state=failed epoch>=3     = != < <= > >= on fields and metrics
  val/loss<0.2 lr.max<1e-3  a metric's last value; .min and .max are its extremes
  started>3d ago            a time; also 2026-11-20 or 2026-11-20T18:30
  elapsed<1h30m size>5GB    durations and sizes
  has:note not has:star     the run has a value
  (a or b) and not c        terms next to each other are joined by `and`

fields: id name preset state tag group note detail star live created started ended
elapsed step epoch attempt ranks exit done speed size; other names are metrics.
"""

_RUNS_EPILOG = f"""\
{FILTER_HELP}
examples:
  ltui runs --filter 'tag:baseline val/loss<0.2' --sort val/loss
  ltui runs --filter 'state=failed started>2d ago' --columns preset,step,detail
  ltui runs --columns size,tag --sort=-size --json
"""

_PRUNE_EPILOG = f"""\
Live runs, runs with a star and runs that cannot be read are never deleted. A deleted
run is lost with its history, logs and checkpoints.

{FILTER_HELP}
examples:
  ltui prune --filter 'state=failed ended<30d ago' --dry-run
  ltui prune --filter 'size>10GB not has:tag'
"""

_LABEL_EPILOGS = {
    "tag": """\
A tag has at most 40 letters, digits and . : / = + @ - _ without blanks. Without an
option, the tags are printed.

examples:
  ltui tag last --add baseline,v2
  ltui tag brave-owl calm-fox --add keep --remove draft
""",
    "group": """\
A run is in one group or in none. Without an option, the group is printed.

examples:
  ltui group brave-owl calm-fox --name lr-sweep
  ltui group brave-owl --remove
""",
    "note": """\
examples:
  ltui note last 'the first one with the cleaned labels'
  ltui note last ''
""",
    "star": """\
`ltui prune` never deletes a run with a star.

examples:
  ltui star brave-owl
  ltui star brave-owl --remove
""",
}
