"""Save a checkpoint in which all ranks take part, and check its weights.

``checkpoint_files.py`` defines when a checkpoint is complete on disk. A file without a manifest, or
with another size or checksum, is never resumed from. A sharded checkpoint is a directory; its
manifest lists the checksum of every file. Each rank also writes a small file with its own state
(``resume/exact_state.py``); the manifest lists these files too. Parts of nodes that do not see rank
0's folder are brought there before the manifest is written (``collect_parts``).

Every rank calls ``save_checkpoint`` at the same place and takes part in the same collectives,
whatever fails. Lightning's own ``save_checkpoint`` leaves the other ranks in a barrier if rank 0's
disk is full. Therefore its parts are called here one by one.

A detached node does not see rank 0's folder (``node_folders.py``). Its ranks write their parts into
a staging folder of that node: ``checkpoint`` for the strategy's own files, and the state file of
each rank. Then one rank of the node sends them to rank 0, which writes them to the places where
they would be on a shared file system.

The manifest says whether the weights are ``finite``, ``NaN`` or ``inf``. The check adds no
synchronisation of a GPU: it is queued there before the weights are copied to be saved, and its
result is read when that copy is complete. Files that a program wrote are read only in a rank, and
never unpickled as objects.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from ltui.training.rank.file_transfer import FileEntry, copy_files, gather
from ltui.training.rank.lightning_internals import checkpoint_connector
from ltui.training.rank.node_folders import NodeFolders, own_path_in_broadcasts
from ltui.training.rank.resume.plain_data import tensor_bytes, tensors_of
from ltui.training.rank.training_facts import lightning_version
from ltui.training.shared.checkpoint_files import (
    ReceivedPart,
    checkpoint_name,
    partial_path,
    publish_checkpoint,
    rank_file,
    remove,
    remove_unfinished,
    require_space,
)

STAGED_CHECKPOINT = "checkpoint"
"""Name of the strategy's file or folder in a staging folder."""


Collected = tuple[str | None, dict[Path, ReceivedPart]]
"""The error, None if nothing failed on any rank, and what rank 0 received."""


def collect_parts(
    nodes: NodeFolders, checkpoint: Path, temporary: Path, error: str | None
) -> Collected:
    """Send or receive the parts of ``checkpoint``. All ranks call this together.

    ``error`` is that of this rank; nothing is sent if any rank has one. ``temporary`` is where rank
    0 has the strategy's files. The staging folder of a detached node is removed.
    """
    sends = nodes.detached.get(nodes.node) == nodes.rank
    staging = nodes.staging(checkpoint)
    entries: list[FileEntry] = []
    try:
        if sends and error is None:
            entries = _entries(staging)
    except OSError as failure:
        error = f"{type(failure).__name__}: {failure}"
    try:
        return _receive(nodes, checkpoint, temporary, gather((error, entries)))
    finally:
        if sends:
            remove(staging)


def _receive(
    nodes: NodeFolders,
    checkpoint: Path,
    temporary: Path,
    reports: list[tuple[str | None, list[FileEntry]]],
) -> Collected:
    errors = {rank: error for rank, (error, _) in enumerate(reports) if error is not None}
    received: dict[Path, ReceivedPart] = {}
    for node, source in sorted(nodes.detached.items()):
        if errors:
            break
        entries = reports[source][1]
        paths = None
        if nodes.rank == 0:
            paths = [_target(checkpoint, temporary, entry.name) for entry in entries]
        elif nodes.rank == source:
            paths = [nodes.staging(checkpoint) / entry.name for entry in entries]
        report = copy_files(source, entries, paths, nodes.root_device)
        errors = report.errors
        if nodes.rank == 0 and not errors:
            assert paths is not None
            for path, checksum in zip(paths, report.checksums, strict=True):
                received[path] = ReceivedPart(node=node, sha256=checksum)
    if not errors:
        return None, received
    if nodes.rank in errors:
        return errors[nodes.rank], {}
    texts = [f"{nodes.describe_rank(rank)}: {text}" for rank, text in sorted(errors.items())]
    # Only rank 0 reports what failed elsewhere.
    return "; ".join(texts[:3]) if nodes.rank == 0 else None, {}


def _entries(staging: Path) -> list[FileEntry]:
    files = sorted(path for path in staging.rglob("*") if path.is_file())
    return [
        FileEntry(name=path.relative_to(staging).as_posix(), size_bytes=path.stat().st_size)
        for path in files
    ]


def _target(checkpoint: Path, temporary: Path, name: str) -> Path:
    """Return where rank 0 writes a staged file."""
    first, *rest = PurePosixPath(name).parts
    if first == STAGED_CHECKPOINT:
        return temporary.joinpath(*rest)
    return partial_path(checkpoint.with_name(first))


@dataclass(frozen=True, slots=True)
class SaveResult:
    """How saving ended on this rank. ``error`` is None if it succeeded."""

    path: Path
    size_bytes: int | None = None
    seconds: float = 0.0
    error: str | None = None


