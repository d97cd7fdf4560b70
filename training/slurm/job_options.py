"""Options of a SLURM job as a user gives them, with their checks. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from msgspec import Struct

from ltui.training.problem import Problem, ProblemError

_TIME = re.compile(
    r"(?:(?P<days>\d+)-(?P<h>\d+)(?::(?P<m>\d+)(?::(?P<s>\d+))?)?"
    r"|(?P<hours>\d+):(?P<minutes>\d+):(?P<seconds>\d+)"
    r"|(?P<only_minutes>\d+)(?::(?P<only_seconds>\d+))?)"
)
_OPTION = re.compile(r"(?:--)?(?P<name>[a-z][a-z0-9-]*)(?:=(?P<value>.*))?", re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_OWN_OPTIONS = {
    "nodes": "--nodes",
    "gpus-per-node": "--gpus-per-node",
    "time": "--time",
    "partition": "--partition",
    "account": "--account",
    "cpus-per-task": "--cpus-per-node",
    "job-name": "--name",
}
"""Options of sbatch that ltui has an option of its own for."""
_FIXED_OPTIONS = frozenset(
    {
        "array", "ntasks", "ntasks-per-node", "open-mode", "parsable", "quiet", "wait", "wrap",
        "signal", "requeue", "no-requeue", "test-only", "export-file", "input", "help", "version",
    }
)  # fmt: skip
"""Options of sbatch that ltui sets itself, or that a run cannot have."""

DEFAULT_CHECKPOINT_S = 60.0
"""Seconds that a checkpoint is assumed to take while none has been measured."""
SIGNAL_EARLY_S = 60.0
"""Seconds by which SLURM may send the signal earlier or later than requested."""


class JobOptions(Struct, frozen=True, kw_only=True):
    """What a job requests from SLURM."""

    nodes: int = 1
    gpus_per_node: int | None = None
    """None requests no GPU: the ranks train on the CPU, or an option of ``extra`` requests it."""
    cpus_per_node: int | None = None
    time: str | None = None
    """Time limit as SLURM writes it, such as ``4:00:00``; None for the partition's default."""
    partition: str | None = None
    account: str | None = None
    extra: tuple[str, ...] = ()
    """More options of sbatch: ``--qos=high``."""
    warn_s: int = 180
    """Seconds before the time limit at which SLURM signals the job."""


def check_options(options: JobOptions) -> None:
    """Raise ``ProblemError`` with every option that cannot be passed to sbatch."""
    problems = []
    if options.time is not None and time_limit_s(options.time) is None:
        problems.append(
            Problem(
                where=f"--time {options.time}",
                what="not a time limit of SLURM.",
                remedy="Use minutes (90), hours:minutes:seconds (4:00:00) or days-hours (2-12).",
            )
        )
    for name, value in (("--partition", options.partition), ("--account", options.account)):
        if value is not None and (not value or _CONTROL.search(value)):
            what = "the value is empty or contains control characters."
            problems.append(Problem(where=name, what=what))
    if problems:
        raise ProblemError(*problems)


def parse_extra(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the options of ``--sbatch`` in the form ``--name=value``. Raise ``ProblemError``."""
    options, problems = [], []
    for text in texts:
        match = _OPTION.fullmatch(text)
        if match is None or _CONTROL.search(text):
            what = "not an option of sbatch in its long form."
            remedy = "Write --sbatch=OPTION=VALUE, such as --sbatch=qos=high or --sbatch=exclusive."
            problems.append(Problem(where=f"--sbatch={_printable(text)}", what=what, remedy=remedy))
        elif (own := _OWN_OPTIONS.get(match["name"])) is not None:
            what = f"ltui has an option of its own for {match['name']}."
            problems.append(Problem(where=f"--sbatch={text}", what=what, remedy=f"Use {own}."))
        elif match["name"] in _FIXED_OPTIONS:
            what = f"{match['name']} is set by ltui and cannot be changed."
            problems.append(Problem(where=f"--sbatch={text}", what=what, remedy="Leave it out."))
        else:
            value = "" if match["value"] is None else f"={match['value']}"
            options.append(f"--{match['name']}{value}")
    if problems:
        raise ProblemError(*problems)
    return tuple(options)


def _printable(text: str) -> str:
    return _CONTROL.sub("?", text)


def time_limit_s(text: str) -> int | None:
    """Return the seconds of a time limit of SLURM: ``90``, ``1:30:00``, ``2-12``; None if it is
    none, or is zero, which means no limit."""
    match = _TIME.fullmatch(text.strip())
    if match is None:
        return None
    parts = {name: int(value or 0) for name, value in match.groupdict().items()}
    hours = parts["h"] + parts["hours"]
    minutes = parts["m"] + parts["minutes"] + parts["only_minutes"]
    seconds = parts["s"] + parts["seconds"] + parts["only_seconds"]
    return parts["days"] * 86400 + hours * 3600 + minutes * 60 + seconds or None


def signal_lead_s(
    checkpoint_s: float | None, step_s: float | None, limit_s: float | None = None
) -> int:
    """Return how many seconds before the time limit the ranks have to begin the stop.

    It allows for two checkpoints, because the first may collide with a periodic one, for the
    longest step, and for the inaccuracy of SLURM's signal. At most half of ``limit_s`` is used, so
    that a short job trains at all.
    """
    saving_s = DEFAULT_CHECKPOINT_S if checkpoint_s is None else checkpoint_s
    lead = 2.0 * saving_s + (step_s or 0.0) + SIGNAL_EARLY_S
    if limit_s is not None:
        lead = min(lead, limit_s / 2.0)
    return max(1, min(65535, round(lead)))
