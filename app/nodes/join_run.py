"""Join a run as one of its nodes: get the specification, check it here, start the agent, follow it.

The machine is named by a person (``ltui join``) or by the launcher that started this process. Until
the node has ended, the command waits in the foreground, and signals stop the run.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from ltui.app.command_output import EXIT_DONE, EXIT_FAILED
from ltui.app.interrupt_signals import ReceivedSignals
from ltui.app.launch.local_machine import detect_machine
from ltui.app.launch.training_interpreter import (
    REQUIRED_PACKAGES,
    choose_python,
    class_faults,
    class_uses,
    malicious_packages,
    missing_packages,
    probe_interpreter,
)
from ltui.app.nodes.launcher_key import SHARED_FOLDER_S, key_of_agent, remove_local_key
from ltui.training.config.device_selection import choose_devices
from ltui.training.config.run_spec import Nodes, RunSpec
from ltui.training.lifecycle.delete_runs import (
    agent_directory,
    remove_after_end,
    remove_unneeded_agents,
)
from ltui.training.lifecycle.launch_run import check_start, home_not_writable
from ltui.training.lifecycle.rank_package import install_rank_package
from ltui.training.lifecycle.run_processes import (
    engine_exit,
    kill_run_processes,
    latest_attempt,
    shim_identity,
)
from ltui.training.lifecycle.supervisor_client import start_supervisor
from ltui.training.nodes.link_key import KEY_FILE_NAME, KEY_VARIABLE, LinkKey
from ltui.training.nodes.messages import JoinOffer
from ltui.training.nodes.node_address import LinkPlace, write_link_place
from ltui.training.nodes.node_places import (
    JoinClient,
    LinkRefusedError,
    missing_files,
    training_versions,
    version_difference,
)
from ltui.training.problem import Problem, ProblemError
from ltui.training.process.identity import lock_holder
from ltui.training.store.history_place import remove_history
from ltui.training.store.run_directory import RunDir, make_private_folders, write_atomically
from ltui.training.store.spec_file import parse_spec

MAX_PATHS_NAMED = 3
"""Maximum number of missing files that a message names."""


class JoinRequestOptions(Struct, frozen=True, kw_only=True):
    """What the user or the launcher says about this node."""

    node: int | None = None
    """Number of the node; None for the lowest that is free."""
    python: str | None = None
    """Training interpreter, if it is not that of node 0."""
    cwd: Path | None = None
    """Working directory of the ranks, if it is not that of node 0."""
    give_up_s: float | None = None
    """Monotonic time until which node 0 may still have to start; None if it must be there."""


class JoinedNode(Struct, frozen=True):
    """A node whose agent was started."""

    run_dir: RunDir
    """Directory of the agent."""
    spec: RunSpec
    node: int
    head: str
    """Host name of node 0."""


def join_run(
    home: Path, key: LinkKey, host: str, port: int, options: JoinRequestOptions
) -> JoinedNode:
    """Join the run whose head listens at ``host`` and ``port``. Return when the agent is started.

    Raise ``ProblemError`` if the head refuses this machine, or if the machine cannot run the
    specification. Then nothing is left running here, and the head has the place back.
    """
    with closing(JoinClient(key, host, port, home)) as client:
        offer = client.ask(options.node, give_up_s=options.give_up_s)
        try:
            spec = _own_spec(offer, options)
            _check(offer, spec)
            run_dir = _create_directory(home, offer, spec, key, LinkPlace(host, port))
        except ProblemError as error:
            client.decline(offer.node, str(error.problems[0]))
            raise
    try:
        start_supervisor(run_dir, offer.plan.on_another_node())
    except ProblemError:
        if lock_holder(run_dir.lock_path) is None:
            kill_run_processes(run_dir)
        raise
    return JoinedNode(run_dir, spec, offer.node, offer.head)


def _own_spec(offer: JoinOffer, options: JoinRequestOptions) -> RunSpec:
    """Return the specification of the head with the paths of this machine."""
    spec = parse_spec(offer.spec, f"the specification of {offer.run_id}")
    if options.cwd is not None:
        spec = spec.with_changes(cwd=str(options.cwd.absolute()))
    if options.python is not None:
        spec = spec.with_changes(python=choose_python(options.python, os.environ))
    elif spec.command is None and not os.access(spec.python, os.X_OK):
        spec = spec.with_changes(python=choose_python(None, os.environ))
    return spec


def _check(offer: JoinOffer, spec: RunSpec) -> None:
    """Raise ``ProblemError`` with what keeps this machine from running the specification."""
    if not Path(spec.cwd).is_dir():
        raise ProblemError.of(
            where=f"node {offer.node} of {offer.run_id}",
            what=f"the working directory {spec.cwd} of node 0 does not exist on this machine.",
            remedy="Create it, or name the one to use here: --cwd DIRECTORY",
        )
    if problems := [*_interpreter_problems(spec), *_device_problems(spec)]:
        raise ProblemError(*problems)
    difference = version_difference(offer.versions, training_versions(spec))
    if difference is not None:
        raise ProblemError.of(
            where=spec.python,
            what=f"{difference}.",
            remedy="Install the same version, or give another interpreter with --python.",
        )
    if missing := missing_files(offer, spec.cwd):
        more = f" and {len(missing) - MAX_PATHS_NAMED} more" if len(missing) > 3 else ""
        names = ", ".join(missing[:MAX_PATHS_NAMED]) + more
        raise ProblemError.of(
            where=f"node {offer.node} of {offer.run_id}",
            what=f"the configuration names files that node 0 has and this machine lacks: {names}.",
            remedy="Copy them here. If the training makes a folder by itself, create it empty.",
        )
    check_start(spec, interpreter_checked=True)


def _interpreter_problems(spec: RunSpec) -> list[Problem]:
    """Return what the training interpreter of this machine lacks for a preset."""
    if spec.config is None:
        return []
    uses = class_uses(spec.config)
    report = probe_interpreter(
        spec.python,
        list(REQUIRED_PACKAGES),
        {use.place: use.class_path for use in uses},
        [*spec.python_path, spec.cwd],
    )
    if problems := malicious_packages(report) or missing_packages(report, REQUIRED_PACKAGES):
        return problems
    return [
        Problem(where=fault.path, what=fault.what, remedy=fault.remedy)
        for fault in class_faults(uses, report)
    ]


def _device_problems(spec: RunSpec) -> list[Problem]:
    """Return a problem if this machine lacks the GPUs that each node uses."""
    trainer = (spec.config or {}).get("trainer")
    if not isinstance(trainer, Mapping) or trainer.get("accelerator") == "cpu":
        return []
    _, faults = choose_devices(trainer, detect_machine(os.environ), spec.nproc)
    return [Problem(where=f.path, what=f.what, remedy=f.remedy) for f in faults]


def _create_directory(
    home: Path, offer: JoinOffer, spec: RunSpec, key: LinkKey, place: LinkPlace
) -> RunDir:
    """Create or renew the directory of the agent. Raise ``ProblemError``."""
    run_dir = agent_directory(home, offer.run_id, offer.node)
    holder = lock_holder(run_dir.lock_path)
    if holder is not None:
        raise ProblemError.of(
            where=f"node {offer.node} of {offer.run_id}",
            what=f"its agent runs on this machine already (pid {holder.pid}).",
            remedy="Join once on each machine. A second node here needs a LTUI_HOME of its own.",
        )
    remove_unneeded_agents(home)
    try:
        install_rank_package(home)
        # Node 0 has everything that an agent of an earlier attempt recorded here.
        for name in ("logs", "queue", "engine"):
            shutil.rmtree(run_dir.path / name, ignore_errors=True)
        remove_history(run_dir)
        for name in ("logs", "queue", "engine", "checkpoints"):
            make_private_folders(run_dir.path / name)
        write_atomically(run_dir.path / KEY_FILE_NAME, f"{key.text}\n".encode())
        write_link_place(run_dir, place)
        assert spec.nodes is not None
        run_dir.write_spec(spec.with_changes(nodes=replace(spec.nodes, rank=offer.node)))
    except OSError as error:
        raise home_not_writable(home, error) from error
    return run_dir


_RETRY_S = 1.0
"""Seconds between two attempts with a key that was refused."""


def join_by_launcher(
    nodes: Nodes, key_file: str | None, python: str | None, home: Path
) -> JoinedNode:
    """Join the run of the node 0 that the same launcher starts. Wait until it listens.

    Raise ``ProblemError`` if that fails.
    """
    give_up_s = time.monotonic() + nodes.join_timeout_s
    refused_since_s: float | None = None
    path = None if key_file is None else Path(key_file)
    while True:
        key = key_of_agent(nodes, path, home, give_up_s)
        options = JoinRequestOptions(
            node=nodes.rank, python=python, cwd=Path.cwd(), give_up_s=give_up_s
        )
        try:
            joined = join_run(home, key, nodes.address, nodes.control_port, options)
        except LinkRefusedError:
            # The file may still be that of an earlier run.
            now_s = time.monotonic()
            refused_since_s = refused_since_s or now_s
            if KEY_VARIABLE in os.environ or now_s - refused_since_s > SHARED_FOLDER_S:
                raise
            time.sleep(_RETRY_S)
        else:
            os.environ.pop(KEY_VARIABLE, None)
            remove_local_key(nodes)
            return joined


_POLL_S = 0.25
"""Seconds between two looks at the agent."""
_GONE_S = 3.0
"""Seconds without an agent after which the node has ended; the shim restarts it sooner."""


def joined_line(joined: JoinedNode) -> str:
    """Return the first line of a node that has joined."""
    assert joined.spec.nodes is not None
    return (
        f"joined {joined.spec.id} as node {joined.node} of {joined.spec.nodes.count}; "
        f"node 0 is {joined.head}, where the run is shown and stopped."
    )


def follow_agent(joined: JoinedNode, signals: ReceivedSignals) -> int:
    """Wait until the agent has ended. Return the exit code of ``ltui join``.

    The first Ctrl-C stops the run with a checkpoint. The second kills the ranks of this node.
    """
    run_dir = joined.run_dir
    last_seen_s = time.monotonic()
    while time.monotonic() - last_seen_s < _GONE_S:
        agent = lock_holder(run_dir.lock_path)
        shim = shim_identity(run_dir)
        if agent is not None or (shim is not None and shim.alive()):
            last_seen_s = time.monotonic()
        elif agent is None and not run_dir.lock_path.stat().st_size:
            break  # it has ended regularly
        if signals.leave is not None:
            keeps = f"node {joined.node} of {joined.spec.id} keeps running."
            print(keeps, file=sys.stderr, flush=True)
            return 128 + signals.leave
        request = signals.next_request()
        if request is not None and request["cmd"] == "kill":
            print("killing the ranks of this node", flush=True)
            kill_run_processes(run_dir)
        elif request is not None and agent is not None:
            print("asking node 0 to stop the run with a checkpoint", flush=True)
            with contextlib.suppress(OSError):
                os.kill(agent.pid, signal.SIGINT)
        time.sleep(_POLL_S)
    code = _report_end(joined)
    remove_after_end(run_dir)
    return code


def _report_end(joined: JoinedNode) -> int:
    attempt = latest_attempt(joined.run_dir)
    end = None if attempt is None else engine_exit(joined.run_dir, attempt)
    succeeded = end is not None and end.exit_code == 0
    how = "has ended" if succeeded else "ended with an error; node 0 shows the reason"
    print(f"node {joined.node} of {joined.spec.id} {how}.", flush=True)
    return EXIT_DONE if succeeded else EXIT_FAILED
