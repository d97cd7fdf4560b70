"""The run screen and the home screen as pictures, from constructed frames and stored runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from textual.pilot import Pilot
from textual.widgets import Static

from ltui.app.panels.runs_table import RunsTable
from ltui.app.runs import run_list
from ltui.app.screens.home import HomeScreen
from ltui.app.textual_app import LtuiApp
from ltui.training.state.run_labels import RunLabels
from ltui.training.state.run_snapshot import RankState, RunState, Verdict
from ltui.training.store.labels_file import change_labels
from tests.app.frames import NOW, frame, rank, snapshot
from tests.app.one_run import OneRun, Script, settled, shown, until
from tests.stored_runs import stored_run

STALL = Verdict(
    kind="stall",
    level="stalled",
    culprits=(2,),
    waiting=(0, 1, 3),
    place="augment.py:88",
    cause="rank 2 waits for its data; ranks 0, 1 and 3 wait for it",
    remedy="d diagnose",
    began=NOW - 8.2,
)


@pytest.mark.parametrize("size", [(80, 24), (100, 30), (160, 50)])
def test_a_run_with_a_stalled_rank(
    snap_compare: Callable[..., bool], size: tuple[int, int]
) -> None:
    ranks = tuple(rank(i, state=RankState.WAITING, age_s=8.2) for i in range(4))
    stalled = replace(ranks[2], state=RankState.STALLED, phase="fetch data")
    run = snapshot(ranks=(*ranks[:2], stalled, ranks[3]), verdicts=(STALL,))
    app = OneRun(Script(frame(snapshot=run)))

    async def drawn(pilot: Pilot[Any]) -> None:
        await shown(pilot, app)
        await settled(pilot)

    assert snap_compare(app, terminal_size=size, run_before=drawn)


def some_runs(home: Path) -> None:
    """Five ended runs: two presets, and three runs of a script that differ in an option."""
    metrics = {"val/loss": 0.25}
    for number, (name, state) in enumerate(
        [
            ("calm-fox", RunState.FINISHED),
            ("brave-owl", RunState.STOPPED),
            ("old-pine", RunState.FAILED),
            ("keen-elk", RunState.FINISHED),
            ("warm-bee", RunState.FINISHED),
        ]
    ):
        command = ("python", "train.py", "--epochs", "6", "--lr", f"0.{number}")
        run_dir = stored_run(
            home,
            f"{name}-000{number}",
            state=state,
            preset=None if number > 1 else "quickstart",
            command=command if number > 1 else None,
            created_at=time.time() - 86400.0 * 2 * (5 - number),
            global_step=192 - 20 * number,
            max_steps=192,
            metrics=metrics,
            detail={RunState.FAILED: "rank 1 raised ValueError: bad sample"}.get(state),
        )
        if number == 2:
            change_labels(run_dir, lambda _: RunLabels(name="Größe 2", tags=("base",), star=True))


@pytest.mark.parametrize("size", [(160, 50), (120, 40), (80, 24), (60, 15)])
@pytest.mark.parametrize("runs", [0, 5])
def test_home(
    snap_compare: Callable[..., bool],
    private_home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    size: tuple[int, int],
    runs: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_list, "disk_use", lambda _: 1_000_000)
    (private_home / "runs").mkdir(parents=True)
    if runs:
        some_runs(private_home)

    async def drawn(pilot: Pilot[Any]) -> None:
        screen = pilot.app.screen
        assert isinstance(screen, HomeScreen)
        await until(pilot, lambda: bool(screen.query(RunsTable)))
        await until(pilot, lambda: screen.form_panel.result is not None)
        table = screen.query_one(RunsTable)
        # The size of the runs is in the border when every run was measured.
        await until(
            pilot,
            lambda: (
                len(table.rows) == runs
                and (not runs or "MiB" in str(screen.query_one("#runs").border_subtitle))
            ),
        )
        screen.query_one("#title", Static).update(" ltui   ~/work · Python: ~/env/bin/python")
        await settled(pilot)

    assert snap_compare(LtuiApp(private_home), terminal_size=size, run_before=drawn)
