"""The arguments of ``ltui runs`` and ``prune``, which share filters. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ltui.app.commands.data_arguments import add_flag, add_json_option
from ltui.app.runs.export_formats import EXPORT_FORMATS

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


def add_export(add: Callable[..., Any], run_help: str) -> None:
    """Add ``ltui export``."""
    export = add("export", "export:export", "write the metrics of runs to a file", _EXPORT_EPILOG)
    export.add_argument("run", metavar="RUN", nargs="+", help=run_help)
    export.add_argument(
        "--to",
        "--format",
        choices=tuple(EXPORT_FORMATS),
        default="csv",
        help="the format (default: csv); parquet and tensorboard need the packages "
        "pyarrow and tensorboard",
    )
    export.add_argument(
        "--metric",
        metavar="GLOB",
        action="append",
        default=[],
        help="only metrics whose name matches, such as 'val/*'; can be repeated",
    )
    add_flag(
        export,
        "--follow",
        "with --to tensorboard: write the values of a live run as they arrive, until it ends",
    )
    export.add_argument(
        "-o",
        dest="output",
        metavar="FILE",
        help="write to a file, which appears when it is complete; a folder for tensorboard",
    )
    add_flag(export, "--force", "replace the file if it exists")


def add_import(add: Callable[..., Any]) -> None:
    """Add ``ltui import``."""
    import_runs = add(
        "import", "import_runs:import_all", "make runs of other tools' metrics", _IMPORT_EPILOG
    )
    import_runs.add_argument(
        "path",
        metavar="FOLDER",
        nargs="+",
        help="the folder of a logger, or one that contains such folders",
    )
    import_runs.add_argument("--name", help="a name for the runs (default: the name of the folder)")


_EXPORT_EPILOG = """\
--to csv, json and parquet write one table, a row for each metric, step and rank:

  metric,step,epoch,time,rank,value,first_step,min,max,count

The time is in unix seconds; epochs count from 1, as everywhere in ltui. A step
that was repeated after a resume appears once.
A value that was logged as NaN is NaN in CSV and Parquet; in JSON, which has no such
numbers, it is "NaN", and an infinite one "Infinity" or "-Infinity". The table of
several runs begins with a column run.

--metric also takes the measurements of each step (step/*) and, for all ranks
together, throughput/samples_per_s, whose rank is empty.

--to tensorboard writes event files: FOLDER/RUN for rank 0, FOLDER/RUN/rank-1 and so
on for the others. They hold numbers of 32 bits, as all scalars of TensorBoard do.

The export holds every step that is stored. Of a long run (more than 200,000
steps) ltui stores the oldest steps as windows of 64 steps or more. Such a row
holds the mean of a window as its value, at its last step, and also first_step,
min, max and count; in all other rows count is 1 and these are empty. The range
of these steps is printed on standard error.

Without --metric, every logged metric and the loss are exported. The loss, the
learning rate, the time, the wait for data and the samples of each step are exported
with --metric 'step/*'; the parts of its time and its memory are shown, not exported.

examples:
  ltui export last -o run.csv
  ltui export last --metric 'train/*' --metric val/acc --to json
  ltui export brave-owl calm-fox --to parquet -o both.parquet
  ltui export brave-owl calm-fox --to tensorboard -o events
  ltui export last --to tensorboard -o events --follow
"""

_IMPORT_EPILOG = """\
Reads the metrics.csv of Lightning's CSVLogger, and TensorBoard event files (this
needs the package tensorboard). Every folder with such a file
becomes an ended run with the tag `imported`, which can be shown, compared and
exported like any other. The folder itself is not changed.

A metrics.csv holds no times, so the curves of such a run have none.

examples:
  ltui import lightning_logs
  ltui import lightning_logs/version_3 --name baseline
"""


def add_label_commands(add: AddCommand, run_help: str) -> None:
    """Add ``ltui rename``, ``tag``, ``group``, ``note`` and ``star``."""

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
    rename = add("rename", "labels:rename", "give a run another name", _LABEL_EPILOGS["rename"])
    rename.add_argument("runs", metavar="RUN", nargs=1, help=run_help)
    rename.add_argument("name", metavar="NAME", help="the name; '' restores that of the id")
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


_LABEL_EPILOGS = {
    "rename": """\
A name may have any characters. The id of the run stays, and both name it in commands.

examples:
  ltui rename brave-owl 'ResNet, rate 0.1 (best)'
  ltui rename brave-owl ''
""",
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
    restore = add("restore", "prune:restore", "bring deleted runs back, or list the bin")
    restore.add_argument(
        "runs", metavar="RUN", nargs="*", help="id, name or a prefix; without it, list the bin"
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
