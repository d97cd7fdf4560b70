"""Stop and resume on nodes with checkpoint folders of their own, and compare with no stop.

``python -m tests.nodes.exact_resume FOLDER CASES.json`` writes ``FOLDER/rows.json``. A case is a
JSON object with the fields of ``Case``. The ranks are forked from this process, and their machines
are folders: ``machine-0`` has the run directory, the others have a checkpoint folder that rank 0
does not open. The queues are shared, as if the barrier table were mirrored without delay.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from ltui.training.rank import file_transfer
from ltui.training.rank.channel import open_channel  # noqa: F401  (imported before forking)
from ltui.training.rank.coordination import save_checkpoint
from ltui.training.store.run_checkpoints import checkpoint_to_resume, remove_unfinished
from tests.nodes.other_folders import hide_checkpoints, share_queues
from tests.rank.exactness import world
from tests.rank.exactness.__main__ import detach, everywhere
from tests.rank.exactness.every import LOADERS, SHARES_BY_ITSELF
from tests.rank.exactness.loaders import BATCHES
from tests.rank.exactness.training import EPOCHS, STOPS, train
from tests.rank.exactness.world import HERE
from tests.rank.runs import RunFolder

HANG_S = 120.0
"""Seconds after which a case must have ended. Ranks would wait for each other much longer."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training that is stopped and resumed."""

    loader: str = "plain"
    workers: int = 0
    stop: str = "random"
    """A name of ``STOPS``, or ``random`` for a step drawn from ``seed``."""
    part: str = ""
    ranks: int = 2
    nodes: int = 2
    seed: int = 1
    layout: str = "detached"
    """Which machines see the folder of machine 0.

    ``detached``: none. ``shared``: all, as their own folder. ``mixed``: only machine 1, as its own.
    ``visible``: all, at the path of machine 0.
    """
    order: tuple[int, ...] = ()
    """The machine of each node after the stop; as before if empty."""
    fault: str = ""
    """A name of ``FAULTS``, active from the resume on."""


def machine(folder: Path, number: int, attempt: int) -> RunFolder:
    return RunFolder(folder / f"machine-{number}", attempt=attempt)


def make_machines(folder: Path, case: Case) -> None:
    head = folder / "machine-0"
    (head / "checkpoints").mkdir(parents=True)
    for number in range(1, case.nodes):
        path = folder / f"machine-{number}"
        share_queues(head, path)
        if case.layout == "shared" or (case.layout == "mixed" and number == 1):
            (path / "checkpoints").symlink_to(head / "checkpoints")


def fit(case: Case, folder: Path, attempt: int, stop: tuple[int, int], **extra: str) -> Any:
    torch.manual_seed(attempt)
    np.random.seed(attempt)
    number = case.order[HERE.node] if attempt > 1 and case.order else HERE.node
    data = LOADERS[case.loader](case.workers, folder)
    shares = case.loader not in SHARES_BY_ITSELF
    options = STOPS[case.stop][2] if case.stop in STOPS else {}
    if case.layout != "visible":
        hide_checkpoints(folder / "machine-0")
    extra["LTUI_NODES"] = str(HERE.nodes)
    here = machine(folder, number, attempt)
    try:
        return train(here, data, stop, options, part=case.part, shares=shares, **extra)  # type: ignore[arg-type]
    finally:
        detach(data)


def run_case(case: Case, folder: Path) -> None:
    warnings.filterwarnings("ignore")
    send_in_small_chunks(case)
    keep(folder / "never", fit(case, folder / "never", 1, (-9, 0)))
    dice = random.Random(case.seed)
    stop = (dice.randrange(EPOCHS - 1), dice.randrange(BATCHES))
    if case.stop in STOPS:
        stop = STOPS[case.stop][:2]
    keep(folder, fit(case, folder, 1, stop))
    if HERE.rank == 0 and case.fault in REMOVALS:
        REMOVALS[case.fault](checkpoint_of(folder))
    everywhere(None)
    if case.fault in FAULTS:
        FAULTS[case.fault]()
    # A fault of a save needs another stop, which then fails.
    resume(case, folder, 2, (EPOCHS - 1, 1) if case.fault in FAULTS else (-9, 0))


