"""Position of this machine among several nodes, read from environment variables. Pure.

A launcher starts the same ``ltui`` command on each node and tells them apart by the environment.
Each launcher has variables of its own. They are read one after the other, and the first that is
set counts: by hand (``NODE_RANK``, ``MASTER_ADDR``), then Kubeflow (``PET_*``), SkyPilot, dstack,
SLURM, Open MPI. Without any of them, this machine is node 0 and the others join it.

Expansion of SLURM's lists of hosts, such as ``gpu[01-03,7],login``. SLURM's own ``scontrol show
hostnames`` does the same, but is missing in most containers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from ltui.training.config.run_spec import Nodes
from ltui.training.config.yaml_document import Fault

MAX_HOSTS = 65_536
"""Greatest number of hosts that a list may stand for; SLURM has the same limit."""
_NUMBERS = re.compile(r"(\d+)(?:-(\d+))?")
_HOST = re.compile(r"(?!-)[\w.@:%\[\]-]{1,253}")


def is_host(name: str) -> bool:
    """Return True if ssh takes ``name`` (with a user or not) as a machine, and not as an option."""
    return _HOST.fullmatch(name) is not None


def expand_hosts(text: str) -> tuple[str, ...]:
    """Return the hosts of a list in its order. Raise ``ValueError`` if it is malformed.

    Leading zeros are kept: ``n[08-10]`` is n08, n09, n10. A name may have several brackets.
    """
    hosts: list[str] = []
    for entry in _split_outside_brackets(text.strip()):
        hosts += _expand_name(entry, MAX_HOSTS - len(hosts))
    return tuple(hosts)


def _split_outside_brackets(text: str) -> list[str]:
    """Split at the commas that are not within brackets."""
    entries, depth, begin = [], 0, 0
    for at, character in enumerate(text):
        depth += {"[": 1, "]": -1}.get(character, 0)
        if not 0 <= depth <= 1:
            raise ValueError(f"the brackets of `{text[:60]}` do not match")
        if character == "," and depth == 0:
            entries.append(text[begin:at])
            begin = at + 1
    if depth:
        raise ValueError(f"the brackets of `{text[:60]}` do not match")
    return [entry.strip() for entry in [*entries, text[begin:]] if entry.strip()]


def _expand_name(entry: str, limit: int) -> list[str]:
    """Return the hosts of one name with brackets, the last bracket counting fastest."""
    prefix, bracket, rest = entry.partition("[")
    if not bracket:
        names = [entry]
    else:
        inside, _, suffix = rest.partition("]")
        ends = _expand_name(suffix, limit) if suffix else [""]
        numbers = _numbers(inside, limit // len(ends))
        names = [prefix + number + end for number in numbers for end in ends]
    if len(names) > limit:
        raise ValueError(f"the list has more than {MAX_HOSTS} hosts")
    return names


def _numbers(text: str, limit: int) -> list[str]:
    """Return the numbers of ``1-3,07``, with leading zeros."""
    numbers: list[str] = []
    for part in text.split(","):
        match = _NUMBERS.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"`[{text[:60]}]` is not a list of numbers")
        first, last = match[1], match[2] or match[1]
        span = range(int(first), int(last) + 1)
        if not span or len(numbers) + len(span) > limit:
            raise ValueError(f"`[{text[:60]}]` is no range of at most {limit} hosts")
        numbers += [str(number).zfill(len(first)) for number in span]
    return numbers


DEFAULT_PORT = 29500
"""Default port of torchrun."""
BY_HAND = "the environment"
"""Name of a launcher that is only known by ``NODE_RANK`` or ``MASTER_ADDR``."""
NUM_NODES = "trainer.num_nodes"
"""Place of the number of nodes in a configuration."""
_ENDPOINT = re.compile(r"\[?(?P<host>[^\]]+?)\]?(?::(?P<port>\d+))?")
_REMEDY = (
    "Start the same command on every node with NODE_RANK=0, 1, ... and MASTER_ADDR=<address of "
    "node 0>, or by `srun --ntasks-per-node=1`. Or start it on one node with none of these "
    "variables set; ltui then prints the `ltui join` command for the others."
)


class NodeEnvironment(Struct, frozen=True, kw_only=True):
    """Values from the environment; None if a variable is missing or invalid."""

    launcher: str | None = None
    """Name of the launcher that started this process; None without one."""
    rank: int | None = None
    """Number of this node, from 0."""
    rank_variable: str = "NODE_RANK"
    """Variable that ``rank`` was read from, for messages."""
    address: str | None = None
    """Address of node 0."""
    port: int = DEFAULT_PORT
    """Port of torch's rendezvous."""
    control_port: int = DEFAULT_PORT + 1
    """Port of the head's link."""
    count: int | None = None
    """Number of nodes that the launcher started."""
    step_count: int | None = None
    """``count`` if every one of these nodes runs this command for certain; otherwise None.

    A batch script of SLURM runs on one node of its allocation.
    """
    hosts: tuple[str, ...] = ()
    """Names or addresses of all nodes, if the launcher lists them."""
    second_on_node: bool = False
    """True if the launcher has started another ``ltui`` on this node."""
    own_address: str | None = None
    """Address of this machine for other machines, used if there is no launcher."""


