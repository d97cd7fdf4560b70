"""Stop and resume in every way: ``python -m tests.rank.exactness FOLDER RANKS[,RANKS] CASE...``.

A case is ``loader:workers:stop`` or ``loader:workers:stop:part``, with ``*`` standing for all, and
with ``N/`` before it for N ranks alone; ``regroup/loader`` changes the number of ranks
(``regroup.py``). Writes ``FOLDER/table.json``: for each case what differs from the training that
was never stopped, on any rank (``order`` of sample numbers, ``losses``, ``means`` of epochs and
learning rates, ``weights``, ``callbacks``), and the notes about what is not exact.
"""

from __future__ import annotations

import fnmatch
import json
import os
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ltui.training.data.beton import has_ffcv, write_beton
from ltui.training.rank.channel import open_channel  # noqa: F401  (imported before forking)
from tests.rank.exactness import regroup, world
from tests.rank.exactness.loaders import LOADERS, SHARES_BY_ITSELF, WITHOUT_WORKERS, samples
from tests.rank.exactness.training import EPOCHS, PARTS, STOPS, train
from tests.rank.exactness.world import HERE
from tests.rank.runs import RunFolder

STREAMS = ("stateful_stream", "stream", "lucky", "simple")


def possible(loader: str, workers: int, stop: str, part: str = "") -> bool:
    if loader == "ffcv" and not has_ffcv():
        return False
    if part == "sharded" and HERE.ranks == 1:
        return False
    if part == "plateau" and stop == "no validation":
        return False  # nothing to look at
    if loader == "batched" and HERE.ranks > 1:
        return False  # Lightning itself can't share a batch sampler's random sampler
    # Without a length there is no number of steps to ask for, and workers make epochs uneven.
    return loader not in STREAMS or stop not in ("counted steps", "all steps")


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
    fit = partial(train, part=part, shares=loader not in SHARES_BY_ITSELF)

    def make(attempt: int = 1) -> Any:
        torch.manual_seed(attempt)  # some samplers are seeded as they are made
        return LOADERS[loader](workers, folder)

    key = (loader, workers, part, str(options))
    if key not in known:
        never = new_run(folder, "never", HERE.ranks, len(known))
        known[key] = fit(never, make(), (-9, 0), options).seen()
    run = new_run(folder, HERE.ranks, loader, workers, stop, part)
    at_first, extra = options, {}
    if epoch < 0:
        # Ends one epoch early, and is resumed for more.
        shorter = {"max_epochs": EPOCHS - 1}
        if "max_steps" in options:
            # Within an epoch, or at the end of one.
            shorter = {"max_steps": options["max_steps"] // EPOCHS * (EPOCHS - 1) + epoch + 1}
        at_first, extra = {**options, **shorter}, {"LTUI_CHECKPOINT_EVERY_S": "600"}
    first = fit(run, make(), (epoch, batch), at_first, **extra)
    (path,) = [p for p in run.checkpoints if p.parent.name == "checkpoints"]
    run.attempt = 2
    second = fit(run, make(2), (-9, 0), options, LTUI_RESUME_FROM=str(path))
    reference, one, other = known[key], first.seen(), second.seen()
    if epoch == -2:
        one["means"].pop()  # of an epoch that the steps cut off; it comes whole after resuming
    differs = [n for n in ("order", "losses", "means") if one[n] + other[n] != reference[n]]
    same = all(map(torch.equal, other["weights"], reference["weights"]))
    differs += [] if same else ["weights"]
    differs += ["callbacks"] if other["callbacks"] != reference["callbacks"] else []
    everywhere = [differs]
    if HERE.ranks > 1:
        everywhere = [[] for _ in range(HERE.ranks)]
        torch.distributed.all_gather_object(everywhere, differs)
    if os.environ.get("SHOW"):
        for name in differs:
            if name in ("means", "callbacks"):
                print(case, name, "NEVER", reference[name], "ONE", one[name], "OTHER", other[name])
    return {
        "case": case,
        "ranks": HERE.ranks,
        "checkpoint": path.name,
        "steps": len(reference["losses"]),
        "differs": [name for name in WHAT if any(name in each for each in everywhere)],
        "notes": [e["text"] for e in run.events("note")],
    }


def run_cases(folder: Path, cases: list[str]) -> None:
    warnings.filterwarnings("ignore")
    known: dict[Any, Any] = {}
    table = []
    if any(case.startswith("ffcv") for case in cases) and HERE.rank == 0:
        rows = torch.arange(samples()).reshape(-1, 1, 1, 1).repeat(1, 1, 2, 4).to(torch.uint8)
        write_beton(folder / f"rows-{HERE.ranks}.beton", rows, torch.arange(samples()))
    for case in filter(is_possible, cases):
        print(HERE.rank, case, flush=True)
        table.append(try_case(folder, case, known))
        if HERE.rank == 0:
            (folder / f"table-{HERE.ranks}.json").write_text(json.dumps(table, indent=1))
    if HERE.ranks > 1:
        torch.distributed.destroy_process_group()


def main(folder: Path, ranks: list[int], patterns: list[str]) -> int:
    failed = 0
    table: list[Any] = []
    regrouped = [p.partition("/")[2] for p in patterns if p.startswith("regroup/")]
    regroup.main(folder, regrouped)
    for number in ranks:
        cases = chosen(patterns, number)
        codes = world.wait(world.start(number, partial(run_cases, folder, cases)))
        failed += any(codes)
        part = folder / f"table-{number}.json"
        table += json.loads(part.read_text()) if part.exists() else []
        (folder / "table.json").write_text(json.dumps(table, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), [int(n) for n in sys.argv[2].split(",")], sys.argv[3:]))
