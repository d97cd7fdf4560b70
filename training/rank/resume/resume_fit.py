"""Make ``trainer.fit`` resume from the run's checkpoint if the script names none.

Lightning asks its checkpoint connector to load a path just after the ``setup`` hooks. Here the path
is inserted at that time, so the script needs no changed line. A script that passes ``ckpt_path``
itself keeps its own.

Weights-only loading is tried first. A checkpoint that contains other objects (for example a user's
hyperparameters) is loaded in full, but only from the run's own folder, where only this run writes.

A node that does not see rank 0's folder receives all files of the checkpoint and its manifest,
because a rank may need the parts of others: ranks may be on other nodes than when they saved, and a
sharded model may be divided among another number of them. The files are removed when all ranks have
read them.

Restoring an optimizer or a learning rate schedule also restores its settings, so a learning rate
that ``--set`` changed for this attempt would have no effect. Therefore the changed settings are set
again after the restore. A schedule keeps its position and is scaled to the new rate.
"""

from __future__ import annotations

import functools
import inspect
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ltui.training.rank.file_transfer import FileEntry, broadcast, copy_files, gather
from ltui.training.rank.lightning_internals import checkpoint_connector, loaded_checkpoint
from ltui.training.rank.node_folders import NodeFolders, ResumeSource, own_path_in_broadcasts
from ltui.training.rank.resume.exact_state import ExactState
from ltui.training.rank.torch_internals import SCHEDULER_LAST_RATES
from ltui.training.shared.checkpoint_files import describe_file, read_manifest, remove


class CheckpointNotReceivedError(RuntimeError):
    """The checkpoint is damaged, or could not be copied to a node. No rank may train then."""


