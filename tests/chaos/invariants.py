"""Invariants after a kill, checked in ``/proc``, the files and the database, not through ltui."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import socket
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ltui.training.store.run_directory import RunDir
from tests.chaos.process_tree import RunProcess, live_processes, open_ports
from tests.supervise.fake_weights import loss_of, next_weights

ENDED = frozenset({"stopped", "finished", "failed", "crashed", "lost"})
PATIENCE_S = 120.0
"""Until a kill's consequences must have come to rest, on a machine that may be busy."""


class FalseStateError(AssertionError):
    """ltui said something that ``/proc`` or the disk contradicts."""


@dataclass
class Observation:
    """One answer of ``ltui``, with who was alive all the while it was asked."""

    snapshot: dict[str, Any]
    before: list[RunProcess]
    after: list[RunProcess]

    @property
    def state(self) -> str:
        return str(self.snapshot["state"])

    @property
    def steadily_alive(self) -> list[RunProcess]:
        return [process for process in self.before if process in self.after]

    def contradiction(self) -> str | None:
        """Return why no state between ``before`` and ``after`` matches the snapshot, or None."""
        ranks = [a for a in self.steadily_alive if a.role.startswith(("rank", "engine"))]
        if self.state in ENDED and ranks:
            return f"shown as {self.state} while {[a.role for a in ranks]} lived"
        if self.state not in ENDED and self.state != "queued" and not self.before + self.after:
            return f"shown as {self.state} while nothing of it lived"
        pid = self.snapshot["supervisor_pid"]
        if pid is not None and not any(a.mark.pid == pid for a in self.before + self.after):
            return f"supervisor {pid} is shown and was not alive"
        return None

    def at_rest(self, least_step: int, *, must_end: bool) -> bool:
        """Ended with nothing left, or training on under a live supervisor."""
        if must_end and self.state not in ENDED:
            return False
        alive = {a.mark.pid: a for a in self.steadily_alive}
        if self.state in ENDED:
            return not self.after
        ranks = self.snapshot["ranks"]
        return (
            self.state in ("running", "paused")
            and self.snapshot["supervisor_pid"] in alive
            and bool(ranks)
            and all(r["pid"] in alive for r in ranks)
            and all(r["state"] in ("ok", "waiting", "paused") for r in ranks)
            and (self.state == "paused" or (self.snapshot["global_step"] or 0) > least_step)
        )


def observe(run: RunDir, show: Callable[[], dict[str, Any]]) -> Observation:
    before = live_processes(run)
    snapshot = show()
    return Observation(snapshot, before, live_processes(run))


def wait_until_settled(
    run: RunDir,
    show: Callable[[], dict[str, Any]],
    least_step: int = 0,
    *,
    must_end: Callable[[], bool] = lambda: False,
) -> tuple[Observation, list[str]]:
    """Look until it comes to rest; every state on the way. Raises where one is false.

    ``must_end``: whether nothing but the end of the run is rest.
    """
    deadline = time.monotonic() + PATIENCE_S
    states: list[str] = []
    while True:
        observation = observe(run, show)
        if not states or states[-1] != observation.state:
            states.append(observation.state)
        contradiction = observation.contradiction()
        if contradiction is not None:
            raise FalseStateError(f"{contradiction}: {_describe(observation)}")
        if observation.at_rest(least_step, must_end=must_end()):
            return observation, states
        if time.monotonic() > deadline:
            raise FalseStateError(
                f"never came to rest ({' -> '.join(states)}): {_describe(observation)}"
            )
        time.sleep(0.15)


def _describe(observation: Observation) -> str:
    snapshot = observation.snapshot
    ranks = [(r["rank"], r["pid"], r["state"], r["global_step"]) for r in snapshot["ranks"]]
    return (
        f"{snapshot['state']} ({snapshot['detail']}), attempt {snapshot['attempt']}, supervisor "
        f"{snapshot['supervisor_pid']}, step {snapshot['global_step']}, ranks {ranks}; alive "
        f"{[(a.role, a.mark.pid) for a in observation.after]}"
    )


def assert_nothing_held(run: RunDir, ports: set[int]) -> None:
    """After the end: no process, lock, socket or port of the run."""
    left = live_processes(run)
    assert not left, f"orphans: {left}"
    handle = os.open(run.lock_path, os.O_RDWR)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(handle)
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(run.socket_path))
        except OSError:
            pass
        else:
            raise AssertionError(f"somebody still answers at {run.socket_path}")
    assert not (ports & open_ports()), f"ports still open: {ports & open_ports()}"


