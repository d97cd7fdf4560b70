"""What Lightning does by itself where ltui stops and resumes: ``python -m
tests.rank.exactness.plain_lightning FOLDER`` prints the table of docs/resume.md.

The same training as everywhere in this suite, without ltui's callback: stopped as Lightning stops
(a signal, ``should_stop`` with ModelCheckpoint's ``last.ckpt``) and resumed with ``ckpt_path``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.rank.exactness import world
from tests.rank.exactness.every import LOADERS, SHARES_BY_ITSELF
from tests.rank.exactness.loaders import BATCHES
from tests.rank.exactness.training import EPOCHS, train
from tests.rank.exactness.world import HERE
from tests.rank.runs import RunFolder

DEADLOCK_S = 20.0
"""A launch that takes longer is called one; without a deadlock it takes a few seconds."""
AT = (1, 2)
"""Epoch and batch of the stop."""
STEPS = EPOCHS * BATCHES


class Stop(pl.Callback):
    """Asks for the stop as people do, on one rank or on all."""

    def __init__(self, how: str, ranks: tuple[int, ...]) -> None:
        self.how, self.ranks = how, ranks

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if (trainer.current_epoch, index) != AT or HERE.rank not in self.ranks:
            return
        if self.how == "signal":
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if (trainer.current_epoch, args[-1]) != AT or HERE.rank not in self.ranks:
            return
        if self.how == "should_stop":
            trainer.should_stop = True
        if self.how == "saved":
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "mid.ckpt")
            trainer.should_stop = True


def attempt(folder: Path, loader: str, workers: int, what: str, stop: Any, path: Any) -> None:
    warnings.filterwarnings("ignore")
    torch.manual_seed(1 if path is None else 2)
    data = LOADERS[loader](workers, folder)
    last = ModelCheckpoint(folder / "checkpoints", save_last=True)
    shares = loader not in SHARES_BY_ITSELF
    run = RunFolder(folder, attempt=1 if path is None else 2)
    model = train(
        run, data, (-9, 0), {"enable_checkpointing": True}, shares=shares, watched=False,
        more=[last, *([stop] if stop is not None else [])], ckpt_path=path,
        keep=folder / f"{what}-{HERE.rank}.json",
    )  # fmt: skip
    document = model.seen()
    weights = [p.tolist() for p in document.pop("weights")]
    document.update(weights=weights, epochs=model.epochs)
    (folder / f"{what}-{HERE.rank}.json").write_text(json.dumps(document))


def seen(folder: Path, what: str, ranks: int) -> list[dict[str, Any]]:
    documents = []
    for rank in range(ranks):
        path = folder / f"{what}-{rank}.json"
        documents.append(json.loads(path.read_text()) if path.exists() else {})
    return documents


def launched(ranks: int, do: Callable[[], object], log: Path) -> str:
    """``exit codes``, or ``deadlock``."""
    pids = world.start(ranks, do, log)
    left, codes = set(pids), {}
    deadline = time.monotonic() + DEADLOCK_S
    while left:
        for pid in list(left):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                left.discard(pid)
                codes[pid] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            return f"deadlock (still there after {DEADLOCK_S:.0f} s, killed)"
        time.sleep(0.02)
    return "exit codes " + ", ".join(str(codes[pid]) for pid in pids)


def judged(never: list[Any], first: list[Any], second: list[Any]) -> str:
    """What the run that was stopped and resumed is, beside the one that never was."""
    if not second or not second[0]:
        return "nothing to resume from"
    found = []
    steps = len(second[0]["losses"])
    lost = STEPS - len(first[0].get("losses", [])) - steps if first[0] else None
    if lost is None:
        found.append("all steps since the last epoch's checkpoint done again")
    elif lost:
        found.append(f"{lost} steps lost" if lost > 0 else f"{-lost} steps done again")
    cut: Counter[int] = Counter()
    for part in (*first, *second):
        for epoch, batch in zip(part.get("epochs", []), part.get("order", []), strict=True):
            if epoch == AT[0]:
                cut.update(sum(batch, []))  # noqa: RUF017
    twice = sum(count - 1 for count in cut.values())
    never_seen = BATCHES * 4 * len(never) - len(cut)
    if twice:
        found.append(f"{twice} samples of the epoch twice")
    if never_seen:
        found.append(f"{never_seen} never")
    if any(n["losses"][-steps:] != s["losses"] for n, s in zip(never, second, strict=True)):
        found.append("other losses")
    if any(n["weights"] != s["weights"] for n, s in zip(never, second, strict=True)):
        found.append("other weights")
    return ", ".join(found) or "exact"


CASES: list[tuple[str, int, str, int, str, tuple[int, ...], str]] = [
    # what a person does; ranks; loader, workers; how; on which ranks; the checkpoint left
    ("SIGTERM to one rank of two", 2, "plain", 0, "signal", (1,), "last.ckpt"),
    ("SIGTERM to both ranks", 2, "plain", 0, "signal", (0, 1), "last.ckpt"),
    ("should_stop on one rank of two", 2, "plain", 0, "should_stop", (0,), "last.ckpt"),
    ("should_stop on both ranks", 2, "plain", 0, "should_stop", (0, 1), "last.ckpt"),
    ("saved after the batch, then stopped", 1, "plain", 0, "saved", (0,), "mid.ckpt"),
    ("the same, two ranks", 2, "plain", 0, "saved", (0, 1), "mid.ckpt"),
    ("the same, two ranks, two workers each", 2, "plain", 2, "saved", (0, 1), "mid.ckpt"),
    ("the same, StatefulDataLoader", 1, "stateful", 0, "saved", (0,), "mid.ckpt"),
    ("the same, IterableDataset", 1, "stream", 0, "saved", (0,), "mid.ckpt"),
]


def try_case(folder: Path, number: int, never: dict[Any, Any]) -> tuple[str, str, str]:
    title, ranks, loader, workers, how, on, left = CASES[number]
    place = folder / str(number)
    place.mkdir()
    key = (ranks, loader, workers)
    if key not in never:
        do = partial(attempt, place, loader, workers, "never", None, None)
        launched(ranks, do, place / "log")
        never[key] = seen(place, "never", ranks)
        for path in (place / "checkpoints").glob("*"):
            path.unlink()
    do = partial(attempt, place, loader, workers, "first", Stop(how, on), None)
    ended = launched(ranks, do, place / "log")
    path = place / left if how == "saved" else place / "checkpoints" / left
    if not path.exists():
        return title, ended, "nothing to resume from"
    do = partial(attempt, place, loader, workers, "second", None, path)
    resumed = launched(ranks, do, place / "log")
    if resumed.startswith("deadlock"):
        return title, ended, resumed
    return (
        title,
        ended,
        judged(never[key], seen(place, "first", ranks), seen(place, "second", ranks)),
    )


def main(folder: Path) -> None:
    never: dict[Any, Any] = {}
    rows = [("what is done at epoch 2, batch 3", "the ranks end", "after resuming")]
    for number in range(len(CASES)):
        rows.append(try_case(folder, number, never))
        print(rows[-1], file=sys.stderr, flush=True)
    for number, row in enumerate(rows):
        print("| " + " | ".join(row) + " |")
        if number == 0:
            print("|---|---|---|")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
