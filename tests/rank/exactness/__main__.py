"""Stop and resume in every way: ``python -m tests.rank.exactness FOLDER RANKS[,RANKS] CASE...``.

A case is ``loader:workers:stop`` or ``loader:workers:stop:part``, with ``*`` standing for all, and
with ``N/`` before it for N ranks alone; ``regroup/loader`` changes the number of ranks
(``regroup.py``). Writes ``FOLDER/table.json``: for each case what differs from the training that
was never stopped, on any rank (``order`` of sample numbers, ``losses``, ``means`` of epochs and
learning rates, ``weights``, ``callbacks``; ``failed`` where the training raised), and the notes
about what is not exact. Cases that stand in ``FOLDER/table-RANKS.json`` are not tried again, so
what was broken off goes on. Folders of cases in which nothing differs are removed.
"""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ltui.training.data.ffcv.ffcv_environment import has_ffcv
from ltui.training.rank.channel import open_channel  # noqa: F401  (imported before forking)
from ltui.training.rank.resume.dataloader_position import shut_down
from tests.rank.exactness import regroup, world
from tests.rank.exactness.every import LOADERS, SHARES_BY_ITSELF, WITHOUT_WORKERS
from tests.rank.exactness.modules import NEED_FFCV
from tests.rank.exactness.training import EPOCHS, PARTS, STOPS, train
from tests.rank.exactness.world import HERE
from tests.rank.runs import RunFolder

STREAMS = ("stateful_stream", "stream", "lucky", "simple")


def possible(loader: str, workers: int, stop: str, part: str = "") -> bool:
    if not has_files(loader):
        return False
    if part == "sharded" and HERE.ranks == 1:
        return False
    if part == "manual" and stop == "accumulation":
        return False  # Lightning refuses it
    if part == "plateau" and stop == "no validation":
        return False  # nothing to look at
    if loader == "ffcv_loader_quasi_random" and HERE.ranks > 1:
        return False  # FFCV itself can't share it
    if loader == "batched" and HERE.ranks > 1:
        return False  # Lightning itself can't share a batch sampler's random sampler
    # Without a length there is no number of steps to ask for, and workers make epochs uneven.
    return loader not in STREAMS or stop not in ("counted steps", "all steps")


def has_files(loader: str) -> bool:
    return loader not in NEED_FFCV or has_ffcv()


WHAT = ("order", "losses", "means", "weights", "callbacks")


def all_cases() -> list[str]:
    cases = [
        f"{loader}:{workers}:{stop}"
        for loader in LOADERS
        for workers in (0, 2)
        if not (workers and loader in WITHOUT_WORKERS)
        for stop in STOPS
    ]
    return cases + [f"plain:0:{stop}:{part}" for part in PARTS for stop in STOPS]


def is_possible(case: str) -> bool:
    loader, workers, *rest = case.split(":")
    return possible(loader, int(workers), *rest)


def chosen(patterns: list[str], ranks: int) -> list[str]:
    cases = all_cases()
    return [
        c
        for c in cases
        if any(fnmatch.fnmatch(c, p) or fnmatch.fnmatch(f"{ranks}/{c}", p) for p in patterns)
    ]


def new_run(folder: Path, *names: object) -> RunFolder:
    path = folder / "-".join(str(name).replace(" ", "-") for name in names if name != "")
    path.mkdir(parents=True, exist_ok=True)
    return RunFolder(path)


