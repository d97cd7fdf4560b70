"""A run that was stopped and resumed is the run that was never stopped: order of samples, losses,
means, weights and callbacks, bit for bit.

A part of the cases by default; ``LTUI_EXACTNESS=all`` tries every loader, with and without workers,
on one rank, two and four, stopped at every place, and prints the table. A part of them:
``LTUI_EXACTNESS_RANKS=2,4``, ``LTUI_EXACTNESS_CASES='own:*,*:mid-epoch'``; the parts add up, and
what was broken off goes on, in a ``LTUI_EXACTNESS_FOLDER``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ltui.training.data.ffcv.ffcv_environment import has_ffcv
from tests.run_module import run_module

ALL = os.environ.get("LTUI_EXACTNESS") == "all"
FEW = [
    *("1/plain:0:mid-epoch", "1/plain:0:epoch end", "1/plain:0:all steps"),
    *("1/plain:2:first epoch", "1/generator:0:validation within", "1/own:2:counted steps"),
    *("1/two:0:mid-epoch", "1/counting:0:mid-epoch", "2/counting:2:epoch end"),
    *("1/stateful:0:validation", "1/stream:2:mid-epoch"),
    *("1/plain:0:validation:average", "1/plain:0:validation within:swap"),
    *("1/plain:0:mid-epoch:callbacks", "1/plain:0:mid-epoch:hooks", "1/plain:0:mid-epoch:scaler"),
    *("1/plain:0:validation:validations", "1/moody:0:mid-epoch", "1/lucky:0:mid-epoch"),
    *("2/plain:0:validation", "2/plain:2:counted steps", "2/own:0:accumulation"),
    *("2/weighted:0:mid-epoch", "2/stateful:0:epoch end", "2/plain:0:mid-epoch:sharded"),
    *("1/persistent:2:counted steps", "1/spawned:2:mid-epoch", "2/stateful_weighted:2:first epoch"),
    *("2/length_batches:0:mid-epoch", "2/sequences:2:mid-epoch", "2/stateful_shuffled:2:mid-epoch"),
    *("4/plain:0:first epoch", "4/plain:0:validation"),
    *(["2/ffcv_loader:0:mid-epoch"] if has_ffcv() else []),
]
REGROUPED = ["regroup/plain", "regroup/own"]
# What can't be exact is said.
NOT_EXACT = {
    "moody": "a sampler draws another order than before",
    "lucky": "the loader draws at random in the rank's own process",
}
WHERE_BATCHES_ARE_LEFT = (
    *("first epoch", "mid-epoch", "validation within", "sanity check", "accumulation"),
    *("counted steps", "max steps", "more steps"),
)
"""At the other places there may be some, as the stop comes a step or two after it is asked for."""
RANKS = [int(n) for n in os.environ.get("LTUI_EXACTNESS_RANKS", "1,2,4").split(",")]
CASES = os.environ.get("LTUI_EXACTNESS_CASES", "*").split(",") if ALL else FEW + REGROUPED
FOLDER = os.environ.get("LTUI_EXACTNESS_FOLDER")
LIMIT_S = 8 * 3600 if ALL else 580
SHARED = "Not exact from here: it was saved by"
IN_WORKERS = "random draws of the dataset inside its workers"
READ_AGAIN = "were read again and dropped"
FOLLOWED = (
    *(
        "plain",
        "in_order",
        "persistent",
        "spawned",
        "served",
        "generator",
        "weighted",
        "batched",
        "two",
        "shortest",
    ),
    *("length_batches", "counting", "moody"),
)
WITHOUT_POSITION = ("stream", "lucky", "simple")


def tried(folder: Path, ranks: list[int], cases: list[str], limit_s: int) -> list[dict[str, Any]]:
    numbers = ",".join(map(str, ranks))
    (folder / "table.json").unlink(missing_ok=True)
    log = folder / "log.txt"
    code = run_module("tests.rank.exactness", [folder, numbers, *cases], log, limit_s)
    log_text = log.read_text(errors="replace")
    if code != 0:
        print(log_text[-4000:])
    assert (folder / "table.json").exists(), log_text[-4000:]
    table: list[dict[str, Any]] = json.loads((folder / "table.json").read_text())
    return table


SIGNS = {"failed": "!", "order": "x"}


def printed(table: list[dict[str, Any]]) -> None:
    """A line a loader, a column a place, and in it a sign for each number of ranks."""
    found: dict[tuple[str, str], dict[tuple[str, int], str]] = {}
    for row in table:
        loader, workers, stop, *part = row["case"].split(":")
        name = " ".join([loader, *part])
        found_of = [sign for what, sign in SIGNS.items() if what in row["differs"]]
        differs = found_of[0] if found_of else "~" if row["differs"] else "="
        found.setdefault((name, workers), {})[stop, row["ranks"]] = differs
    ranks = sorted({row["ranks"] for row in table})
    stops = list(dict.fromkeys(stop for cells in found.values() for stop, _ in cells))
    print(f"\nIn each column {', '.join(map(str, ranks))} ranks: = as never stopped, bit for bit;")
    print(
        "~ losses, means or weights differ; x another order of samples; ! failed; blank not tried"
    )
    print()
    for number, stop in enumerate(stops, 1):
        print(f"  {number:2} stopped in: {stop}")
    width = len(ranks) + 1
    heads = "".join(str(number).ljust(width) for number in range(1, len(stops) + 1))
    print(f"\n{'training data':30}{'workers':9}{heads}".rstrip())
    for (name, workers), cells in found.items():
        signs = ("".join(cells.get((stop, n), " ") for n in ranks).ljust(width) for stop in stops)
        print(f"{name:30}{workers:9}{''.join(signs)}".rstrip())
    print()
    for number in ranks:
        rows = [row for row in table if row["ranks"] == number]
        exact = sum(not row["differs"] for row in rows)
        expected_differences = sum(
            bool(row["differs"]) and row["case"].split(":")[0] in NOT_EXACT for row in rows
        )
        title = f"{number} rank{'s' * (number != 1)}"
        print(
            f"{title}: {exact} of {len(rows)} exact, {expected_differences} not exact as documented"
        )


def possible_notes(row: dict[str, Any]) -> list[str]:
    """Return the notes that a case may send, each as a part of its text."""
    loader, workers, _ = row["case"].split(":")[:3]
    notes = [READ_AGAIN] if loader in WITHOUT_POSITION else []
    if loader in FOLLOWED and workers != "0":
        notes.append(IN_WORKERS)
    return notes


def checked(table: list[dict[str, Any]]) -> None:
    wrong = []
    for row in table:
        loader, _, stop = row["case"].split(":")[:3]
        possible, notes = possible_notes(row), row["notes"]
        batches_remain = stop in WHERE_BATCHES_ARE_LEFT
        if batches_remain and any(all(part not in note for note in notes) for part in possible):
            wrong.append((row["ranks"], row["case"], "said only", notes))
        is_reported = any(NOT_EXACT.get(loader, "never") in note for note in notes)
        if row["differs"] and not (is_reported or (loader in NOT_EXACT and not batches_remain)):
            wrong.append((row["ranks"], row["case"], "differs in", row["differs"]))
        allowed = [*possible, "again", NOT_EXACT.get(loader, "again")]
        if any(all(part not in note for part in allowed) for note in notes):
            wrong.append((row["ranks"], row["case"], "said too much", notes))
    assert wrong == []


def every_sample_once(folder: Path) -> None:
    """Check a run with a change of the number of ranks within an epoch."""
    path = folder / "regroup.json"
    for run in json.loads(path.read_text()) if path.exists() else ():
        for numbers in run["epochs"].values():
            assert sorted(set(numbers)) == list(range(83)), run["chain"]
            assert len(numbers) - 83 < 4  # ranks are filled up to the same number of batches
        changes = len(run["chain"].split()) - 1
        assert [SHARED in note for note in run["notes"]] == [True] * changes, run["notes"]


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 20)
def test_resumed_runs_equal_runs_without_a_stop(tmp_path: Path) -> None:
    folder = tmp_path if FOLDER is None else Path(FOLDER)
    folder.mkdir(parents=True, exist_ok=True)
    table = tried(folder, RANKS, CASES, LIMIT_S)
    printed(table)
    checked(table)
    every_sample_once(folder)
    if not ALL:
        assert sorted(f"{row['ranks']}/{row['case']}" for row in table) == sorted(FEW)
    for row in table:
        assert not row["differs"] or row["case"].split(":")[0] in NOT_EXACT