def resume(case: Case, folder: Path, attempt: int, stop: tuple[int, int] = (-9, 0)) -> None:
    """Resume to the end, and write how it differs from the training that was never stopped."""
    warnings.filterwarnings("ignore")
    send_in_small_chunks(case)
    path = checkpoint_of(folder)
    row: dict[str, Any] = {"checkpoint": path.name}
    try:
        resumed = seen(fit(case, folder, attempt, stop, LTUI_RESUME_FROM=str(path)))
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"
        write(folder, f"row-{attempt}", row)
        raise SystemExit(3) from None
    never, first = read(folder / "never", "seen"), read(folder, "seen")
    row["stopped"] = first["stopped"]
    row["differs"] = [
        name for name in ("order", "losses", "means") if first[name] + resumed[name] != never[name]
    ]
    row["differs"] += [name for name in ("weights", "callbacks") if resumed[name] != never[name]]
    write(folder, f"row-{attempt}", row)
    if HERE.ranks > 1:
        torch.distributed.destroy_process_group()


def send_in_small_chunks(case: Case) -> None:
    """Let the small files of these tests take many broadcasts.

    Cases with an even seed use a buffer beside the staging memory, as on a GPU.
    """
    file_transfer.CHUNK_BYTES, file_transfer._CHUNKS_PER_CHECK = 10_000, 3

    def separate(staging: torch.Tensor, device: torch.device) -> torch.Tensor:
        return torch.empty_like(staging, device=device)

    if case.seed % 2 == 0:
        patch.object(file_transfer, "_broadcast_buffer", separate).start()


def checkpoint_of(folder: Path) -> Path:
    (manifest,) = (folder / "machine-0/checkpoints").glob("*.ckpt.json")
    return manifest.with_suffix("")


def seen(model: Any) -> Any:
    """Return what the rank saw, as JSON has it; it keeps every bit of a float."""
    document = model.seen()
    document["weights"] = [weight.tolist() for weight in document["weights"]]
    return json.loads(json.dumps({**document, "stopped": model.stopped}))


def keep(folder: Path, model: Any) -> None:
    write(folder, "seen", seen(model))


def write(folder: Path, name: str, document: Any) -> None:
    (folder / f"{name}-{HERE.rank}.json").write_text(json.dumps(document))


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / f"{name}-{HERE.rank}.json").read_text())


# Faults.


def _fail_to_write_on(rank: int) -> None:
    """Let the file system refuse what is received, as a full disk does."""

    class Full:
        def __init__(self, file: Any) -> None:
            self.file = file

        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    original = file_transfer._FileSequence._open

    def open_file(self: Any, index: int) -> Any:
        file = original(self, index)
        return Full(file) if self._writes else file

    if HERE.rank == rank:
        patch.object(file_transfer._FileSequence, "_open", open_file).start()


def _full_disk_of_the_other_node() -> None:
    def write_state(part: Path, state: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(part))

    if HERE.rank == HERE.ranks - 1:
        patch.object(save_checkpoint, "write_state", write_state).start()


def _no_space_at_the_head() -> None:
    def require_space(folder: Path, needed_bytes: int) -> None:
        raise OSError(f"{folder} has 0 MB free, a checkpoint takes {needed_bytes / 1e6:.0f} MB")

    if HERE.rank == 0:
        patch.object(save_checkpoint, "require_space", require_space).start()


