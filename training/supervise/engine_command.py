"""Build the command line and environment of the engine, which the shim starts.

For presets the engine is torch elastic. For ``ltui exec`` it is the user's command, unchanged, or
with the copies of its files if the code of the run is frozen.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from ltui.training.config.run_spec import Nodes, RunSpec
from ltui.training.json_codec import to_json
from ltui.training.lifecycle.rank_package import install_rank_package
from ltui.training.lifecycle.run_processes import EngineExit, engine_exit, shim_identity
from ltui.training.problem import ProblemError
from ltui.training.process.identity import ProcessIdentity
from ltui.training.process.python_environment import module_command
from ltui.training.rank.frozen_imports import COPY_VARIABLE, ROOT_VARIABLE
from ltui.training.shared.defaults import QUEUE_BYTES
from ltui.training.shared.rank_environment import RankEnvironment
from ltui.training.store.frozen_code import (
    FrozenCode,
    code_to_run,
    copied_path,
    frozen_command,
    frozen_folder,
)
from ltui.training.store.history_reader import RunStore
from ltui.training.store.run_directory import RunDir, write_json
from ltui.training.tensor_queue.control_block import STOP_SIGNALS


class ShimWatch:
    """The shim of one attempt, which this process or an earlier one has started."""

    def __init__(self, run_dir: RunDir, attempt: int) -> None:
        self._run_dir, self._attempt = run_dir, attempt
        self._identity: ProcessIdentity | None = None
        self.child: subprocess.Popen[bytes] | None = None
        """The shim if this process has started it, so that its exit status is collected."""

    def is_running(self) -> bool:
        """Return True until the engine has ended or the shim has died."""
        return self.end() is None and self._is_alive()

    def end(self) -> EngineExit | None:
        """Return how the engine ended, which the shim records before it exits."""
        return engine_exit(self._run_dir, self._attempt)

    def _is_alive(self) -> bool:
        if self.child is not None:
            self.child.poll()
        if self._identity is None:
            self._identity = shim_identity(self._run_dir, self._attempt)
        return self._identity is not None and self._identity.alive()


# Torch elastic forwards these signals to its ranks, which then stop together, and waits this many
# seconds for them. Without the first variable, SIGUSR1 and SIGUSR2 would end the agent at once.
# Versions without these options ignore the variables.
_AGENT = {
    "PET_SIGNALS_TO_HANDLE": ",".join(["SIGHUP", "SIGQUIT", *(s.name for s in STOP_SIGNALS)]),
    "PET_SHUTDOWN_TIMEOUT": "60",
}

# A shell redirects the output, so that the rank log is complete even if the interpreter fails to
# start. The shell then replaces itself with the rank.
_TO_RANK_LOG = 'exec "$@" >>"$LTUI_LOG_DIR/rank-$(printf %05d "$RANK").log" 2>&1'


def engine_start(
    run_dir: RunDir,
    spec: RunSpec,
    attempt: int,
    resume_from: Path | None,
    changes: tuple[str, ...],
) -> dict[str, Any]:
    """Return how the shim starts the engine of ``attempt``.

    ``env`` is added to the environment of this process; None removes a variable. Raises
    ``ProblemError`` if the frozen code of the run is gone.
    """
    frozen = code_to_run(run_dir, spec)
    if spec.command is None:
        argv = _preset_argv(run_dir, spec, attempt)
    elif frozen is None:
        argv = spec.command
    else:
        argv = frozen_command(run_dir, frozen, spec.command, spec.cwd)
    return {
        "argv": argv,
        "env": {
            **_environment(run_dir, spec, attempt, resume_from, changes),
            **_code_variables(run_dir, frozen),
        },
        "cwd": spec.cwd,
        "log": str(run_dir.engine_log_path(attempt)),
    }


def write_rank_config(run_dir: RunDir, spec: RunSpec, attempt: int) -> None:
    """Write the configuration file that the ranks of a preset read."""
    frozen = code_to_run(run_dir, spec)
    document = {
        "config": spec.config,
        "after_fit": list(spec.after_fit),
        "python_path": [
            path if frozen is None else copied_path(run_dir, frozen, path)
            for path in spec.python_path
        ],
        "checkpoints_dir": str(run_dir.checkpoints_dir),
        "cwd": spec.cwd,
    }
    write_json(run_dir.config_path(attempt), to_json(document))


def _preset_argv(run_dir: RunDir, spec: RunSpec, attempt: int) -> tuple[str, ...]:
    return (
        *module_command("ltui.training.rank.torchrun", python=spec.python),
        "--nproc-per-node", str(spec.nproc), "--max-restarts", "0",
        *_rendezvous(run_dir, spec.nodes),
        "--no-python", "/bin/sh", "-c", _TO_RANK_LOG, "rank",
        *module_command("ltui.training.rank.train_preset", python=spec.python),
        str(run_dir.config_path(attempt)),
    )  # fmt: skip


def _rendezvous(run_dir: RunDir, nodes: Nodes | None) -> tuple[str, ...]:
    """Return the rendezvous options of torchrun.

    On a single node, port 0 lets the kernel choose a free port. With several nodes there is one
    agent on each, and they meet at the address of the first node.
    """
    if nodes is None:
        return (
            "--nnodes", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0",
            "--rdzv-id", run_dir.id, "--local-addr", "127.0.0.1",
        )  # fmt: skip
    words = (
        "--nnodes", str(len(nodes.present)), "--node-rank", str(nodes.present.index(nodes.rank)),
        "--master-addr", nodes.address, "--master-port", str(nodes.port),
    )  # fmt: skip
    # By default the agent of the first node would give the ranks its fully qualified host name,
    # which the other nodes may not be able to resolve.
    return (*words, "--local-addr", nodes.address) if nodes.rank == 0 else words


def _environment(
    run_dir: RunDir,
    spec: RunSpec,
    attempt: int,
    resume_from: Path | None,
    changes: tuple[str, ...],
) -> dict[str, str | None]:
    rank_environment = RankEnvironment(
        run_dir=run_dir.path,
        run_id=run_dir.id,
        attempt=attempt,
        resume_from=resume_from,
        checkpoint_every_s=spec.checkpoint.every_s,
        checkpoint_keep=spec.checkpoint.keep,
        overrides=changes,
        best_metric=spec.checkpoint.best,
        best_mode=spec.checkpoint.mode,
        best_keep=spec.checkpoint.keep_best,
        earlier_steps=None if spec.checkpoint.best is None else _earlier_steps(run_dir, attempt),
        nodes=1 if spec.nodes is None else len(spec.nodes.present),
    )
    rank_package = install_rank_package(run_dir.home)
    python_path = spec.env.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    env: dict[str, str | None] = {
        "PYTHONUNBUFFERED": "1",
        # Otherwise restarted workers read the addresses of their predecessors from the store.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        **{name: os.environ.get(name, value) for name, value in _AGENT.items()},
        **spec.env,
        **(_node_variables(spec.nodes) if spec.nodes and spec.command else {}),
        "LTUI_NODE_KEY": None,
        **rank_environment.variables(),
        "LTUI_QUEUE_BYTES": os.environ.get("LTUI_QUEUE_BYTES", str(QUEUE_BYTES)),
        "LTUI_LOG_DIR": str(run_dir.logs_dir(attempt)),
        "LTUI_METRICS_PATTERN": spec.metrics_pattern,
        "PYTHONPATH": os.pathsep.join(p for p in (str(rank_package), python_path) if p),
    }
    if spec.command is None and "OMP_NUM_THREADS" not in {**os.environ, **spec.env}:
        # Torch elastic would always set 1. Divide the processors among the ranks instead.
        env["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // max(1, spec.nproc)))
    return env


def _code_variables(run_dir: RunDir, frozen: FrozenCode | None) -> dict[str, str | None]:
    """Return the variables that ``training/rank/frozen_imports.py`` reads."""
    if frozen is None:
        return {COPY_VARIABLE: None, ROOT_VARIABLE: None}
    copy = os.path.abspath(frozen_folder(run_dir, frozen.number))
    return {COPY_VARIABLE: copy, ROOT_VARIABLE: frozen.root}


def _earlier_steps(run_dir: RunDir, attempt: int) -> dict[int, int] | None:
    """Return the last step that counts of each earlier attempt; None if it cannot be read."""
    try:
        with RunStore(run_dir) as store:
            return {s.attempt: s.last_step for s in store.spans(attempt) if s.attempt != attempt}
    except ProblemError:
        return None


def _node_variables(nodes: Nodes) -> dict[str, str]:
    """Return the variables by which a user's command finds the other nodes.

    Lightning's own launcher and torch read the first group. torchrun takes the second for its
    options, as Kubeflow sets them.
    """
    values = {
        "NODE_RANK": str(nodes.present.index(nodes.rank)),
        "MASTER_ADDR": nodes.address,
        "MASTER_PORT": str(nodes.port),
    }
    values |= {f"PET_{name}": value for name, value in values.items()}
    if nodes.start == "srun":
        # Lightning would otherwise expect a task of SLURM for each rank.
        values["SLURM_JOB_NAME"] = "interactive"
    return {**values, "PET_NNODES": str(len(nodes.present))}