def save_checkpoint(
    trainer: Any,
    folder: Path,
    reason: str,
    *,
    manifest_fields: Mapping[str, Any],
    amend: Callable[[dict[str, Any]], None] | None = None,
    rank_state: Callable[[], dict[str, Any]] | None = None,
    nodes: NodeFolders | None = None,
) -> SaveResult:
    """Write one checkpoint. All ranks call it together. No error of a disk is raised.

    ``manifest_fields`` are added to the manifest. ``amend`` may change the dumped dictionary before
    it is written. ``rank_state`` returns this rank's own state. ``nodes`` says where the nodes keep
    checkpoints, if there are several.
    """
    began = time.perf_counter()
    step, epoch = trainer.global_step, trainer.current_epoch
    path = folder / checkpoint_name(step, reason)
    temporary, own_part = _own_places(nodes, path, trainer.global_rank)
    state, error = None, None
    ranks = trainer.world_size if rank_state is not None else 0
    check = WeightsCheck({})
    sharded = saves_with_all_ranks(trainer.strategy)
    try:
        state = None if rank_state is None else rank_state()
        checkpoint = checkpoint_connector(trainer).dump_checkpoint(False)
        if amend is not None:
            amend(checkpoint)
        if sharded or trainer.is_global_zero:
            check = _weights_check(trainer, checkpoint)
        if trainer.is_global_zero:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            remove(temporary)
            require_space(folder, tensor_bytes(checkpoint))
    except Exception as failure:  # noqa: BLE001  (every rank must reach the barrier below)
        error = f"{type(failure).__name__}: {failure}"
    may_save = error is None
    if sharded:
        # The strategy saves in collectives, so either all ranks call it or none.
        may_save = trainer.strategy.reduce_boolean_decision(may_save)
        if not may_save and nodes is None and trainer.is_global_zero:
            error = error or "another rank could not save its part"
    try:
        if may_save:
            several = nodes is not None
            with own_path_in_broadcasts(trainer.strategy, temporary, several_nodes=several):
                trainer.strategy.save_checkpoint(checkpoint, str(temporary))
            if state is not None:
                write_state(own_part, state)
    except Exception as failure:  # noqa: BLE001  (every rank must reach the barrier below)
        error = f"{type(failure).__name__}: {failure}"
        remove(own_part)
    weights = wait_for_all_ranks(trainer.strategy, check, sharded)
    received: Mapping[Path, ReceivedPart] = {}
    if nodes is not None:
        error, received = collect_parts(nodes, path, temporary, error)
        manifest_fields = {**manifest_fields, "node_of_rank": nodes.node_of_rank}
    size: int | None = None
    if trainer.is_global_zero:
        position = {"global_step": step, "epoch": epoch, "reason": reason}
        fields = {**_facts(trainer, weights), **position, **manifest_fields}
        try:
            if error is None:
                path, size = publish_checkpoint(temporary, path, ranks, received, **fields)
        except OSError as failure:
            error = f"{type(failure).__name__}: {failure}"
        if error is not None:
            remove_unfinished(path, temporary)
    return SaveResult(path, size, seconds=time.perf_counter() - began, error=error)


def _facts(trainer: Any, weights: str | None) -> dict[str, str]:
    """Return the versions, and whether the weights are finite, for the manifest."""
    facts = {"torch": torch.__version__, "lightning": lightning_version(trainer)}
    return facts if weights is None else {**facts, "weights": weights}


def _weights_check(trainer: Any, checkpoint: Mapping[str, Any]) -> WeightsCheck:
    """Begin to check this rank's weights in the dumped dictionary."""
    module = trainer.lightning_module
    buffers = {name for name, _ in module.named_buffers()} if module is not None else set()
    return WeightsCheck(checkpoint.get("state_dict") or {}, buffers)


def wait_for_all_ranks(strategy: Any, check: WeightsCheck, sharded: bool) -> str | None:
    """Wait until every rank has saved its part. Return the result for the weights of all."""
    weights = check.result()
    if not sharded:
        strategy.barrier("ltui checkpoint")
        return weights
    for bad in (NAN, INFINITE):
        if not strategy.reduce_boolean_decision(weights != bad):
            weights = bad
    return weights


def _own_places(nodes: NodeFolders | None, checkpoint: Path, rank: int) -> tuple[Path, Path]:
    """Return where this rank's strategy writes, and where the rank writes its own state."""
    own = rank_file(checkpoint, rank)
    if nodes is not None and nodes.is_detached:
        staging = nodes.staging(checkpoint)
        return staging / STAGED_CHECKPOINT, staging / own.name
    return partial_path(checkpoint), partial_path(own)


