"""Start a run on several machines as node 0, and bring the other nodes to it."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path

from ltui.app.nodes.launcher_key import key_of_head
from ltui.app.nodes.ssh_nodes import check_hosts, join_hosts, remote_program
from ltui.training.config.run_spec import Nodes, RunSpec
from ltui.training.lifecycle.run_status import resolve_snapshot
from ltui.training.lifecycle.supervisor_client import ControlClient
from ltui.training.nodes.link_key import KEY_FILE_NAME, KEY_VARIABLE, LinkKey
from ltui.training.nodes.node_address import format_host_and_port, link_place_path, read_link_place
from ltui.training.problem import ProblemError
from ltui.training.process.identity import lock_holder
from ltui.training.state.run_snapshot import LIVE
from ltui.training.store.run_directory import RunDir, write_atomically

_KILL_S = 30.0
"""Seconds to wait for the end of a run whose nodes could not be started."""
Start = Callable[[Mapping[str, str]], RunDir]
"""Start the run with these additional private files in its directory (name -> text)."""


def start_head(spec: RunSpec, options: Namespace, home: Path, start: Start) -> RunDir:
    """Start node 0 and, by ssh, the other nodes; print what to do on them if that is all.

    Raise ``ProblemError`` if a node cannot be started. Then nothing is left running anywhere.
    """
    assert spec.nodes is not None
    program = remote_program(getattr(options, "remote_ltui", None))
    if spec.nodes.start == "ssh":
        check_hosts(spec.nodes.hosts, program)
    key = _key(spec.nodes, options, home)
    # The ranks must not inherit it; the supervisor reads the file.
    os.environ.pop(KEY_VARIABLE, None)
    run_dir = start({KEY_FILE_NAME: f"{key.text}\n"})
    if spec.nodes.start == "ssh":
        try:
            join_hosts(spec.nodes.hosts, program, head_place(run_dir, spec.nodes), key)
        except BaseException:
            _end(run_dir)
            raise
    elif spec.nodes.start == "by hand":
        print("\n".join(join_lines(run_dir, spec.nodes)), flush=True)
    return run_dir


def _key(nodes: Nodes, options: Namespace, home: Path) -> LinkKey:
    key_file = getattr(options, "key_file", None)
    path = None if key_file is None else Path(key_file)
    if nodes.start in ("srun", "launcher"):
        return key_of_head(nodes, path, home)
    if path is not None:
        return LinkKey.read_or_create(path)
    return LinkKey.from_environment(os.environ) or LinkKey.generate()


def head_place(run_dir: RunDir, nodes: Nodes) -> str:
    """Return ``HOST:PORT`` at which the other nodes join the run."""
    place = read_link_place(run_dir)
    port = nodes.control_port if place is None else place.port
    return format_host_and_port(nodes.address, port)


def join_lines(run_dir: RunDir, nodes: Nodes) -> list[str]:
    """Return what to run on the other machines."""
    others = nodes.count - 1
    key_file = shlex.quote(str(run_dir.path / KEY_FILE_NAME))
    return [
        f"{run_dir.id} waits up to {nodes.join_timeout_s:g} s for "
        + (
            "one more machine. On it, run:"
            if others == 1
            else f"{others} more machines. On each, run:"
        ),
        f"  ltui join {head_place(run_dir, nodes)} --key-file {key_file}",
        "That file is the key of the run. Unless the machines share its folder, copy it to them "
        "first, and keep it secret.",
    ]


def prepare_next_attempt(run_dir: RunDir, files: Mapping[str, str]) -> None:
    """Write the private files of a run that is resumed, and forget where its link was.

    The stored place belongs to the ports of the earlier attempt.
    """
    if lock_holder(run_dir.lock_path) is not None:
        return  # it is live, so the resume is refused
    for name, text in files.items():
        write_atomically(run_dir.path / name, text.encode())
    link_place_path(run_dir).unlink(missing_ok=True)


def _end(run_dir: RunDir) -> None:
    """Kill a run whose other nodes could not be started, and wait for its end."""
    deadline = time.monotonic() + _KILL_S
    with contextlib.suppress(ProblemError):
        ControlClient(run_dir).request({"cmd": "kill"})
        while time.monotonic() < deadline and resolve_snapshot(run_dir).state in LIVE:
            time.sleep(0.1)
