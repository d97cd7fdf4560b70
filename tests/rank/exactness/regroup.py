"""One run on changing numbers of ranks.

Every attempt but the last is stopped within an epoch and resumed by the next on other ranks. Writes
``FOLDER/regroup.json``: for each loader and chain the sample numbers of each epoch, of all ranks.
"""

from __future__ import annotations

import json
import shutil
import warnings
from functools import partial
from pathlib import Path
from typing import Any

from tests.rank.exactness import world
from tests.rank.exactness.every import LOADERS, SHARES_BY_ITSELF
from tests.rank.exactness.training import EPOCHS, train
from tests.rank.exactness.world import HERE
from tests.rank.runs import RunFolder

SAMPLES = 83
TRIED = ("plain", "own", "length_batches", "sequences", "beton_torch")
# (ranks, epoch and batch of the stop; a stop at -1 is in the validation at the epoch's end)
CHAINS: dict[str, list[tuple[int, int, int]]] = {
    "2 1 4": [(2, 1, 2), (1, 1, 11), (4, -9, 0)],
    "1 2 1": [(1, 0, 4), (2, 0, 6), (1, -9, 0)],
    "4 2": [(4, 1, -1), (2, -9, 0)],
}


def attempt(folder: Path, name: str, number: int, path: Path | None, stop: tuple[int, int]) -> None:
    warnings.filterwarnings("ignore")
    HERE.samples = SAMPLES
    run = RunFolder(folder, attempt=number)
    loader = LOADERS[name](0, folder)
    extra: dict[str, Any] = {} if path is None else {"LTUI_RESUME_FROM": str(path)}
    shares = name not in SHARES_BY_ITSELF
    model = train(run, loader, stop, {"max_epochs": EPOCHS}, shares=shares, **extra)
    seen = [[e, *o] for e, o in zip(model.epochs, model.order, strict=True)]
    (folder / f"seen-{number}-{HERE.rank}.json").write_text(json.dumps(seen))
    if HERE.ranks > 1:
        from torch import distributed

        distributed.destroy_process_group()


def chain(folder: Path, name: str, attempts: list[tuple[int, int, int]]) -> dict[str, Any]:
    path: Path | None = None
    epochs: dict[int, list[int]] = {}
    batches: list[int] = []
    notes: list[str] = []
    for number, (ranks, epoch, batch) in enumerate(attempts, 1):
        do = partial(attempt, folder, name, number, path, (epoch, batch))
        if any(world.wait(world.start(ranks, do))):
            raise SystemExit(f"{name}: an attempt on {ranks} ranks failed")
        for rank in range(ranks):
            seen = json.loads((folder / f"seen-{number}-{rank}.json").read_text())
            for at, numbers in seen:  # a batch
                epochs.setdefault(at, []).extend(numbers)
            batches.append(len(seen))
        run = RunFolder(folder, attempt=number)
        notes += [event["text"] for event in run.events("note")]
        path = run.checkpoints[-1] if run.checkpoints else None
    return {"epochs": epochs, "notes": notes, "batches": batches}


def main(folder: Path, loaders: list[str]) -> None:
    path = folder / "regroup.json"
    found = json.loads(path.read_text()) if path.exists() else []
    done = {(run["loader"], run["chain"]) for run in found}
    for name in loaders:
        for title, attempts in CHAINS.items():
            if (name, title) in done:
                continue
            place = folder / f"{name}-{title.replace(' ', '-')}"
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            found.append({"loader": name, "chain": title, **chain(place, name, attempts)})
            path.write_text(json.dumps(found, indent=1))
            shutil.rmtree(place)
