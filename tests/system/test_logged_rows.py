"""Runs whose logged values are compared with Lightning's loggers and with a plain computation."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from ltui.training.store.find_run import find_run
from ltui.training.store.history_reader import RunStore
from tests.rank.test_logged_rows import Rows, board_rows, csv_rows
from tests.system.conftest import SCRIPTS, Ltui

PEAK = 40


def _exported(ltui: Ltui) -> dict[int, Rows]:
    """Rank -> name -> [(step, value)] of the whole run."""
    ranks: dict[int, Rows] = {}
    words = [word for name in ("each", "both*", "peak", "val/*") for word in ("--metric", name)]
    for row in json.loads(ltui("export", "last", *words, "--format", "json").stdout):
        rows = ranks.setdefault(row["rank"], {})
        rows.setdefault(row["metric"], []).append((row["step"], row["value"]))
    return ranks


def _joined(parts: list[Rows], resumed_step: int) -> Rows:
    """Return the rows of the first attempt up to the resume, then those of the second."""
    first, second = parts
    names = first.keys() | second.keys()
    return {
        name: [row for row in first.get(name, []) if row[0] <= resumed_step] + second.get(name, [])
        for name in names
    }


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [1, 2])
def test_all_rows_are_recorded_over_a_stop_and_a_resume(ltui: Ltui, ranks: int) -> None:
    shutil.copy(SCRIPTS / "logged_rows.py", ltui.cwd)
    script = [sys.executable, "logged_rows.py", str(ranks)]
    ltui("exec", "--detach", "--keep-best", "val/score:max:2", "--", *script)
    ltui.wait_for_step(2)
    ltui("stop", "last", "--when", "peak>0.5")
    (ltui.cwd / "go").touch()
    stopped = ltui.wait(lambda s: s["state"] == "stopped")
    ltui.wait_until_alone()
    with RunStore(find_run(ltui.home, "last")) as store:
        reasons = [event.text for event in store.events() if event.kind == "stop_when"]
    assert reasons == [f"Stopping because peak is 1 (> 0.5) at step {PEAK}."]
    ltui("resume", "last", "--plain")
    shown: dict[str, Any] = ltui.show()
    assert (shown["state"], shown["attempt"], shown["global_step"]) == ("finished", 2, 180)
    recorded = _exported(ltui)
    assert sorted(recorded) == list(range(ranks))
    resumed_step = stopped["global_step"]
    folders = [Path(ltui.cwd, kind, f"attempt-{n}") for kind in ("csv", "board") for n in (1, 2)]
    logged = _joined([csv_rows(folder) for folder in folders[:2]], resumed_step)
    written = _joined([board_rows(folder) for folder in folders[2:]], resumed_step)
    assert sorted(recorded[0]) == sorted(logged) == sorted(written)
    for name, rows in recorded[0].items():
        assert rows == logged[name], name
        assert [step for step, _ in rows] == [step for step, _ in written[name]], name
        assert [v for _, v in rows] == pytest.approx([v for _, v in written[name]]), name
    for rank, of_rank in recorded.items():
        own = [json.loads(line) for line in (ltui.cwd / f"rank-{rank}.json").open()]
        assert [list(row) for row in of_rank["each"]] == own
    values = [value for _, value in logged["each"]]
    each = shown["metrics"]["each"]
    assert (each["best_min"], each["best_max"], each["last"]) == (
        min(values), max(values), values[-1],
    )  # fmt: skip
    best = sorted((value for _, value in logged["val/score"]), reverse=True)[:2]
    manifests = Path(shown["run_dir"], "checkpoints").glob("step-*-best*.ckpt.json")
    kept = [json.loads(path.read_text())["best"]["value"] for path in manifests]
    assert sorted(kept, reverse=True) == best
    assert not list(Path(shown["run_dir"], "queue").rglob("*.queue"))