class ReceivedCheckpoint:
    """The checkpoint that a run of several nodes resumes from, as this rank sees it.

    All ranks call each method together.
    """

    def __init__(self, nodes: NodeFolders, source: ResumeSource) -> None:
        self._nodes, self._source = nodes, source
        self._copied = False
        """True if any node received a copy."""

    def receive(self) -> Path:
        """Return the checkpoint's path on this node; copy the files if the node does not see them.

        Raises ``CheckpointNotReceivedError`` on every rank if a file is missing or a copy failed.
        """
        nodes, source = self._nodes, self._source
        if source.in_folder and not nodes.detached:
            return nodes.folder / source.path.name
        entries, error = broadcast(self._entries() if nodes.rank == 0 else None)
        if error is not None:
            raise CheckpointNotReceivedError(error)
        if not entries:
            return source.path  # no local file: every node opens it by itself
        sees = gather(self._sees(entries))
        writers = {node: rank for node, rank in nodes.writers.items() if not sees[rank]}
        if writers:
            self._copy(entries, writers)
        if nodes.node in writers:
            return nodes.received / source.path.name
        return nodes.folder / source.path.name if source.in_folder else source.path

    def _sees(self, entries: list[FileEntry]) -> bool:
        """Return True if this rank's node sees the checkpoint, or another rank of it decides."""
        nodes = self._nodes
        if nodes.writers.get(nodes.node) != nodes.rank:
            return True
        if self._source.in_folder:
            return not nodes.is_detached
        return _is_whole(self._source.path.parent, entries)

    def _copy(self, entries: list[FileEntry], writers: Mapping[int, int]) -> None:
        """Copy the files to the nodes in ``writers``, where one rank writes for all."""
        nodes, source = self._nodes, self._source
        self._copied = True
        paths = None
        if nodes.rank in writers.values():
            remove(nodes.received)
            paths = [nodes.received / entry.name for entry in entries]
        elif nodes.rank == 0:
            paths = [source.path.parent / entry.name for entry in entries]
        report = copy_files(0, entries, paths, nodes.root_device)
        if report.errors:
            if nodes.rank in writers.values():
                remove(nodes.received)
            rank, text = min(report.errors.items())
            raise CheckpointNotReceivedError(
                f"{source.path.name} could not be copied to every node of the run: "
                f"{nodes.describe_rank(rank)} reported {text}."
            )

    def release(self) -> None:
        """Remove the copies when all ranks have read them."""
        if self._copied:
            dist.barrier()
            if self._nodes.rank in self._nodes.writers.values():
                remove(self._nodes.received)

    def _entries(self) -> tuple[list[FileEntry], str | None]:
        """Return the files of the checkpoint, and the error if one is missing."""
        path = self._source.path
        if not path.exists():
            if self._source.in_folder:
                return [], f"{path.name} is gone from {path.parent}."
            return [], None
        try:
            return _entries_of(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            return [], f"{path.name} cannot be read: {type(error).__name__}: {error}."


def _entries_of(path: Path) -> tuple[list[FileEntry], str | None]:
    """Return the files of a checkpoint, from its manifest if it has one, and the manifest.

    The second value is the error if one of them is missing.
    """
    manifest_path = Path(f"{path}.json")
    manifest = read_manifest(manifest_path)
    if not manifest:
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        return [_entry(path.parent, file) for file in files], None
    parts = {f"{path.name}/{name}": facts for name, facts in manifest.get("files", {}).items()}
    parts = parts or {path.name: manifest}
    parts |= manifest.get("beside") or {}
    entries = []
    for name, facts in parts.items():
        file, size = path.parent / name, int(facts["size_bytes"])
        if not file.is_file() or file.stat().st_size != size:
            found = "is truncated" if file.is_file() else "is missing"
            return [], (
                f"{path.name} is not complete: {name}, written by node {facts.get('node', 0)}, "
                f"{found} in {path.parent}."
            )
        entries.append(FileEntry(name=name, size_bytes=size, sha256=facts["sha256"]))
    return [*entries, _entry(path.parent, manifest_path)], None


def _entry(folder: Path, file: Path) -> FileEntry:
    facts = describe_file(file)
    return FileEntry(name=file.relative_to(folder).as_posix(), **facts)


def _is_whole(folder: Path, entries: list[FileEntry]) -> bool:
    """Return True if all files are in ``folder`` with the same checksums."""
    try:
        return all(
            (folder / entry.name).stat().st_size == entry.size_bytes
            and replace(entry, **describe_file(folder / entry.name)) == entry
            for entry in entries
        )
    except OSError:
        return False


Report = Callable[..., None]
"""Sends an event: ``report(kind, text, **fields)``."""


def resume_from(
    trainer: Any,
    checkpoint: Path,
    report: Report,
    *,
    trusted: bool,
    exact: ExactState | None = None,
    received: ReceivedCheckpoint | None = None,
) -> None:
    """Make the ``fit`` that begins restore ``checkpoint``, and report it as an event.

    ``trusted`` allows unpickling any object. ``exact`` loads this rank's own state too.
    ``received`` gives each node the files if the run has several nodes.
    """
    connector = checkpoint_connector(trainer)
    start = connector.resume_start

    def resume_start(checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> None:
        connector.resume_start = start
        if checkpoint_path:
            text = f"The script resumes from {checkpoint_path}, so {checkpoint} was not used."
            report("note", text)
            start(checkpoint_path, *args, **kwargs)
            return
        path = checkpoint if received is None else received.receive()
        with own_path_in_broadcasts(trainer.strategy, path, several_nodes=received is not None):
            _load(start, path, report, trusted=trusted)
        state = loaded_checkpoint(connector) or read_manifest(Path(f"{path}.json"))
        step, epoch = state.get("global_step", 0), state.get("epoch", 0)
        text = f"Resumed at step {step} from {checkpoint.name}."
        report("resumed", text, path=str(checkpoint), global_step=step, step=step, epoch=epoch)
        if exact is not None:
            exact.load(path)
        if received is not None:
            received.release()

    connector.resume_start = resume_start


def _load(start: Callable[..., None], checkpoint: Path, report: Report, *, trusted: bool) -> None:
    try:
        start(str(checkpoint))
    except pickle.UnpicklingError as refused:
        # Lightning 2.5 has no such argument; it loads checkpoints in full anyway.
        if not trusted or "weights_only" not in inspect.signature(start).parameters:
            raise
        text = (
            f"{checkpoint.name} contains more than weights ({_first_line(refused)}); it was "
            "loaded in full."
        )
        report("note", text)
        start(str(checkpoint), weights_only=False)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__


_RATE_NAMES = ("lr", "learning_rate")


def keep_overrides(trainer: Any, overrides: Sequence[str], report: Callable[[str], None]) -> None:
    """Keep the settings that ``overrides`` name over the restore of the checkpoint.

    An override has the form ``optimizer.init_args.lr=0.01``. ``report(text)`` is called with what
    was kept.
    """
    keys = [text.partition("=")[0].strip() for text in overrides]
    rate = any(key.rpartition(".")[2] in _RATE_NAMES for key in keys)
    names = {key.rpartition(".")[2] for key in keys if "optimizer" in key.split(".")} - {"lr"}
    schedule = {key.rpartition(".")[2] for key in keys if "scheduler" in key}
    if not (rate or names or schedule):
        return
    connector = checkpoint_connector(trainer)
    restore = connector.restore_optimizers_and_schedulers

    @functools.wraps(restore)
    def restore_optimizers_and_schedulers() -> None:
        connector.restore_optimizers_and_schedulers = restore
        configured = [[dict(group) for group in o.param_groups] for o in trainer.optimizers]
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        settings_to_keep = [{n: vars(s)[n] for n in schedule if n in vars(s)} for s in schedulers]
        restore()
        kept = []
        for optimizer, groups in zip(trainer.optimizers, configured, strict=True):
            for group, new in zip(optimizer.param_groups, groups, strict=True):
                kept += _keep_settings(group, new, names)
                kept += _rescale(optimizer, group, new, schedulers) if rate else []
        for scheduler, settings in zip(schedulers, settings_to_keep, strict=True):
            vars(scheduler).update(settings)
            kept += [f"{name} {value:g}" for name, value in settings.items() if _is_number(value)]
        if kept:
            report(f"Continues with {', '.join(dict.fromkeys(kept))} instead of the checkpoint's.")

    connector.restore_optimizers_and_schedulers = restore_optimizers_and_schedulers


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _keep_settings(group: dict[str, Any], new: Mapping[str, Any], names: set[str]) -> list[str]:
    """Set the settings ``names`` of a parameter group to the values in ``new``."""
    changed = [n for n in sorted(names) if n in new and n in group and group[n] != new[n]]
    for name in changed:
        group[name] = new[name]
    return [f"{name} {new[name]}" for name in changed]


def _rescale(
    optimizer: Any, group: dict[str, Any], new: Mapping[str, Any], schedulers: Sequence[Any]
) -> list[str]:
    """Scale the group's learning rate and its schedules to the configured rate.

    ``initial_lr`` exists if a schedule starts from it.
    """
    rate_before = float(group.get("initial_lr", group["lr"]))
    configured_rate = float(new.get("initial_lr", new["lr"]))
    if rate_before == configured_rate:
        return []
    if rate_before == 0.0:
        group["lr"] = configured_rate
    else:
        group["lr"] = group["lr"] * (configured_rate / rate_before)
    if "initial_lr" in group:
        group["initial_lr"] = configured_rate
    index = next(i for i, each in enumerate(optimizer.param_groups) if each is group)
    for scheduler in schedulers:
        if getattr(scheduler, "optimizer", None) is not optimizer:
            continue
        for name, value in (("base_lrs", configured_rate), (SCHEDULER_LAST_RATES, group["lr"])):
            rates = getattr(scheduler, name, None)
            if isinstance(rates, list) and index < len(rates):
                rates[index] = value
    return [f"learning rate {group['lr']:g}"]