def read_node_environment(environ: Mapping[str, str]) -> NodeEnvironment:
    """Read the variables of every launcher and combine them in the order of precedence."""
    sources = [_read(environ, launcher) for launcher in _LAUNCHERS]
    sources += [_slurm(environ), _read(environ, _MPI)]
    launchers = [source for source in sources if source.launcher is not None]
    ranked = next((s for s in launchers if s.rank is not None), NodeEnvironment())
    counted = next((s for s in launchers if s.count is not None), NodeEnvironment())
    # MASTER_PORT alone is no launcher, but it counts.
    ported = next((s for s in sources if s.port), None)
    return NodeEnvironment(
        launcher=_launcher_name(launchers),
        rank=ranked.rank,
        rank_variable=ranked.rank_variable,
        address=next((s.address for s in launchers if s.address), None),
        port=DEFAULT_PORT if ported is None else ported.port,
        control_port=DEFAULT_PORT + 1 if ported is None else ported.control_port,
        count=counted.count,
        step_count=counted.step_count,
        hosts=next((s.hosts for s in launchers if s.hosts), ()),
        second_on_node=any(s.second_on_node for s in launchers),
    )


def choose_nodes(
    trainer: Mapping[str, Any], environment: NodeEnvironment | None
) -> tuple[Nodes | None, list[Fault]]:
    """Return the position of this machine among ``trainer.num_nodes``, and the errors.

    The position is None if there is only one node or the environment is unknown.
    """
    count = trainer.get("num_nodes")
    if not isinstance(count, int) or isinstance(count, bool) or count < 2 or environment is None:
        return None, []
    return place_among_nodes(count, environment, NUM_NODES)


def launcher_count(environment: NodeEnvironment | None) -> int | None:
    """Return the number of nodes on which a launcher runs this command; None if it is unknown."""
    if environment is None or environment.rank is None:
        return None
    return environment.step_count


def place_among_nodes(
    count: int, environment: NodeEnvironment, path: str
) -> tuple[Nodes | None, list[Fault]]:
    """Return the position of this machine among ``count`` nodes, and the errors.

    ``path`` is the place of the count for the user.
    """
    error = _fault(count, environment)
    if error is not None:
        return None, [Fault(path=path, what=error, remedy=_REMEDY)]
    by_hand = environment.launcher is None
    address = environment.own_address if by_hand else environment.address
    if address is None:
        what = "no address was found at which other machines can reach this one."
        return None, [Fault(path=path, what=what, remedy="Give it: --address ADDRESS.")]
    nodes = Nodes(
        count=count,
        rank=0 if environment.rank is None else environment.rank,
        address=address,
        port=environment.port,
        control_port=environment.control_port,
        start="by hand" if by_hand else "srun" if environment.launcher == "SLURM" else "launcher",
    )
    return nodes, []


def without_launcher(
    environment: NodeEnvironment, address: str | None = None, port: int | None = None
) -> NodeEnvironment:
    """Return the environment of a head that starts the other nodes itself or waits for them."""
    port = DEFAULT_PORT if port is None else port
    own = environment.own_address if address is None else address
    return NodeEnvironment(own_address=own, port=port, control_port=port + 1)


def _fault(count: int, environment: NodeEnvironment) -> str | None:
    if environment.launcher is None:
        return None
    if environment.second_on_node:
        program = "srun" if environment.launcher == "SLURM" else environment.launcher
        return f"{program} has started more than one ltui on this node."
    if environment.rank is None or environment.address is None:
        missing = "NODE_RANK" if environment.rank is None else "MASTER_ADDR"
        return f"the number of this node among {count} nodes is unknown: {missing} is not set."
    if environment.count is not None and environment.count != count:
        return f"{_counted(environment)}, not {count}."
    if environment.rank_variable == "SLURM_NODEID" and environment.step_count is None:
        return "SLURM runs a batch script on one node only; srun runs the command on every node."
    if environment.rank >= count:
        name = environment.rank_variable
        return f"{name} is {environment.rank}, but {count} nodes are numbered 0 to {count - 1}."
    return None


