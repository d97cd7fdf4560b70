"""Key of a run whose nodes a launcher starts: how all of them get the same one.

The first of these that applies:

1. ``LTUI_NODE_KEY``, which the launcher passes to all nodes.
2. ``--key-file PATH`` in a folder that all nodes share. Node 0 creates the file.
3. A file below ``$LTUI_HOME/node-keys``, which works if the nodes share that folder.
4. Under SLURM, node 0 also sends the key to the other nodes by ``srun``, whose connections SLURM
   authenticates. There ``python -m ltui.app.nodes.launcher_key NAME`` writes it from standard input
   to a file in a folder that only this user can read.

The key is never part of a command line.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from ltui.training.config.run_spec import Nodes
from ltui.training.nodes.link_key import KEY_VARIABLE, LinkKey
from ltui.training.nodes.node_address import resolve
from ltui.training.nodes.node_watch import ProbeResult, probe
from ltui.training.problem import ProblemError
from ltui.training.process.python_environment import module_command
from ltui.training.store.run_directory import private_runtime_dir, write_atomically

_POLL_S = 0.5
"""Seconds between two looks for a key."""
SHARED_FOLDER_S = 70.0
"""Seconds after which a file of another node must be visible in a folder on NFS."""
_SRUN_S = 60.0
"""Time limit in seconds of sending the key by srun."""


def key_of_head(nodes: Nodes, key_file: Path | None, home: Path) -> LinkKey:
    """Return the key for node 0, and give it to the other nodes. Raise ``ProblemError``."""
    key = LinkKey.from_environment(os.environ)
    if key is not None:
        return key
    if key_file is not None:
        return LinkKey.read_or_create(key_file)
    key = LinkKey.generate()
    path = home / "node-keys" / key_name(nodes, os.environ)
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_atomically(path, f"{key.text}\n".encode())
    except OSError as error:
        raise ProblemError.of(
            where=str(path),
            what=f"the key of the run's nodes cannot be written ({error.strerror}).",
            remedy=f"Set {KEY_VARIABLE} on every node, or name a file: --key-file PATH",
        ) from error
    if nodes.start == "srun":
        send_by_srun(key, path.name, nodes.count, os.environ)
    return key


def key_of_agent(nodes: Nodes, key_file: Path | None, home: Path, give_up_s: float) -> LinkKey:
    """Return the key for another node; wait for node 0 to provide it. Raise ``ProblemError``.

    ``give_up_s`` is a monotonic time.
    """
    key = LinkKey.from_environment(os.environ)
    if key is not None:
        return key
    head_since_s: float | None = None
    while True:
        addresses = _addresses(nodes)
        places = _places(nodes, addresses, home) if key_file is None else [key_file]
        for path in places:
            if path.exists():
                return LinkKey.read(path)
        now_s = time.monotonic()
        if _head_listens(nodes, addresses):
            head_since_s = head_since_s or now_s
        waited = head_since_s is not None and now_s - head_since_s > SHARED_FOLDER_S
        if waited or now_s > give_up_s:
            raise _missing_key(nodes, places, waited)
        time.sleep(_POLL_S)


def _missing_key(nodes: Nodes, places: list[Path], head_listens: bool) -> ProblemError:
    where = f"node {nodes.rank}"
    if not head_listens:
        return ProblemError.of(
            where=where,
            what=f"node 0 ({nodes.address}) has not started within {nodes.join_timeout_s:g} s.",
            remedy="Start the same command on all nodes; --join-timeout sets the limit.",
        )
    listed = " and ".join(str(path) for path in places)
    return ProblemError.of(
        where=where,
        what=f"node 0 runs, but its key is not here: {listed} is missing.",
        remedy=f"Pass the same {KEY_VARIABLE} to all nodes (`ltui key` prints a new one), or name "
        "a file in a folder that they share: --key-file PATH",
    )


def _places(nodes: Nodes, addresses: Sequence[str], home: Path) -> list[Path]:
    """Return where the key of node 0 may be. Node 0 may use its address in place of its name."""
    spellings = [replace(nodes, address=address) for address in addresses]
    names = dict.fromkeys(key_name(each, os.environ) for each in (nodes, *spellings))
    return [*(home / "node-keys" / name for name in names), *map(local_key, names)]


def _addresses(nodes: Nodes) -> list[str]:
    """Return the addresses of node 0; none if its name cannot be resolved now."""
    try:
        return resolve(nodes.address, nodes.address)
    except ProblemError:
        return []


def _head_listens(nodes: Nodes, addresses: Sequence[str]) -> bool:
    results = [probe(address, nodes.control_port, 1.0) for address in addresses]
    return ProbeResult.ACCEPTED in results


def key_name(nodes: Nodes, environ: Mapping[str, str]) -> str:
    """Return the name of the key file, the same on all nodes of a run."""
    job = environ.get("SLURM_JOB_ID")
    if nodes.start == "srun" and job:
        parts = [job, environ.get("SLURM_STEP_ID", "0"), environ.get("SLURM_RESTART_COUNT", "0")]
        return f"slurm-{'.'.join(parts)}.key"
    place = f"{nodes.address}-{nodes.control_port}".replace("/", "_")
    return f"{place}.key"


def local_key(name: str) -> Path:
    """Return the path of a key that srun has brought to this machine."""
    return private_runtime_dir() / name


def remove_local_key(nodes: Nodes) -> None:
    """Remove the key that srun has brought to this machine, if it has."""
    local_key(key_name(nodes, os.environ)).unlink(missing_ok=True)


def send_by_srun(
    key: LinkKey,
    name: str,
    count: int,
    environ: Mapping[str, str],
    run: Callable[..., object] = subprocess.Popen,
) -> None:
    """Start a job step that writes the key to a file on every node of this one's step.

    It does not wait: a node that gets no key says so itself.
    """
    srun, hosts = shutil.which("srun"), environ.get("SLURM_STEP_NODELIST")
    if srun is None or hosts is None:
        return
    argv = [
        *(srun, f"--jobid={environ['SLURM_JOB_ID']}", f"--nodelist={hosts}", f"--nodes={count}"),
        *("--ntasks-per-node=1", "--overlap", "--mem=0", "--gres=none", "--cpu-bind=none"),
        *("--quiet", "--input=all", "--output=none", f"--time={int(_SRUN_S / 60)}"),
        *module_command("ltui.app.nodes.launcher_key", name),
    ]
    # The variables of this step would be taken for options of the new one.
    kept = {k: v for k, v in environ.items() if k == "SLURM_CONF" or not k.startswith("SLURM_")}
    process = run(
        argv,
        env={k: v for k, v in kept.items() if k != KEY_VARIABLE},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert isinstance(process, subprocess.Popen)
    assert process.stdin is not None
    with process.stdin as stdin:
        stdin.write(f"{key.text}\n".encode())


def main(arguments: list[str]) -> int:
    """Write the key. Return the exit code."""
    try:
        (name,) = arguments
        key = LinkKey.from_text(sys.stdin.read(1024), "standard input")
        write_atomically(local_key(name), f"{key.text}\n".encode())
    except (ProblemError, OSError) as error:
        print(f"ltui: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
