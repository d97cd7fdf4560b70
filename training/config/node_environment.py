"""Which of several machines (nodes) a run stands on, read from the environment that it is started
in: torchrun's names, or those that SLURM's ``srun`` sets. Pure.

On each node a person, or ``srun``, starts the same command; each ``ltui`` starts the ranks of its
node, and torch elastic brings them together at the first node's address.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ltui.training.config.run_spec import Nodes
from ltui.training.config.yaml_document import Fault

USUAL_PORT = 29500
"""torchrun's."""
_FIRST_HOST = re.compile(r"(?P<prefix>[^\[,]+)(?:\[(?P<first>[^\],-]+)[^\]]*\](?P<suffix>[^,]*))?")
_WHERE = "trainer.num_nodes"
_REMEDY = (
    "Start the same command on every node with NODE_RANK=0, 1, ... and MASTER_ADDR=<address of "
    "node 0>, or by `srun --ntasks-per-node=1`."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeEnvironment:
    """What the environment says; None where it says nothing, or nothing that can be."""

    rank: int | None = None
    """Of the node, from 0."""
    address: str | None = None
    """Of node 0."""
    port: int = USUAL_PORT
    count: int | None = None
    """Nodes that SLURM has given."""
    second_on_node: bool = False
    """Whether ``srun`` has started another ``ltui`` on this node."""


def read_node_environment(environ: Mapping[str, str]) -> NodeEnvironment:
    """torchrun's variables go before SLURM's."""
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
    """``n3`` of ``n[3-5,9]``; None of nothing."""
    match = _FIRST_HOST.match(hosts.strip())
    if match is None:
        return None
    return match["prefix"] + (match["first"] or "") + (match["suffix"] or "")


def choose_nodes(
    trainer: Mapping[str, Any], place: NodeEnvironment | None
) -> tuple[Nodes | None, list[Fault]]:
    """Where this machine stands among ``trainer.num_nodes``, and what is wrong with it.

    None where there is one node alone, or nobody looked at the environment.
    """
    count = trainer.get("num_nodes")
    if not isinstance(count, int) or isinstance(count, bool) or count < 2 or place is None:
        return None, []
    what = _fault(count, place)
    if what is not None:
        return None, [Fault(path=_WHERE, what=what, remedy=_REMEDY)]
    assert place.rank is not None
    assert place.address is not None
    return Nodes(count=count, rank=place.rank, address=place.address, port=place.port), []


def _fault(count: int, place: NodeEnvironment) -> str | None:
    if place.second_on_node:
        return "srun has started more than one ltui on this node."
    if place.rank is None or place.address is None:
        missing = "NODE_RANK" if place.rank is None else "MASTER_ADDR"
        return f"the number of this node among {count} nodes is unknown: {missing} is not set."
    if place.count is not None and place.count != count:
        return f"SLURM allocated {place.count} nodes, not {count}."
    if place.rank >= count:
        return f"NODE_RANK is {place.rank}, but {count} nodes are numbered 0 to {count - 1}."
    return None


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.strip().isdecimal() else None


def _port_of_job(job: str | None) -> int:
    """Another for each job, so that two on one machine do not meet; as Lightning chooses it."""
    return USUAL_PORT if _number(job) is None else 15000 + int(str(job)[-4:])