def try_case(folder: Path, case: str, known: dict[Any, Any]) -> dict[str, Any]:
    loader, workers_, stop, part = (*case.split(":"), "")[:4]
    workers = int(workers_)
    epoch, batch, options = STOPS[stop]

    def fit(run: RunFolder, *how: Any, **extra: Any) -> Any:
        # Some samplers and loaders are seeded as they are made.
        torch.manual_seed(run.attempt)
        np.random.seed(run.attempt)
        data = LOADERS[loader](workers, folder)
        try:
            shares = loader not in SHARES_BY_ITSELF
            return train(run, data, *how, part=part, shares=shares, **extra)
        finally:
            detach(data)

    key = (loader, workers, part, str(options))
    if key not in known:
        never = new_run(folder, "never", HERE.ranks, *case.split(":"))
        known[key] = fit(never, (-9, 0), options).seen()
        everywhere([])
        remove(never)
    run = new_run(folder, HERE.ranks, loader, workers, stop, part)
    at_first, extra = options, {}
    if epoch < 0:
        # Ends one epoch early, and is resumed for more.
        shorter = {"max_epochs": EPOCHS - 1}
        if "max_steps" in options:
            # Within an epoch, or at the end of one.
            shorter = {"max_steps": options["max_steps"] // EPOCHS * (EPOCHS - 1) + epoch + 1}
        at_first, extra = {**options, **shorter}, {"LTUI_CHECKPOINT_EVERY_S": "600"}
    first = fit(run, (epoch, batch), at_first, **extra)
    (path,) = [p for p in run.checkpoints if p.parent.name == "checkpoints"]
    run.attempt = 2
    second = fit(run, (-9, 0), options, LTUI_RESUME_FROM=str(path))
    reference, one, other = known[key], first.seen(), second.seen()
    if epoch == -2:
        one["means"].pop()  # of an epoch that the steps cut off; it comes whole after resuming
    differs = [n for n in ("order", "losses", "means") if one[n] + other[n] != reference[n]]
    same = all(map(torch.equal, other["weights"], reference["weights"]))
    differs += [] if same else ["weights"]
    differs += ["callbacks"] if other["callbacks"] != reference["callbacks"] else []
    if os.environ.get("SHOW"):
        for name in differs:
            if name in ("means", "callbacks"):
                print(case, name, "NEVER", reference[name], "ONE", one[name], "OTHER", other[name])
    found = {
        "case": case,
        "ranks": HERE.ranks,
        "checkpoint": path.name,
        "steps": len(reference["losses"]),
        "notes": [e["text"] for e in run.events("note")],
    }
    differing = everywhere(differs)  # all ranks have read what they need
    found["differs"] = [name for name in WHAT if any(name in each for each in differing)]
    if not found["differs"]:
        remove(run)
    return found


def everywhere(value: Any) -> list[Any]:
    """Return the values of all ranks, which wait for each other."""
    found = [value] * HERE.ranks
    if HERE.ranks > 1:
        torch.distributed.all_gather_object(found, value)
    return found


def remove(run: RunFolder) -> None:
    if HERE.rank == 0:
        shutil.rmtree(run.path)


def detach(data: Any) -> None:
    """The loaders' worker processes and threads."""
    for loader in torch.utils._pytree.tree_leaves(getattr(data, "iterables", data)):
        shut_down(loader)
        if callable(close := getattr(loader, "close", None)):
            close()


def run_cases(folder: Path, cases: list[str]) -> None:
    warnings.filterwarnings("ignore")
    known: dict[Any, Any] = {}
    path = folder / f"table-{HERE.ranks}.json"
    table = rows_of(path)
    for case in filter(is_possible, cases):
        print(HERE.rank, case, flush=True)
        if HERE.rank == 0:
            path.with_suffix(".at").write_text(case)
        table.append(try_case(folder, case, known))
        if HERE.rank == 0:
            write_rows(path, table)
        everywhere(None)  # so that what fails next is the next case
    if HERE.ranks > 1:
        torch.distributed.destroy_process_group()


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    return rows


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(rows, indent=1))
    part.replace(path)


def main(folder: Path, ranks: list[int], patterns: list[str]) -> int:
    failed = 0
    chains = [n for n in LOADERS if any(fnmatch.fnmatch(f"regroup/{n}", p) for p in patterns)]
    regroup.main(folder, [name for name in chains if name in regroup.TRIED and has_files(name)])
    for number in ranks:
        failed += not all_tried(folder, number, chosen(patterns, number))
    table = [row for path in sorted(folder.glob("table-[0-9]*.json")) for row in rows_of(path)]
    (folder / "table.json").write_text(json.dumps(table, indent=1))
    return 1 if failed else 0


def all_tried(folder: Path, ranks: int, cases: list[str]) -> bool:
    """Return True if every case ended; after one that did not, the others are tried."""
    path, whole = folder / f"table-{ranks}.json", True
    while left := [case for case in cases if case not in {row["case"] for row in rows_of(path)}]:
        for broken_off in (*folder.glob(f"{ranks}-*"), *folder.glob(f"never-{ranks}-*")):
            shutil.rmtree(broken_off)
        if not any(world.wait(world.start(ranks, partial(run_cases, folder, left)))):
            break
        whole, rows, at = False, rows_of(path), path.with_suffix(".at").read_text()
        if any(row["case"] == at for row in rows):
            break  # after the last
        row = {"case": at, "ranks": ranks, "differs": ["failed"], "notes": []}
        write_rows(path, [*rows, row])
    return whole


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), [int(n) for n in sys.argv[2].split(",")], sys.argv[3:]))
