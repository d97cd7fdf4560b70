"""Checkpoints of a run: which ones exist and which are complete. Reads manifests, without torch.

The manifest ``NAME.ckpt.json`` is written after the checkpoint itself, so a checkpoint without one
was never completed. Checksums of large files take seconds; sizes cost nothing. The catalog of a
live run verifies each checkpoint once, and lists those that its script has saved as well.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ltui.training.json_codec import WRONG_CONTENT, from_json, parse_json
from ltui.training.problem import ProblemError
from ltui.training.shared.checkpoint_files import UNFINISHED_FILE, checkpoint_name, describe_file
from ltui.training.shared.regular_files import read_regular
from ltui.training.state.good_checkpoints import (
    badness,
    last_good_checkpoint,
    newest_checkpoint,
    progress_key,
)
from ltui.training.state.run_snapshot import CheckpointInfo, RunSnapshot
from ltui.training.store.history_queries import Span, counts
from ltui.training.store.history_reader import RunStore
from ltui.training.store.run_directory import RunDir, paths_in

_SKIPPED_NAMED = 3
"""Maximum number of skipped checkpoints that a sentence names."""
_WEIGHTS = frozenset({"finite", "NaN", "inf"})
"""Values of ``weights`` in a manifest (``rank/coordination/save_checkpoint.py``)."""
_UNREADABLE = (OSError, *WRONG_CONTENT)
"""Errors of a manifest that is missing, is not JSON or lacks a key."""


def list_checkpoints(folder: Path, spans: Sequence[Span] | None = None) -> list[CheckpointInfo]:
    """Return every checkpoint that has a manifest, the one with the fewest steps first.

    ``ok`` is False if a file is missing or has another size. Otherwise it is None, because only
    ``verify`` reads checksums. ``spans`` are the steps that count, by default those of the history.
    """
    manifests = (p for p in paths_in(folder) if re.fullmatch(r"[^.].*\.ckpt\.json", p.name))
    infos = [info for path in manifests if (info := _read_manifest(path)) is not None]
    if spans is None and infos:
        spans = _stored_spans(folder)
    if spans:
        infos = [replace(info, superseded=_is_superseded(info, spans)) for info in infos]
    return sorted(infos, key=lambda info: (info.global_step, info.saved_at or 0.0))


def _is_superseded(info: CheckpointInfo, spans: Sequence[Span]) -> bool:
    return bool(info.attempt) and not counts(spans, info.attempt or 0, info.global_step)


def _stored_spans(folder: Path) -> Sequence[Span]:
    """Return the steps that count by the history of the run; empty if it cannot be read."""
    try:
        with RunStore(RunDir(folder.parent)) as store:
            return store.spans()
    except ProblemError:
        return ()


def saved_by(path: Path) -> int | None:
    """Return the attempt that saved a checkpoint; None if its manifest does not say so."""
    info = _read_manifest(Path(f"{path}.json"))
    return None if info is None else info.attempt


def verify(info: CheckpointInfo) -> CheckpointInfo:
    """Return ``info`` with ``ok`` set from size and checksum; this reads the whole checkpoint."""
    return replace(info, ok=damage_of(info) is None)


class ResumeChoice(Struct, frozen=True, kw_only=True):
    """The checkpoint that a resume uses, and the newer ones that it skips."""

    taken: CheckpointInfo | None
    skipped: tuple[str, ...] = ()
    """One text for each skipped checkpoint: file name and reason, the newest first."""
    undamaged: bool = False
    """True if a checkpoint was skipped that is complete, but not from before the first NaN."""

    def why_none(self) -> str:
        """Return why no checkpoint is taken: ``there is no checkpoint before the NaN (...)``."""
        if not self.skipped:
            return "no checkpoint was completed"
        what = "there is no checkpoint before the NaN"
        if not self.undamaged:
            what = f"none of its {len(self.skipped)} checkpoints is complete"
        more = len(self.skipped) - _SKIPPED_NAMED
        texts = [*self.skipped[:_SKIPPED_NAMED], *([f"and {more} more"] if more > 0 else [])]
        return f"{what} ({'; '.join(texts)})"


def choose_checkpoint(folder: Path, since: int | None = None) -> ResumeChoice:
    """Return the good checkpoint with the most progress, and why later ones are skipped.

    ``since``: the step since which the loss is NaN; the run goes back before it.

    Checkpoints of the last attempt come first: after a resume from an earlier step, the later
    steps of the previous attempt are no longer part of the run. Timestamps are not compared,
    because clocks may be set back.
    """
    infos = list_checkpoints(folder)
    unfinished = [(_modified_at(path), path.name) for path in _without_manifest(folder, infos)]
    skipped: list[str] = []
    taken: CheckpointInfo | None = None
    undamaged = False
    for info in sorted(infos, key=progress_key, reverse=True):
        reason = None if info.ok is False else badness(info, since)
        undamaged = undamaged or reason is not None
        reason = reason or damage_of(info)
        if reason is None:
            taken = replace(info, ok=True)
            break
        skipped.append(f"{Path(info.path).name} {reason}")
    saved_at = 0.0 if taken is None else _modified_at(Path(f"{taken.path}.json"))
    newer = [name for at, name in sorted(unfinished, reverse=True) if at > saved_at]
    unfinished_texts = [f"{name} was never completed" for name in newer]
    return ResumeChoice(taken=taken, skipped=(*unfinished_texts, *skipped), undamaged=undamaged)


def checkpoint_to_resume(folder: Path, since: int | None = None) -> CheckpointInfo | None:
    """Return the checkpoint to resume from; this verifies it."""
    return choose_checkpoint(folder, since).taken


def furthest_checkpoint(folder: Path, since: int | None = None) -> CheckpointInfo | None:
    """Return the good checkpoint with the most progress, without verifying its checksums."""
    return last_good_checkpoint(list_checkpoints(folder), since)


def import_checkpoint(info: CheckpointInfo, folder: Path) -> CheckpointInfo:
    """Import another run's checkpoint into ``folder``, as the one that a new run starts from.

    Files are hard-linked if possible: no run changes them, and each run may be deleted alone.
    Raise ``OSError``, or ``ValueError`` for a manifest that cannot be read.
    """
    source = Path(info.path)
    manifest = _load_manifest(source)
    target = folder / checkpoint_name(info.global_step, "from")
    other_files = {}
    for name, facts in (manifest.get("beside") or {}).items():
        own_name = name.replace(source.name, target.name, 1)
        _link_or_copy(source.parent / name, folder / own_name)
        other_files[own_name] = facts
    _link_or_copy(source, target)
    # Attempt 0 is older than every attempt of this run, so its own checkpoints are newer.
    manifest.update(file=target.name, beside=other_files, attempt=0, reason="from")
    Path(f"{target}.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    return replace(info, path=str(target), reason="from")


def _link_or_copy(source: str | Path, target: str | Path) -> None:
    if Path(source).is_dir():
        shutil.copytree(source, target, copy_function=_link_or_copy)
        return
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
    os.chmod(target, 0o600)


def damage_of(info: CheckpointInfo) -> str | None:
    """Return why a checkpoint cannot be used, None if it can; reads the whole checkpoint."""
    path = Path(info.path)
    try:
        parts = list(_parts(path, _load_manifest(path)))
    except _UNREADABLE:
        return "has a manifest that cannot be read"
    if not parts:
        return "has a manifest that names no file"
    for part in parts:
        if (reason := _damage_of_part(part)) is not None:
            # The whole checkpoint, or one of the files that it consists of.
            own = "" if part.path == path else f"is damaged: {part.path.name}{part.writer} "
            return own + reason
    return None


def _damage_of_part(part: _Part) -> str | None:
    try:
        if not part.path.is_file():
            return "is gone"
        size = part.path.stat().st_size
        if size != part.size_bytes:
            return f"is truncated: {size} of {part.size_bytes} bytes"
        if describe_file(part.path)["sha256"] != part.sha256:
            return "has a different checksum than its manifest"
    except FileNotFoundError:
        return "is gone"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None


def _without_manifest(folder: Path, infos: list[CheckpointInfo]) -> list[Path]:
    """Return the files of checkpoints that were never completed."""
    completed = {info.path for info in infos}
    paths = (p for p in paths_in(folder) if re.fullmatch(r".*\.ckpt|\..*\.ckpt\.part", p.name))
    return [path for path in paths if str(path) not in completed]


def remove_unfinished(folder: Path) -> list[str]:
    """Remove the files of checkpoints that were never completed; return their names.

    Call this only while no rank is alive. Only files that ltui's ranks write are removed. A
    checkpoint that has a manifest stays, even if it is damaged.
    """
    removed = []
    for path in sorted(paths_in(folder)):
        match = UNFINISHED_FILE.fullmatch(path.name)
        if match is None or (not match["dot"] and (folder / f"{match['name']}.json").exists()):
            continue
        with contextlib.suppress(OSError):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
            removed.append(path.name)
    return removed


def _modified_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


_SHOWN = ("global_step", "epoch", "reason", "saved_at", "size_bytes", "attempt", "fit")
"""Keys of a manifest that are fields of ``CheckpointInfo``."""


def _read_manifest(manifest_path: Path) -> CheckpointInfo | None:
    path = manifest_path.with_suffix("")
    try:
        manifest = _load_manifest(path)
        return from_json(
            CheckpointInfo,
            {
                **{name: manifest.get(name) for name in _SHOWN},
                "path": str(path),
                "ok": None if _sizes_match(path, manifest) else False,
                "weights": weights if (weights := manifest.get("weights")) in _WEIGHTS else None,
            },
            tolerant=True,
        )
    except FileNotFoundError:
        return None
    except _UNREADABLE:
        return CheckpointInfo(path=str(path), global_step=0, ok=False)


def _load_manifest(checkpoint: Path | str) -> dict[str, Any]:
    """Return the manifest of a checkpoint. Raise one of ``_UNREADABLE``."""
    manifest: dict[str, Any] = parse_json(read_regular(f"{checkpoint}.json"))
    return manifest


class _Part(Struct, frozen=True, kw_only=True):
    """A file of a checkpoint, as its manifest describes it."""

    path: Path
    sha256: str
    size_bytes: int
    writer: str = ""
    """`` of rank 3 on node 1`` if the manifest says so."""


def _parts(path: Path, manifest: dict[str, Any]) -> Iterator[_Part]:
    """Yield every file of the checkpoint."""
    for name, facts in manifest.get("files", {".": manifest}).items():
        yield _part(path / name, facts, "")
    nodes = manifest.get("node_of_rank") or []
    for rank, (name, facts) in enumerate((manifest.get("beside") or {}).items()):
        writer = f" of rank {rank} on node {nodes[rank]}" if rank < len(nodes) else ""
        yield _part(path.parent / name, facts, writer)


def _part(path: Path, facts: dict[str, Any], writer: str) -> _Part:
    writer = writer or (f" of node {facts['node']}" if "node" in facts else "")
    return _Part(
        path=path, sha256=facts["sha256"], size_bytes=int(facts["size_bytes"]), writer=writer
    )


def _sizes_match(path: Path, manifest: dict[str, Any]) -> bool:
    parts = list(_parts(path, manifest))
    return bool(parts) and all(
        part.path.is_file() and part.path.stat().st_size == part.size_bytes for part in parts
    )


MAX_KEPT = 100
"""Maximum number of reported checkpoints that are kept."""
SECONDS_KEPT = 3
"""Number of checkpoints whose duration is kept. A single slow one must not count for ever."""
CHECK_S = 5.0
"""Seconds between two checks of which files are still there."""
BEST = "best by "


class CheckpointCatalog:
    """The checkpoints of one run.

    Sizes are checked when the folder is listed. Checksums are verified once each, in a thread.
    """

    def __init__(self, folder: Path, before: RunSnapshot | None = None) -> None:
        """``before`` is the last snapshot of the previous attempt."""
        self._folder = folder
        self.seconds = () if before is None else before.checkpoint_seconds
        """How long the last checkpoints took, oldest first."""
        self._spans: Sequence[Span] | None = None
        self._known: tuple[CheckpointInfo, ...] = ()
        self._checked: dict[tuple[str, float | None], bool] = {}
        self._stale = True
        self._checking: threading.Thread | None = None

    def saved(self, seconds: object) -> None:
        """Note that a checkpoint was saved, in ``seconds`` if that is known."""
        self._stale = True
        if isinstance(seconds, (int, float)):
            self.seconds = (*self.seconds, float(seconds))[-SECONDS_KEPT:]

    def set_spans(self, spans: Sequence[Span]) -> None:
        """Set the steps that count; checkpoints of other steps are marked as superseded."""
        self._spans, self._stale = spans, True

    def checkpoints(self) -> tuple[CheckpointInfo, ...]:
        """Return the checkpoints with the verification results so far, the least trained first."""
        if self._stale:
            self._stale = False
            self._known = tuple(list_checkpoints(self._folder, self._spans))
        self._start_next_check()
        return tuple(self._with_check(info) for info in self._known)

    def verified_checkpoints(self) -> tuple[CheckpointInfo, ...]:
        """List the folder and wait until the newest checkpoint is verified."""
        if self._checking is not None:
            self._checking.join()
        self._known = tuple(list_checkpoints(self._folder, self._spans))
        newest = newest_checkpoint(self._known)
        if newest is not None and newest.ok is None:
            self._check(newest)
        return tuple(self._with_check(info) for info in self._known)

    def _with_check(self, info: CheckpointInfo) -> CheckpointInfo:
        checked = self._checked.get((info.path, info.saved_at))
        return info if info.ok is False or checked is None else replace(info, ok=checked)

    def _start_next_check(self) -> None:
        if self._checking is not None and self._checking.is_alive():
            return
        for info in reversed(self._known):
            if info.ok is None and (info.path, info.saved_at) not in self._checked:
                self._checking = threading.Thread(target=self._check, args=(info,), daemon=True)
                self._checking.start()
                return

    def _check(self, info: CheckpointInfo) -> None:
        key = (info.path, info.saved_at)
        if key not in self._checked:
            self._checked[key] = verify(info).ok is True


class ScriptCheckpoints:
    """Keeps the reported files that still exist: a ModelCheckpoint deletes those it replaces."""

    def __init__(self, before: RunSnapshot | None = None) -> None:
        kept = () if before is None else before.script_checkpoints
        self._known: dict[str, CheckpointInfo] = {info.path: info for info in kept}
        self._checked_at: float | None = None

    def add(self, fields: Mapping[str, Any]) -> None:
        """Add one checkpoint, given the fields of its ``script_checkpoint`` event."""
        path = fields.get("path")
        if not isinstance(path, str):
            return
        if fields.get("best"):
            best = f"{BEST}{fields.get('metric')}"
            for other in self._known.values():
                if (other.reason or "").startswith(best):
                    reason = (other.reason or "").removeprefix(BEST)
                    self._known[other.path] = replace(other, reason=reason)
        self._known.pop(path, None)
        self._known[path] = CheckpointInfo(
            path=path,
            global_step=int(fields.get("global_step") or 0),
            epoch=fields.get("epoch"),
            reason=_reason(fields),
            saved_at=fields.get("t"),
            size_bytes=_size(path),
        )
        while len(self._known) > MAX_KEPT:
            del self._known[next(iter(self._known))]

    def existing(self, now_s: float) -> tuple[CheckpointInfo, ...]:
        """Return the checkpoints that still existed at the last check, the oldest first.

        Only files on this machine can be checked. Others are kept as reported.
        """
        if self._checked_at is None or abs(now_s - self._checked_at) >= CHECK_S:
            self._checked_at = now_s
            deleted = [p for p in self._known if "://" not in p and not Path(p).exists()]
            for path in deleted:
                del self._known[path]
        return tuple(self._known.values())


def _reason(fields: Mapping[str, Any]) -> str | None:
    metric, value = fields.get("metric"), fields.get("value")
    if metric and isinstance(value, (int, float)):
        return f"{BEST if fields.get('best') else ''}{metric} = {value:.4g}"
    return "last" if fields.get("last") else None


def _size(path: str) -> int | None:
    try:
        status = Path(path).stat()
    except OSError:
        return None
    # A sharded checkpoint is a folder, whose own size is meaningless.
    return None if Path(path).is_dir() else status.st_size