def _killed_while_it_sends() -> None:
    def read(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if HERE.rank == HERE.ranks - 1:
        patch.object(file_transfer._FileSequence, "read", read).start()


def _damage_on_arrival(rank: int, damage: Callable[[Any], object]) -> None:
    original = file_transfer._FileSequence.write

    def write(self: Any, segments: Any, chunk: memoryview) -> None:
        original(self, segments, chunk)
        damage(self._file)

    if HERE.rank == rank:
        patch.object(file_transfer._FileSequence, "write", write).start()


def _truncate(file: Any) -> None:
    file.truncate(max(0, file.tell() - 1))


def _change(file: Any) -> None:
    os.pwrite(file.fileno(), b"changed", 0)


FAULTS: dict[str, Callable[[], None]] = {
    "changed at the head": partial(_damage_on_arrival, 0, _change),
    # Only what is received fails, so that the resume itself succeeds.
    "full disk of the head": partial(_fail_to_write_on, 0),
    "full disk of the other node": _full_disk_of_the_other_node,
    "no space at the head": _no_space_at_the_head,
    "full disk at resume": lambda: _fail_to_write_on(HERE.ranks - 1),
    "killed while it sends": _killed_while_it_sends,
    "truncated at the head": partial(_damage_on_arrival, 0, _truncate),
    "truncated at resume": lambda: _damage_on_arrival(HERE.ranks - 1, _truncate),
}


def _part_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.rank-{HERE.ranks - 1:05d}")


def _change_part(path: Path) -> None:
    part = _part_of(path)
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)


REMOVALS: dict[str, Callable[[Path], None]] = {
    "missing part": lambda path: _part_of(path).unlink(),
    "changed part": _change_part,
}


def wait_each(pids: list[int]) -> list[int | None]:
    """Return the exit codes. Nobody ends the other ranks when one fails; None for one that hangs.

    A rank that hangs is killed when its time is over.
    """
    codes: dict[int, int] = {}
    deadline = time.monotonic() + HANG_S
    while len(codes) < len(pids) and time.monotonic() < deadline:
        for pid in set(pids) - codes.keys():
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    for pid in set(pids) - codes.keys():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return [codes.get(pid) for pid in pids]


def main(folder: Path, cases: list[Case]) -> None:
    rows: list[dict[str, Any]] = []
    for number, case in enumerate(cases):
        place = folder / str(number)
        make_machines(place, case)
        make_machines(place / "never", case)
        codes = launch(case, place, partial(run_case, case, place))
        row = described(place, case, 2, codes)
        if case.fault in FAULTS and any(codes):
            # The next attempt of the run. Its supervisor removes what was not completed.
            remove_unfinished(place / "machine-0/checkpoints")
            again = launch(case, place, partial(resume, case, place, 3))
            row["next"] = described(place, case, 3, again)
        rows.append(row)
        (folder / "rows.json").write_text(json.dumps(rows, indent=1))


def launch(case: Case, place: Path, do: Callable[[], None]) -> list[int | None]:
    return wait_each(world.start(case.ranks, do, place / "log", nodes=case.nodes))


def described(place: Path, case: Case, attempt: int, codes: list[int | None]) -> dict[str, Any]:
    """Return what the ranks and the machines have after an attempt."""
    row: dict[str, Any] = {"case": dataclasses.asdict(case), "codes": codes}
    paths = [place / f"row-{attempt}-{rank}.json" for rank in range(case.ranks)]
    found = [json.loads(path.read_text()) if path.exists() else {} for path in paths]
    for key in ("stopped", "checkpoint", "differs", "error"):
        row[key] = [each.get(key) for each in found]
    run = machine(place, 0, attempt)
    row["texts"] = {
        kind: [event["text"] for rank in range(case.ranks) for event in run.events(kind, rank)]
        for kind in ("note", "warning", "checkpoint_failed", "steering_off", "exception")
    }
    info = checkpoint_to_resume(run.path / "checkpoints")
    row["resumable"] = None if info is None else Path(info.path).name
    folders = [place / f"machine-{number}" / "checkpoints" for number in range(case.nodes)]
    row["files"] = [sorted(p.name for p in f.iterdir()) if f.exists() else [] for f in folders]
    manifests = [json.loads(p.read_text()) for p in folders[0].glob("*.json")]
    row["node_of_file"] = [
        {
            name: facts.get("node", 0)
            for name, facts in {**m.get("files", {}), **m["beside"]}.items()
        }
        for m in manifests
    ]
    return row


if __name__ == "__main__":
    parsed = [
        Case(**{**fields, "order": tuple(fields.get("order", ()))})
        for fields in json.loads(Path(sys.argv[2]).read_text())
    ]
    main(Path(sys.argv[1]), parsed)
