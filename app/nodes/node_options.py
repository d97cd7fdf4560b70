"""Options of ``ltui run`` and ``exec`` for several machines, and the place of this one."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from ltui.app.launch.local_machine import detect_machine
from ltui.training.config.device_selection import Machine
from ltui.training.config.node_environment import (
    DEFAULT_PORT,
    NUM_NODES,
    NodeEnvironment,
    is_host,
    launcher_count,
    place_among_nodes,
    without_launcher,
)
from ltui.training.config.preflight import overridden_paths
from ltui.training.config.run_spec import Nodes, RunSpec
from ltui.training.nodes.node_address import reachable_address, resolve
from ltui.training.problem import ProblemError

_LIST_REMEDY = "Give the names that ssh knows, with commas between them: a,b,c"
_PORT_PAIRS = 50
"""Maximum number of pairs of ports that are tried."""


class NodeOptions(Struct, frozen=True, kw_only=True):
    """How the machines of a run find one another: the options of ``ltui run`` of these names."""

    nodes: str | None = None
    """Machines that are started by ssh, with commas between them."""
    address: str | None = None
    port: int | None = None
    key_file: str | None = None
    join_timeout: float | None = None
    allow_fewer_nodes: bool = False
    remote_ltui: str | None = None
    num_nodes: int | None = None
    """Number of machines of a command."""


def listed_hosts(text: str | None) -> tuple[str, ...] | None:
    """Return the other machines of ``--nodes a,b,c``; None without the option.

    This machine may be in the list or not. Raise ``ProblemError``.
    """
    if text is None:
        return None
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ProblemError.of(where="--nodes", what="no machine is named.", remedy=_LIST_REMEDY)
    for name in names:
        if not is_host(name):
            raise ProblemError.of(
                where=f"--nodes {text}",
                what=f"{name!r} is not the name of a host.",
                remedy=_LIST_REMEDY,
            )
    if len(set(names)) < len(names):
        raise ProblemError.of(
            where=f"--nodes {text}",
            what="a host is named twice.",
            remedy="Name each machine once; it runs one part of the run.",
        )
    # ssh may know other names by its configuration.
    own = ("localhost", socket.gethostname())
    others = tuple(name for name in names if name not in own and not _is_known_here(name))
    if not others:
        raise ProblemError.of(
            where=f"--nodes {text}",
            what="there is no machine besides this one.",
            remedy="Name at least one other machine; this one is always node 0.",
        )
    return others


def node_overrides(overrides: Sequence[str], hosts: Sequence[str] | None) -> list[str]:
    """Return the overrides with the number of nodes that ``--nodes`` lists."""
    if hosts is None or NUM_NODES in overridden_paths(overrides):
        return list(overrides)
    return [*overrides, f"{NUM_NODES}={len(hosts) + 1}"]


def launch_machine(options: NodeOptions, hosts: Sequence[str] | None) -> Machine:
    """Return this machine with the place that the environment and the options give it."""
    machine = detect_machine(os.environ)
    return replace(machine, node=_node_environment(options, hosts, machine.node))


def _node_environment(
    options: NodeOptions, hosts: Sequence[str] | None, environment: NodeEnvironment | None
) -> NodeEnvironment:
    environment = environment or NodeEnvironment()
    if hosts is not None or environment.launcher is None:
        # A launcher that has chosen a port gives it in MASTER_PORT.
        chosen = None if environment.port == DEFAULT_PORT else environment.port
        port = chosen if options.port is None else options.port
        return without_launcher(environment, options.address, port)
    if options.address is not None:
        environment = replace(environment, address=options.address)
    if options.port is not None:
        environment = replace(environment, port=options.port, control_port=options.port + 1)
    return environment


def agent_nodes(
    options: NodeOptions, machine: Machine, overrides: Sequence[str] = ()
) -> Nodes | None:
    """Return the nodes if a launcher has started this process as another node than the first.

    This does not read the configuration, which the node gets from node 0. None if the number of
    nodes stands only there.
    """
    environment, count = machine.node, launcher_count(machine.node)
    if environment is None or count is None or count < 2 or not environment.rank:
        return None
    if NUM_NODES in overridden_paths(overrides) or options.nodes is not None:
        return None
    return _other_node(count, environment, options)


def resuming_agent(options: NodeOptions, machine: Machine) -> Nodes | None:
    """Return the nodes if a launcher resumes a run here as another node than the first.

    Only node 0 knows the run, and so the number of nodes.
    """
    environment = machine.node
    if environment is None or environment.launcher is None or not environment.rank:
        return None
    count = launcher_count(environment) or environment.rank + 1
    return _other_node(count, environment, options)


def _other_node(count: int, environment: NodeEnvironment, options: NodeOptions) -> Nodes | None:
    nodes, _ = place_among_nodes(count, environment, "the launcher")
    if nodes is None or options.join_timeout is None:
        return nodes
    return replace(nodes, join_timeout_s=options.join_timeout)


def resumed_spec(spec: RunSpec, options: NodeOptions, hosts: Sequence[str] | None) -> RunSpec:
    """Return the specification of a run on several machines for its next attempt.

    The other nodes are started in the way that the options and the environment give, or else as
    before. Raise ``ProblemError``.
    """
    before = spec.nodes
    assert before is not None
    environment = detect_machine(os.environ).node or NodeEnvironment()
    if hosts is None and before.start == "ssh" and environment.launcher is None:
        hosts = before.hosts
    environment = _node_environment(options, hosts, environment)
    if environment.launcher is None and options.address is None and _is_known_here(before.address):
        environment = replace(environment, own_address=before.address)
    nodes = required_place(before.count, environment, NUM_NODES)
    nodes = replace(nodes, join_timeout_s=before.join_timeout_s, fewer_allowed=before.fewer_allowed)
    return with_node_options(spec.with_changes(nodes=nodes), options, hosts)


def _is_known_here(name: str) -> bool:
    try:
        return any(_is_own_address(address) for address in resolve(name, name))
    except ProblemError:
        return False


def command_nodes(
    options: NodeOptions,
    machine: Machine,
    hosts: Sequence[str] | None,
    command: Sequence[str],
) -> Nodes | None:
    """Return the nodes of the command of ``ltui exec``; None for one machine.

    Raise ``ProblemError`` if their number is contradictory or the place of this one is unknown.
    """
    environment = machine.node or NodeEnvironment()
    listed = None if hosts is None else len(hosts) + 1
    counts = {
        "--nodes": listed,
        "--num-nodes": options.num_nodes,
        "torchrun --nnodes": torchrun_nodes(command),
    }
    given = {name: count for name, count in counts.items() if count is not None}
    if len(set(given.values())) > 1:
        text = " and ".join(f"{name} gives {count}" for name, count in given.items())
        raise ProblemError.of(
            where="ltui exec",
            what=f"the number of nodes differs: {text}.",
            remedy="Give it once, or make the numbers equal.",
        )
    count = next(iter(given.values()), None) or launcher_count(environment)
    if count is None or count < 2:
        return None
    path = next(iter(given), "the launcher's number of nodes")
    return required_place(count, environment, path)


def required_place(count: int, environment: NodeEnvironment, where: str) -> Nodes:
    """Return the nodes with the place of this one. Raise ``ProblemError`` if it is unknown."""
    nodes, faults = place_among_nodes(count, environment, where)
    if nodes is None:
        raise ProblemError.of(where=where, what=faults[0].what, remedy=faults[0].remedy)
    return nodes


def torchrun_nodes(command: Sequence[str]) -> int | None:
    """Return the number of nodes of a torchrun command that leaves the node's number open.

    None if it is another command, a range of numbers, or has ``--node-rank``.
    """
    if not any(
        os.path.basename(word) == "torchrun" or word == "torch.distributed.run"
        for word in command[:4]
    ):
        return None
    count = None
    for at, word in enumerate(command):
        name, equals, value = word.partition("=")
        option = name.replace("_", "-")
        if option == "--node-rank":
            return None
        if option == "--nnodes":
            text = value if equals else command[at + 1] if at + 1 < len(command) else ""
            count = int(text) if text.isdecimal() else None
    return count


def with_node_options(spec: RunSpec, options: NodeOptions, hosts: Sequence[str] | None) -> RunSpec:
    """Return the specification with the options, checked on node 0. Raise ``ProblemError``."""
    nodes = spec.nodes
    if nodes is None:
        _reject_options(options)
        return spec
    if hosts is not None:
        if nodes.count != len(hosts) + 1:
            raise ProblemError.of(
                where=f"--nodes {options.nodes}",
                what=f"these are {len(hosts) + 1} machines with this one, but "
                f"{NUM_NODES} is {nodes.count}.",
                remedy=f"Leave out --set {NUM_NODES}.",
            )
        nodes = replace(nodes, start="ssh", hosts=tuple(hosts))
    if options.join_timeout is not None:
        nodes = replace(nodes, join_timeout_s=options.join_timeout)
    if options.allow_fewer_nodes:
        nodes = replace(nodes, fewer_allowed=True)
    if nodes.rank == 0:
        nodes = with_reachable_address(nodes)
        _check_address(nodes, explicit=options.address is not None)
        chosen_by_user = options.port is not None or nodes.start in ("srun", "launcher")
        nodes = with_free_ports(nodes, fixed=chosen_by_user)
    return spec.with_changes(nodes=nodes)


def check_fewer_nodes(spec: RunSpec) -> RunSpec:
    """Return the specification. Raise ``ProblemError`` if nothing would leave a node out."""
    allowed = spec.nodes is not None and spec.nodes.fewer_allowed
    if allowed and not spec.restarts and spec.stall.then != "restart":
        raise ProblemError.of(
            where="--allow-fewer-nodes",
            what="the run is not restarted, so it never continues with fewer nodes.",
            remedy="Allow restarts as well: --restarts 3",
        )
    return spec


def _reject_options(options: NodeOptions) -> None:
    """Raise ``ProblemError`` for an option of several machines if there is only one."""
    for name, value in (
        ("--address", options.address),
        ("--port", options.port),
        ("--join-timeout", options.join_timeout),
        ("--allow-fewer-nodes", options.allow_fewer_nodes or None),
        ("--key-file", options.key_file),
    ):
        if value is not None:
            raise ProblemError.of(
                where=name,
                what="the run uses only one machine.",
                remedy=f"Set the number of machines: --set {NUM_NODES}=2",
            )


def _check_address(nodes: Nodes, *, explicit: bool) -> None:
    where = "--address" if explicit else "the address of node 0"
    addresses = resolve(nodes.address, where)
    if not any(_is_own_address(address) for address in addresses):
        raise ProblemError.of(
            where=where,
            what=f"{nodes.address} is not an address of this machine, which is node 0.",
            remedy="Give one that `ip address` lists here, or start the run on that machine.",
        )


def with_reachable_address(nodes: Nodes) -> Nodes:
    """Return the nodes with an address of this machine, node 0, that the others reach.

    Many hosts files give the machine's own name a loopback address. Other machines know the name
    by another one. A loopback address that is given as such is kept: all nodes are on one machine.
    """
    addresses = resolve(nodes.address, "the address of node 0")
    if nodes.address in addresses:
        return nodes  # numeric
    if not all(address.startswith("127.") or address == "::1" for address in addresses):
        return nodes
    return replace(nodes, address=reachable_address() or nodes.address)


def with_free_ports(nodes: Nodes, *, fixed: bool) -> Nodes:
    """Return the nodes with two ports that nobody listens on at this moment.

    ``fixed``: the ports must not change. Raise ``ProblemError`` if they are taken.
    """
    address = resolve(nodes.address, "the address of node 0")[0]
    for pair in range(1 if fixed else _PORT_PAIRS):
        port, control_port = nodes.port + 2 * pair, nodes.control_port + 2 * pair
        taken = next((p for p in (port, control_port) if p and not _is_free(address, p)), None)
        if taken is None:
            return replace(nodes, port=port, control_port=control_port)
    raise ProblemError.of(
        where=f"port {taken}",
        what=f"another program on this machine listens on it, and the run needs {nodes.port} and "
        f"{nodes.control_port}.",
        remedy="Choose other ports: --port N uses N and N + 1.",
    )


def _is_free(address: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((address, port))
        except OSError:
            return False
    return True


def _is_own_address(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as trial:
        try:
            trial.bind((address, 0))
        except OSError:
            return False
    return True