# -- checkpoints -------------------------------------------------------------------------------


@dataclass
class VerifiedCheckpoints:
    """Checkpoints as their manifests describe them."""

    complete: list[dict[str, Any]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    @property
    def last(self) -> dict[str, Any] | None:
        """The one that ``resume`` must take."""
        order = ("attempt", "fit", "global_step")
        return max(self.complete, key=lambda m: tuple(m[k] for k in order), default=None)


def verify_checkpoints(run: RunDir) -> VerifiedCheckpoints:
    """Every checkpoint, checked by its own manifest: sizes and checksums of all its files."""
    checkpoints = VerifiedCheckpoints()
    for manifest_path in sorted(run.checkpoints_dir.glob("[!.]*.ckpt.json")):
        manifest = json.loads(manifest_path.read_text())
        parts = {manifest["file"]: manifest, **manifest["beside"]}
        good = all(_fits(run.checkpoints_dir / n, facts) for n, facts in parts.items())
        if good:
            checkpoints.complete.append(manifest)
        else:
            checkpoints.broken.append(manifest["file"])
    return checkpoints


def _fits(path: Path, facts: dict[str, Any]) -> bool:
    if not path.is_file():
        return False
    data = path.read_bytes()
    found = (len(data), hashlib.sha256(data).hexdigest())
    return found == (facts["size_bytes"], facts["sha256"])


def leftover_files(run: RunDir) -> dict[str, int]:
    """Name -> time of what no manifest names: parts of checkpoints that were never completed."""
    named = set()
    for manifest_path in run.checkpoints_dir.glob("[!.]*.ckpt.json"):
        manifest = json.loads(manifest_path.read_text())
        named |= {manifest_path.name, manifest["file"], *manifest["beside"]}
    files: dict[str, int] = {}
    for path in run.checkpoints_dir.iterdir():
        if path.name not in named:
            with contextlib.suppress(FileNotFoundError):  # it got its name meanwhile
                files[path.name] = path.stat().st_mtime_ns
    return files


# -- history -----------------------------------------------------------------------------------


def check_history(run: RunDir, note: str | None, *, ranks: int, fake: bool) -> int:
    """Steps 1..N of every rank without a hole, or a note that says so; every loss is right.

    A step that several attempts trained must have the same loss in all. Gives the last step.
    """
    connection = sqlite3.connect(f"file:{run.db_path}?mode=ro", uri=True)
    try:
        rows = connection.execute(
            "SELECT attempt, rank, step, loss FROM steps ORDER BY attempt, step"
        ).fetchall()
        resumed = dict(connection.execute("SELECT attempt, resumed_step FROM attempts"))
    finally:
        connection.close()
    last = 0
    for rank in range(ranks):
        line = _one_line([(a, s) for a, r, s, _ in rows if r == rank], resumed)
        last = max(last, max(line, default=0))
        holes = sorted(set(range(1, max(line, default=0) + 1)) - set(line))
        if holes and note is None:
            raise AssertionError(
                f"the history of rank {rank} lacks {len(holes)} steps from {holes[0]} on "
                f"of {max(line)}, and no note says so (resumed at {resumed})"
            )
    _losses_agree(rows, fake)
    return last


def _one_line(steps: list[tuple[int, int]], resumed: dict[int, int | None]) -> list[int]:
    """Steps that count: an attempt that trained replaces what came after its checkpoint."""
    line: set[int] = set()
    for attempt in sorted({a for a, _ in steps}):
        if attempt > 1:
            line = {s for s in line if s <= (resumed.get(attempt) or 0)}
        line |= {s for a, s in steps if a == attempt}
    return sorted(line)


def _losses_agree(rows: list[tuple[int, int, int, float]], fake: bool) -> None:
    seen: dict[tuple[int, int], tuple[int, float]] = {}
    if fake:
        weights, last = b"", max((step for _, _, step, _ in rows), default=0)
        for step in range(1, last + 1):
            weights = next_weights(weights, step)
            seen |= {(rank, step): (0, loss_of(weights)) for rank in range(2)}
    for attempt, rank, step, loss in rows:
        first = seen.setdefault((rank, step), (attempt, loss))
        assert first[1] == loss, (
            f"step {step} of rank {rank}: loss {loss} in attempt {attempt}, {first[1]} in "
            f"attempt {first[0] or 'a run never stopped'}"
        )
