"""Arguments of the commands that write and read the metrics of runs in other formats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ltui.app.commands.data_arguments import add_flag
from ltui.app.runs.export_formats import EXPORT_FORMATS


def add_export(add: Callable[..., Any], run_help: str) -> None:
    """Add ``ltui export``."""
    export = add("export", "export:export", "write the metrics of runs to a file", _EXPORT_EPILOG)
    export.add_argument("run", metavar="RUN", nargs="+", help=run_help)
    export.add_argument(
        "--to",
        "--format",
        choices=tuple(EXPORT_FORMATS),
        default="csv",
        help="the format (default: csv); parquet and tensorboard need the extra packages "
        "ltui-train[parquet] and ltui-train[tensorboard]",
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
A value that was logged as NaN is empty in CSV, null in JSON and NaN in Parquet;
an infinite one is null in JSON. The table of several runs begins with a column run.

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
needs the extra package ltui-train[tensorboard]). Every folder with such a file
becomes an ended run with the tag `imported`, which can be shown, compared and
exported like any other. The folder itself is not changed.

A metrics.csv holds no times, so the curves of such a run have none.

examples:
  ltui import lightning_logs
  ltui import lightning_logs/version_3 --name baseline
"""
