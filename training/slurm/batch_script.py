"""The batch script of a run, and the options of its job with their checks. Pure.

The script starts one process of ltui on each node. The process on the first node becomes the head
of the run. The specification stands in the script, because a compute node may not see the folder in
which the run was submitted.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterable, Sequence

from msgspec import Struct

from ltui.training.problem import Problem, ProblemError
from ltui.training.process.python_environment import module_command

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
            where = f"--sbatch={_CONTROL.sub('?', text)}"
            problems.append(Problem(where=where, what=what, remedy=remedy))
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


WARNING_SIGNAL = "USR2"
"""Signal that SLURM sends before the time limit. NCCL may use SIGUSR1 itself."""
JOB_MODULE = "ltui.app.slurm.job_process"
"""Module that runs on the compute nodes."""


class BatchScript(Struct, frozen=True, kw_only=True):
    """What the script of one run contains."""

    run_id: str
    token: str
    """Random text that tells this run's directory from another one with the same name."""
    spec_text: str
    """The specification of the run as YAML."""
    python: str
    """Interpreter that runs ltui on the compute nodes."""
    home: str
    """``$LTUI_HOME`` at submission."""
    cwd: str
    output: str
    """File of the job's output; ``%j`` is the number of the job."""
    options: JobOptions

    def text(self) -> str:
        """Return the whole script. Raises ``ProblemError`` if an option has a line break."""
        job = f"--run {shlex.quote(self.run_id)} --token {shlex.quote(self.token)}"
        end = "LTUI_SPEC_" + hashlib.sha256(self.spec_text.encode()).hexdigest()[:16]
        spec = self.spec_text if self.spec_text.endswith("\n") else self.spec_text + "\n"
        return "\n".join(
            [
                "#!/bin/bash",
                *(f"#SBATCH {_sbatch_word(option)}" for option in self.sbatch_options()),
                "",
                "# Written by `ltui submit`. Each start of this job is an attempt of the same run.",
                f"export LTUI_HOME={shlex.quote(self.home)}",
                "export PYTHONUNBUFFERED=1",
                f"ltui=({shlex.join(module_command(JOB_MODULE, python=self.python))})",
                "# The processes on the nodes act on these signals. This shell waits for them.",
                "trap : TERM INT USR1 USR2",
                "",
                f"\"${{ltui[@]}}\" prepare {job} <<'{end}' || exit",
                f"{spec}{end}",
                "",
                "# The nodes authenticate each other with this key, which srun passes on.",
                'LTUI_NODE_KEY="$("${ltui[@]}" key)" || exit',
                "export LTUI_NODE_KEY",
                "srun --ntasks-per-node=1 --kill-on-bad-exit=1 --cpu-bind=none "
                f'"${{ltui[@]}}" node {job} &',
                "step=$!",
                'wait "$step"',
                "code=$?",
                'while kill -0 "$step" 2>/dev/null; do wait "$step"; code=$?; done',
                "",
                "# Requeues the job if the run has to continue.",
                f'"${{ltui[@]}}" end {job} --code "$code"',
                "",
            ]
        )

    def sbatch_options(self) -> list[str]:
        """Return the options of sbatch, in the form ``--name=value``."""
        options = self.options
        given = {option.split("=", 1)[0] for option in options.extra}
        own = [
            f"--job-name={self.run_id}",
            f"--chdir={self.cwd}",
            f"--output={self.output}",
            "--open-mode=append",
            f"--nodes={options.nodes}",
            "--ntasks-per-node=1",
            *_option("--gpus-per-node", options.gpus_per_node),
            *_option("--cpus-per-task", options.cpus_per_node),
            *_option("--time", options.time),
            *_option("--partition", options.partition),
            *_option("--account", options.account),
            f"--signal={WARNING_SIGNAL}@{options.warn_s}",
            "--requeue",
        ]
        return [*(option for option in own if option.split("=", 1)[0] not in given), *options.extra]


def _option(name: str, value: object) -> Sequence[str]:
    return () if value is None else (f"{name}={value}",)


def _sbatch_word(option: str) -> str:
    """Return an option as sbatch reads it in a script: quoted if it has special characters.

    Raises ``ProblemError`` if it has a line break.
    """
    name, equals, value = option.partition("=")
    if re.search("[\r\n]", value):
        # The rest of the value would be a line of the script, which bash runs.
        raise ProblemError.of(
            where=f"{name}={value!r}",
            what="the value has a line break, which an option of a batch script cannot have.",
            remedy="Rename the folder.",
        )
    # Unlike a shell, sbatch takes a backslash for an escape within single quotes, too.
    quoted = shlex.quote(value).replace("\\", "\\\\")
    return f"{name}{equals}{quoted}" if equals else name
