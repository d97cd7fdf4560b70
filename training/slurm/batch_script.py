"""Text of the batch script of a run. Pure.

The script starts one process of ltui on each node. The process on the first node becomes the head
of the run. The specification stands in the script, because a compute node may not see the folder in
which the run was submitted.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Sequence

from msgspec import Struct

from ltui.training.problem import ProblemError
from ltui.training.process.python_command import module_command
from ltui.training.slurm.job_options import JobOptions

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
        job = f"--run {_word(self.run_id)} --token {_word(self.token)}"
        end = "LTUI_SPEC_" + hashlib.sha256(self.spec_text.encode()).hexdigest()[:16]
        spec = self.spec_text if self.spec_text.endswith("\n") else self.spec_text + "\n"
        return "\n".join(
            [
                "#!/bin/bash",
                *(f"#SBATCH {_sbatch_word(option)}" for option in self.sbatch_options()),
                "",
                "# Written by `ltui submit`. Each start of this job is an attempt of the same run.",
                f"export LTUI_HOME={_word(self.home)}",
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


def _word(text: str) -> str:
    """Return ``text`` as one word of bash."""
    return shlex.quote(text)


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
    quoted = _word(value).replace("\\", "\\\\")
    return f"{name}{equals}{quoted}" if equals else name
