"""Every node of a job but the first: join the run of the first node, and wait for its end."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from ltui.app.exit_codes import EXIT_DONE
from ltui.app.foreground.follow_agent import follow_agent, joined_line
from ltui.app.foreground.interrupt_signals import ReceivedSignals
from ltui.app.nodes.join_by_launcher import join_by_launcher
from ltui.training.config.node_environment import place_among_nodes, read_node_environment
from ltui.training.config.run_spec import Nodes
from ltui.training.problem import ProblemError

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


def job_nodes(environ: Mapping[str, str]) -> Nodes | None:
    """Return the nodes of the job step that this process is a task of; None if there is only one.

    Raises ``ProblemError`` if the place of this node among them is unknown.
    """
    environment = read_node_environment(environ)
    if environment.step_count is None or environment.step_count < 2:
        return None
    nodes, faults = place_among_nodes(environment.step_count, environment, "--nodes")
    if faults:
        raise ProblemError.of(where="--nodes", what=faults[0].what, remedy=faults[0].remedy)
    return nodes


def hide_slurm_from_lightning() -> None:
    """Keep Lightning from its own SLURM mode in the ranks that this process starts.

    It would expect one task of SLURM for each rank, and would requeue the job itself.
    """
    os.environ["SLURM_JOB_NAME"] = "interactive"


def run_other_node(nodes: Nodes, home: Path) -> int:
    """Join the run as node ``nodes.rank`` and wait until it has ended. Return the exit code.

    The files of the agent are below ``home``. Raises ``ProblemError`` if this node cannot join.
    """
    signals = ReceivedSignals()

    def stop(_number: int, _frame: FrameType | None) -> None:
        # SLURM may send several signals. Only a person's second Ctrl-C would mean a kill.
        signals.interrupts = 1

    for number in _SIGNALS:
        signal.signal(number, stop)
    hide_slurm_from_lightning()
    joined = join_by_launcher(nodes, None, None, home)
    print(joined_line(joined), flush=True)
    follow_agent(joined, signals)
    # How the run ended is recorded on the first node. Another code would make srun kill that node.
    return EXIT_DONE