def saves_with_all_ranks(strategy: Any) -> bool:
    """Return True if ``Strategy.save_checkpoint`` of this strategy may be a collective.

    The method of Lightning's base class writes on rank 0 alone. Strategies that shard the model
    override it.
    """
    base: Any = next((cls for cls in type(strategy).__mro__ if cls.__name__ == "Strategy"), None)
    return base is None or type(strategy).save_checkpoint is not base.save_checkpoint


def write_state(part: Path, state: dict[str, Any]) -> None:
    """Write the own state of a rank and flush it. Raises ``OSError``."""
    # Every rank writes, and the first one creates the folder.
    part.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with part.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


FINITE, NAN, INFINITE = "finite", "NaN", "inf"
"""Values of ``weights`` in a manifest. Without the key the weights were not checked."""
_TORCH_FILES = frozenset({".pt", ".pth", ".bin", ".ckpt"})
_NO_WEIGHTS = ("optimizer", "scheduler", "scaler", "rng_state", "training_args")
"""Beginnings of the names of files that the Hugging Face Trainer saves beside the weights."""


class WeightsCheck:
    """The check of the weights of one checkpoint: begun before they are saved, read afterwards."""

    def __init__(self, weights: Mapping[str, Any], buffers: Collection[str] = ()) -> None:
        """``buffers`` are names of tensors that may be infinite, such as attention masks."""
        self._extremes: list[torch.Tensor] = []
        """On the CPU: a row with the minimum and the maximum of each tensor, by device."""
        self._copies: list[torch.cuda.Event] = []
        self._may_be_infinite: list[bool] = []
        try:
            self._begin(weights, buffers)
        except (RuntimeError, TypeError, AttributeError):
            # There are kinds of tensors, such as float8, of which torch finds no minimum.
            self._extremes = []

    @torch.no_grad()
    def _begin(self, weights: Mapping[str, Any], buffers: Collection[str]) -> None:
        rows: dict[torch.device, list[tuple[torch.Tensor, bool]]] = {}
        for name, value in weights.items():
            for tensor in filter(_is_checked, _local_tensors(value)):
                rows.setdefault(tensor.device, []).append((_extremes(tensor), name in buffers))
        for device, pairs in rows.items():
            table = torch.stack([extremes for extremes, _ in pairs])
            self._extremes.append(table.to("cpu", non_blocking=True))
            self._may_be_infinite += [is_buffer for _, is_buffer in pairs]
            if device.type == "cuda":
                copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                copied.record(torch.cuda.current_stream(device))
                self._copies.append(copied)

    def result(self) -> str | None:
        """Return ``finite``, ``NaN`` or ``inf``; None if the weights could not be checked.

        Call it after the weights were saved.
        """
        for copied in self._copies:
            copied.synchronize()  # Saving has waited for it already.
        pairs = [pair for table in self._extremes for pair in table.tolist()]
        return _worst(zip(pairs, self._may_be_infinite, strict=True)) if pairs else None


def weights_in_files(folder: Path) -> str | None:
    """Return the result for the files that a program wrote into ``folder``.

    None if a file with weights cannot be read as tensors alone, or if there is none.
    """
    pairs: list[list[float]] = []
    try:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            if not path.name.startswith(_NO_WEIGHTS):
                pairs += [_extremes(t).tolist() for t in _tensors_in(path) if _is_checked(t)]
    except Exception:  # noqa: BLE001 - whatever a reader raises, the checkpoint is complete
        return None
    # A program may also save single numbers, such as a best loss that is still infinite.
    return _worst((pair, pair[1] != math.inf) for pair in pairs) if pairs else None


def _tensors_in(path: Path) -> Iterator[torch.Tensor]:
    if path.suffix == ".safetensors":
        # Imported here: only programs that have the library write such files.
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            yield from (file.get_tensor(name) for name in file.keys())  # noqa: SIM118
    elif path.suffix in _TORCH_FILES:
        saved = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        yield from (tensor for tensor in tensors_of(saved) if tensor.dim())


def _is_checked(tensor: torch.Tensor) -> bool:
    return bool(tensor.numel()) and (tensor.is_floating_point() or tensor.is_complex())


def _local_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an entry that are on this rank; a sharded one has a part on each."""
    if hasattr(value, "local_shards"):
        yield from (shard.tensor for shard in value.local_shards())
    elif hasattr(value, "to_local"):
        yield value.to_local()
    else:
        yield from tensors_of(value)


def _extremes(tensor: torch.Tensor) -> torch.Tensor:
    """Return minimum and maximum; both are NaN if the tensor contains NaN."""
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return torch.stack(torch.aminmax(values.detach())).double()


def _worst(extremes: Iterable[tuple[list[float], bool]]) -> str:
    """Return the result for pairs of minimum and maximum, and whether infinities are allowed."""
    result = FINITE
    for (low, high), may_be_infinite in extremes:
        if math.isnan(low):
            return NAN
        if not may_be_infinite and math.isinf(max(-low, high)):
            result = INFINITE
    return result
