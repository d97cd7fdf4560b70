"""Where the ranks of each node keep checkpoints, if a run has several nodes.

The run's checkpoints are in the folder of rank 0. Another node may see the same folder, on a shared
file system: at rank 0's path, or as the folder of its own run directory. Otherwise it is
*detached*: its ranks write into its own folder, and files travel between that folder and rank 0's
(``file_transfer.py``).

The ranks find out by a file with a random name that rank 0 creates: who finds it in a folder sees
rank 0's folder there. A node that sees the file too late is taken for detached. This costs time and
harms nothing, because a detached node uses names of its own.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ltui.training.rank.file_transfer import broadcast, gather
from ltui.training.shared.checkpoint_files import fit_number, remove
from ltui.training.shared.rank_environment import RankEnvironment

_LEFTOVER = re.compile(r"\.step-.+\.node-\d{5}\.part|received-\d{5}")
"""Names in a detached node's folder that an earlier attempt may have left."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeSource:
    """The checkpoint to resume from, as rank 0 sees it."""

    path: Path
    fit: int
    """The number of the script's ``fit`` that saved it."""
    in_folder: bool
    """True if it is in rank 0's checkpoint folder."""
    trusted: bool
    """True if only this run writes where it is, so that any object in it may be unpickled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFolders:
    """The nodes of all ranks, seen from one rank."""

    rank: int
    node_of_rank: tuple[int, ...]
    folder: Path
    """Rank 0's checkpoint folder as this rank sees it; that of its own node if it is detached."""
    detached: Mapping[int, int]
    """Each detached node, and the rank that reads and writes files for it."""
    writers: Mapping[int, int]
    """Each node but that of rank 0, and the rank that writes files for it."""
    resume: ResumeSource | None
    root_device: Any

    @property
    def node(self) -> int:
        """The number of this rank's node."""
        return self.node_of_rank[self.rank]

    @property
    def is_detached(self) -> bool:
        """True if this rank's node does not see rank 0's folder."""
        return self.node in self.detached

    def staging(self, checkpoint: Path) -> Path:
        """Return the folder in which a detached node collects its parts of ``checkpoint``."""
        return checkpoint.with_name(f".{checkpoint.name}.node-{self.node:05d}.part")

    @property
    def received(self) -> Path:
        """The folder in which this node receives a checkpoint that it does not see."""
        return self.folder / f"received-{self.node:05d}"

    def describe_detached(self) -> str:
        """Return a sentence about the nodes that do not see rank 0's folder."""
        numbers = ", ".join(map(str, sorted(self.detached)))
        nodes = f"Node {numbers} does" if len(self.detached) == 1 else f"Nodes {numbers} do"
        return (
            f"{nodes} not see the checkpoint folder of rank 0, {self.folder}, so the parts of a "
            "checkpoint travel through the process group: to rank 0 when it is saved, and back "
            "when the run resumes."
        )

    def describe_rank(self, rank: int) -> str:
        """Return ``rank 3 on node 1``."""
        return f"rank {rank} on node {self.node_of_rank[rank]}"


_found: tuple[object, NodeFolders] | None = None


def node_folders(trainer: Any, environment: RankEnvironment) -> NodeFolders | None:
    """Return the folders of the nodes; None if all ranks run on one machine.

    All ranks call this together. Only the first call of an attempt asks the other ranks.
    """
    global _found
    if environment.nodes < 2 or trainer.num_nodes < 2:
        return None
    if not (dist.is_available() and dist.is_initialized()):
        return None
    key = (os.getpid(), environment, trainer.world_size)
    if _found is None or _found[0] != key:
        _found = key, find_node_folders(trainer, environment)
    return _found[1]


def find_node_folders(trainer: Any, environment: RankEnvironment) -> NodeFolders:
    """Ask all ranks for their folders. An error of a disk does not raise."""
    own_folder, rank = environment.checkpoints_dir, trainer.global_rank
    token = f".seen-by-ranks-{secrets.token_hex(16)}"
    resume = None
    if rank == 0:
        resume = resume_source(environment, several_nodes=True)
        with contextlib.suppress(OSError):  # then every other node is taken for detached
            own_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            (own_folder / token).touch(mode=0o600)
    token, resume, head_folder = broadcast((token, resume, own_folder.absolute()))
    folder = next((path for path in (own_folder, head_folder) if _sees(path, token)), None)
    if folder != own_folder and trainer.local_rank == 0 and rank != 0:
        for name in filter(_LEFTOVER.fullmatch, _names(own_folder)):
            remove(own_folder / name)
    facts = gather((trainer.node_rank, folder is not None))
    if rank == 0:
        remove(own_folder / token)
    head = facts[0][0]
    writers: dict[int, int] = {}
    for other, (node, _) in enumerate(facts):
        if node != head:
            writers.setdefault(node, other)
    # All ranks of a node use one folder, so all have to see rank 0's.
    blind = {node for node, sees in facts if not sees} - {head}
    return NodeFolders(
        rank=rank,
        node_of_rank=tuple(node for node, _ in facts),
        folder=own_folder if folder is None or facts[rank][0] in blind else folder,
        detached={node: writer for node, writer in writers.items() if node in blind},
        writers=writers,
        resume=resume,
        root_device=trainer.strategy.root_device,
    )


def resume_source(environment: RankEnvironment, *, several_nodes: bool) -> ResumeSource | None:
    """Return the checkpoint from which the run resumes; None if it starts from the beginning.

    On one machine a checkpoint in a subfolder of the run's is trusted too. Each of several nodes
    may open another file at that path, so there it is not.
    """
    path = environment.resume_from
    if path is None:
        return None
    own_folder, parents = environment.checkpoints_dir.resolve(), path.resolve().parents
    in_folder = parents[0] == own_folder
    return ResumeSource(
        path=path,
        fit=fit_number(path),
        in_folder=in_folder,
        trusted=in_folder if several_nodes else own_folder in parents,
    )


def _sees(folder: Path, token: str) -> bool:
    """Return True if the file ``token`` is in ``folder``, and this rank may write there."""
    return token in _names(folder) and os.access(folder, os.W_OK | os.X_OK)


def _names(folder: Path) -> set[str]:
    # Listing asks a network file system again. Testing a single name may use an old answer.
    try:
        return {path.name for path in folder.iterdir()}
    except OSError:
        return set()


@contextlib.contextmanager
def own_path_in_broadcasts(strategy: Any, path: Path, *, several_nodes: bool) -> Iterator[None]:
    """Let the strategy use this rank's ``path`` where it would use that of rank 0.

    Do nothing if all ranks are on one machine.

    Strategies that shard a model broadcast rank 0's path before they write or read their parts. On
    another node the checkpoint may have another path.
    """
    if not several_nodes:
        yield
        return
    original = strategy.broadcast

    def broadcast_other_objects(obj: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(obj, *args, **kwargs)
        return obj if isinstance(obj, (str, Path)) and str(obj) == str(path) else result

    strategy.broadcast = broadcast_other_objects
    try:
        yield
    finally:
        vars(strategy).pop("broadcast", None)