def _counted(environment: NodeEnvironment) -> str:
    if environment.launcher == BY_HAND:
        return f"NNODES is {environment.count}"
    verb = "allocated" if environment.launcher == "SLURM" else "started"
    return f"{environment.launcher} {verb} {environment.count} nodes"


def _launcher_name(launchers: list[NodeEnvironment]) -> str | None:
    """Return the launcher to name in messages: a real one rather than variables set by hand."""
    names = [source.launcher for source in launchers]
    return next((name for name in names if name != BY_HAND), names[0] if names else None)


class _Launcher(Struct, frozen=True, kw_only=True):
    """The variables that a launcher sets on each node; an empty name if it has none for a value."""

    name: str
    rank: str
    count: str
    address: str = ""
    port: str = ""
    endpoint: str = ""
    """``HOST:PORT``, used for what ``address`` and ``port`` do not give."""
    hosts: str = ""
    """The addresses of all nodes, line by line."""
    local_rank: str = ""
    """Number of the process on its node."""


_LAUNCHERS = (
    _Launcher(
        name=BY_HAND, rank="NODE_RANK", count="NNODES", address="MASTER_ADDR", port="MASTER_PORT"
    ),
    # The options of torchrun as variables, which Kubeflow sets in each pod.
    _Launcher(
        name="Kubeflow", rank="PET_NODE_RANK", count="PET_NNODES", address="PET_MASTER_ADDR",
        port="PET_MASTER_PORT", endpoint="PET_RDZV_ENDPOINT",
    ),
    _Launcher(
        name="SkyPilot", rank="SKYPILOT_NODE_RANK", count="SKYPILOT_NUM_NODES",
        hosts="SKYPILOT_NODE_IPS",
    ),
    _Launcher(
        name="dstack", rank="DSTACK_NODE_RANK", count="DSTACK_NODES_NUM",
        address="DSTACK_MASTER_NODE_IP", hosts="DSTACK_NODES_IPS",
    ),
)  # fmt: skip
_MPI = _Launcher(
    name="mpirun",
    rank="OMPI_COMM_WORLD_RANK",
    count="OMPI_COMM_WORLD_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
)
"""Open MPI does not name the first node: ``MASTER_ADDR`` must."""


def _read(environ: Mapping[str, str], launcher: _Launcher) -> NodeEnvironment:
    """Return the values of one launcher; ports are 0 if it chooses none."""
    rank = whole_number(environ.get(launcher.rank))
    hosts = tuple((environ.get(launcher.hosts) or "").split())
    endpoint = _ENDPOINT.fullmatch(environ.get(launcher.endpoint) or "")
    address = environ.get(launcher.address) or (endpoint["host"] if endpoint else None)
    named_port = endpoint["port"] if endpoint else None
    port = whole_number(environ.get(launcher.port)) or whole_number(named_port)
    count = whole_number(environ.get(launcher.count))  # none if it is a range such as 1:4
    if hosts:
        address, count = address or hosts[0], count or len(hosts)
    # A port alone is a common leftover, and a list of hosts no position.
    is_set = rank is not None or (address is not None and not launcher.hosts)
    return NodeEnvironment(
        launcher=launcher.name if is_set else None,
        rank=rank,
        rank_variable=launcher.rank,
        address=address,
        port=port or 0,
        control_port=port + 1 if port else 0,
        count=count,
        step_count=count,
        hosts=hosts,
        second_on_node=(whole_number(environ.get(launcher.local_rank)) or 0) > 0,
    )


def _slurm(environ: Mapping[str, str]) -> NodeEnvironment:
    listed = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    try:
        hosts = expand_hosts(listed)
    except ValueError:
        hosts = ()
    in_step = whole_number(environ.get("SLURM_STEP_NUM_NODES"))
    job = environ.get("SLURM_JOB_ID")
    port = None if whole_number(job) is None else 15000 + int(str(job)[-4:])
    return NodeEnvironment(
        launcher="SLURM" if hosts or "SLURM_NODEID" in environ else None,
        rank=whole_number(environ.get("SLURM_NODEID")),
        rank_variable="SLURM_NODEID",
        address=hosts[0] if hosts else None,
        # Lightning chooses the port in the same way. Jobs that share a machine often have
        # consecutive numbers, so the port after it could be that of the next job.
        port=port or 0,
        control_port=0 if port is None else port + 10000,
        count=in_step or whole_number(environ.get("SLURM_JOB_NUM_NODES")),
        step_count=in_step,
        hosts=hosts,
        second_on_node=(whole_number(environ.get("SLURM_LOCALID")) or 0) > 0,
    )


def whole_number(text: str | None) -> int | None:
    """Return the value of a variable that is a whole number; None for any other, or without one."""
    return int(text) if text is not None and text.strip().isdecimal() else None
