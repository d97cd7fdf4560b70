"""Position of this machine among several nodes, read from environment variables. Pure.

The variables are those of torchrun or of SLURM's ``srun``. On each node a user, or ``srun``, starts
the same command. Each ``ltui`` starts the ranks of its node, and torch elastic connects them at the
address of the first node.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ltui.training.config.run_spec import Nodes
from ltui.training.config.yaml_document import Fault

DEFAULT_PORT = 29500
"""Default port of torchrun."""
_FIRST_HOST = re.compile(r"(?P<prefix>[^\[,]+)(?:\[(?P<first>[^\],-]+)[^\]]*\](?P<suffix>[^,]*))?")
_PATH = "trainer.num_nodes"
_REMEDY = (
    "Start the same command on every node with NODE_RANK=0, 1, ... and MASTER_ADDR=<address of "
    "node 0>, or by `srun --ntasks-per-node=1`."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeEnvironment:
    """Values from the environment; None if a variable is missing or invalid."""

    rank: int | None = None
    """Number of this node, from 0."""
    address: str | None = None
    """Address of node 0."""
    port: int = DEFAULT_PORT
    count: int | None = None
    """Number of nodes that SLURM allocated."""
    second_on_node: bool = False
    """True if ``srun`` has started another ``ltui`` on this node."""


def read_node_environment(environ: Mapping[str, str]) -> NodeEnvironment:
    """Read the variables of torchrun, or else those of SLURM."""
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    rank = _number(environ.get("NODE_RANK"))
    return NodeEnvironment(
        rank=_number(environ.get("SLURM_NODEID")) if rank is None else rank,
        address=environ.get("MASTER_ADDR") or first_host(hosts),
        port=_number(environ.get("MASTER_PORT")) or _port_of_job(environ.get("SLURM_JOB_ID")),
        count=_number(environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_JOB_NUM_NODES")),
        second_on_node=(_number(environ.get("SLURM_LOCALID")) or 0) > 0,
    )


def first_host(hosts: str) -> str | None:
    """Return the first host of a SLURM node list: ``n3`` for ``n[3-5,9]``; None if it is empty."""
    match = _FIRST_HOST.match(hosts.strip())
    if match is None:
        return None
    return match["prefix"] + (match["first"] or "") + (match["suffix"] or "")


def choose_nodes(
    trainer: Mapping[str, Any], environment: NodeEnvironment | None
) -> tuple[Nodes | None, list[Fault]]:
    """Return the position of this machine among ``trainer.num_nodes``, and the errors.

    The position is None if there is only one node or the environment is unknown.
    """
    count = trainer.get("num_nodes")
    if not isinstance(count, int) or isinstance(count, bool) or count < 2 or environment is None:
        return None, []
    error = _fault(count, environment)
    if error is not None:
        return None, [Fault(path=_PATH, what=error, remedy=_REMEDY)]
    assert environment.rank is not None
    assert environment.address is not None
    return Nodes(
        count=count, rank=environment.rank, address=environment.address, port=environment.port
    ), []


def _fault(count: int, environment: NodeEnvironment) -> str | None:
    if environment.second_on_node:
        return "srun has started more than one ltui on this node."
    if environment.rank is None or environment.address is None:
        missing = "NODE_RANK" if environment.rank is None else "MASTER_ADDR"
        return f"the number of this node among {count} nodes is unknown: {missing} is not set."
    if environment.count is not None and environment.count != count:
        return f"SLURM allocated {environment.count} nodes, not {count}."
    if environment.rank >= count:
        return f"NODE_RANK is {environment.rank}, but {count} nodes are numbered 0 to {count - 1}."
    return None


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.strip().isdecimal() else None


def _port_of_job(job: str | None) -> int:
    """Return a port that depends on the job, so that two jobs on a machine use different ports.

    Lightning chooses the port in the same way.
    """
    return DEFAULT_PORT if _number(job) is None else 15000 + int(str(job)[-4:])
