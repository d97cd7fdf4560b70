"""Stop and resume again and again: ``python -m tests.rank.exactness.cycles FOLDER CYCLES [SEED]``.

``NODES=2`` in the environment puts each rank on a machine with a checkpoint folder of its own.

One run of two ranks is stopped at random moments and resumed until it has been through all cycles;
its losses and weights must be those of the same run, never stopped. The ranks of each attempt are
forked from this process, which has imported torch; they train, agree, save and leave as under a
supervisor, which here only writes the requests. Prints the seed and the median time from request
to complete checkpoint; exit code 1 where something differs or stands still.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ltui.training.tensor_queue.control_block import Command
from tests.nodes.other_folders import hide_checkpoints, share_queues
from tests.rank.exactness import world
from tests.rank.exactness.every import LOADERS
from tests.rank.exactness.training import train
from tests.rank.exactness.world import HERE
from tests.rank.runs import RunFolder
from tests.waiting import wait_for

RANKS = 2
STEPS_A_CYCLE = 12
"""Steps of the complete run for each cycle, so that every attempt has some to do."""
STANDSTILL_S = 120.0
NODES = int(os.environ.get("NODES") or 1)


def attempt(folder: Path, number: int, path: Path | None, epochs: int) -> None:
    warnings.filterwarnings("ignore")
    run = RunFolder(folder, attempt=number)
    extra: dict[str, Any] = {} if path is None else {"LTUI_RESUME_FROM": str(path)}
    if NODES > 1:
        extra["LTUI_NODES"] = str(NODES)
        hide_checkpoints(folder)
        if HERE.node:
            run = RunFolder(other_machine(folder), attempt=number)
    torch.manual_seed(number)
    options = {"max_epochs": epochs, "num_sanity_val_steps": 0}
    model = train(run, LOADERS["plain"](0, folder), (-9, 0), options, **extra)
    weights = [p.tolist() for p in model.parameters()]
    document = {
        "losses": model.losses, "order": model.order, "weights": weights,
        "finished": model.stopped is None,
    }  # fmt: skip
    (folder / f"seen-{number}-{HERE.rank}.json").write_text(json.dumps(document))
    torch.distributed.destroy_process_group()


def launch(folder: Path, number: int, path: Path | None, epochs: int) -> list[int]:
    do = partial(attempt, folder, number, path, epochs)
    return world.start(RANKS, do, folder / "log", nodes=NODES)


def new_folder(path: Path) -> Path:
    path.mkdir()
    if NODES > 1:
        share_queues(path, other_machine(path))
    return path


def other_machine(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-on-machine-1")


def seen(folder: Path, number: int) -> list[dict[str, Any]]:
    paths = [folder / f"seen-{number}-{rank}.json" for rank in range(RANKS)]
    return [json.loads(path.read_text()) for path in paths]


def stop_somewhere(run: RunFolder, chance: random.Random, pids: list[int]) -> float | None:
    """Seconds from the request to the complete checkpoint; None where the run ended before."""
    wait_for(lambda: run.pulse() or not _alive(pids), seconds=STANDSTILL_S)
    if (wanted := chance.randrange(4)) < 3:
        # In the midst of training, after a random number of steps; else as early as can be.
        steps = chance.randrange(STEPS_A_CYCLE)
        first = _step(run)
        deadline = time.monotonic() + STANDSTILL_S
        while _step(run) < first + steps and _alive(pids):
            assert time.monotonic() < deadline, "the training stands still"
            time.sleep(0.002 * (1 + wanted))
    known = set(run.checkpoints)
    asked = time.monotonic()
    run.request(Command.STOP)
    while _alive(pids):
        new = [p for p in run.checkpoints if p not in known]
        if new and Path(f"{new[0]}.json").exists():
            return time.monotonic() - asked
        assert time.monotonic() < asked + STANDSTILL_S, "no checkpoint came"
        time.sleep(0.002)
    new = [p for p in run.checkpoints if p not in known]
    return time.monotonic() - asked if new else None


def _step(run: RunFolder) -> int:
    pulse = run.pulse()
    return 0 if pulse is None else pulse.global_step


def _alive(pids: list[int]) -> bool:
    stats = (Path(f"/proc/{pid}/stat") for pid in pids)
    return any(s.read_text().rpartition(")")[2].split()[0] != "Z" for s in stats)


def main(folder: Path, cycles: int, seed: int) -> int:
    chance = random.Random(seed)
    # Steps enough that the run is not over before the last cycle: five an epoch.
    epochs = max(3, cycles * STEPS_A_CYCLE // 5)
    print(f"seed {seed}: {cycles} cycles in {epochs * 5} steps of {RANKS} ranks", flush=True)
    never = new_folder(folder / "never")
    assert not any(world.wait(launch(never, 1, None, epochs)))
    run = RunFolder(new_folder(folder / "run"))
    times: list[float] = []
    parts: list[list[dict[str, Any]]] = []
    path: Path | None = None
    began = time.monotonic()
    while True:
        pids = launch(run.path, run.attempt, path, epochs)
        if len(times) < cycles and (took := stop_somewhere(run, chance, pids)) is not None:
            times.append(took)
        codes = world.wait(pids)
        if any(codes):
            print(f"attempt {run.attempt} ended with {codes}; see {run.path / 'log'}-*")
            return 1
        parts.append(seen(run.path, run.attempt))
        if parts[-1][0]["finished"]:
            break
        path = max(run.checkpoints, key=lambda p: p.stat().st_mtime)
        for old in run.checkpoints:
            if old != path:
                for file in old.parent.glob(f"{old.name}*"):
                    file.unlink()
        run.attempt, run.requests = run.attempt + 1, 0
        if len(times) % 20 == 0:
            print(f"{len(times)} cycles, {time.monotonic() - began:.0f} s", flush=True)
    reference = seen(never, 1)
    same = {
        name: all(
            sum((part[rank][name] for part in parts), []) == reference[rank][name]  # noqa: RUF017
            for rank in range(RANKS)
        )
        for name in ("losses", "order")
    }
    same["weights"] = all(
        p["weights"] == r["weights"] for p, r in zip(parts[-1], reference, strict=True)
    )
    steps = len(reference[0]["losses"])
    print(f"{len(times)} stops, {len(parts)} attempts, {steps} steps, seed {seed}")
    for name, equal in same.items():
        verdict = "bit for bit those of the run that was never stopped" if equal else "DIFFER"
        print(f"{name}: {verdict}")
    print(
        f"from request to complete checkpoint: median {statistics.median(times):.3f} s, "
        f"most {max(times):.3f} s"
    )
    return 0 if all(same.values()) and len(times) >= cycles else 1


if __name__ == "__main__":
    seed = int(sys.argv[3]) if len(sys.argv) > 3 else random.SystemRandom().randrange(10**6)
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), seed))
