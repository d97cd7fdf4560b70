"""The time of a run as its history has it, also of a long one."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ltui.app.live.run_time import read_time
from ltui.training.shared.record_types import StepField
from ltui.training.state.run_snapshot import Event, RunState, Verdict
from ltui.training.state.time_ledger import TimeLedger, time_ledger
from ltui.training.store import time_queries
from ltui.training.store.history_writer import Batch, Cursor, StoreWriter
from ltui.training.store.run_directory import RunDir
from ltui.training.store.time_queries import TimeStore
from tests.store.histories import StepRow, run_dir, snapshot, step_row


def timed_steps(first: int, last: int, begin: float, rank: int = 0, fetch_s: float = 0.1) -> Batch:
    """Steps of half a second, the first of which begins at ``begin``."""
    rows: list[StepRow] = []
    for step in range(first, last + 1):
        row = step_row(step, math.nan, begin + (step - first + 1) * 0.5)
        row[StepField.FETCH_S] = fetch_s
        rows.append((rank, step, row))
    return Batch(steps=rows, cursors={rank: Cursor(last + 1)})


def event(t: float, kind: str, text: str = "", **fields: Any) -> Event:
    return Event(t, kind, text, fields)


def write_run(run: RunDir) -> None:
    """Two attempts: the first is restarted at its step 40 of 60 after its rank died."""
    with closing(StoreWriter(run.db_path)) as store:

        def begin(attempt: int, at: float, **values: Any) -> None:
            store.begin_attempt(attempt, started_at=at, boot_id="b", resumed_path=None, **values)
            store.set_state(attempt, at, RunState.STARTING, None, None)

        begin(1, 100.0, resumed_step=None)
        store.commit(1, timed_steps(1, 60, 110.0))
        store.commit(1, timed_steps(1, 60, 110.0, rank=1, fetch_s=0.2))
        events = [
            event(130.0, "checkpoint_saved", seconds=0.3),  # within a step
            event(140.5, "phase", "Validation began."),
            event(142.5, "phase", "Validation ended."),
        ]
        store.commit(1, Batch(events=events))
        killed = Verdict(kind="killed", level="dead", cause="it was killed", began=143.0)
        store.write_verdict(1, killed)
        store.end_attempt(1, 150.0)
        begin(2, 160.0, resumed_step=40, reason="restart 1 of 3")
        store.commit(2, timed_steps(41, 60, 170.0))
        for at, state in ((175.0, RunState.PAUSED), (178.0, RunState.RUNNING)):
            store.set_state(2, at, state, None, None)
        supervisor = event(195.0, "supervisor", since=185.0)
        took = event(199.0, "phase", "Validation took 2.0 s.", seconds=2.0, ended=198.0)
        store.commit(2, Batch(events=[supervisor, took]))
        store.end_attempt(2, 200.0)
        store.write_snapshot(snapshot(state=RunState.FINISHED, created_at=99.0, ended_at=200.0))


def ledger_of(run: RunDir, most_blocks: int = 20_000) -> TimeLedger:
    with TimeStore(run) as store:
        return time_ledger(store.time_facts(store.snapshot(), most_blocks), 8)


def test_what_a_history_holds_becomes_parts(tmp_path: Path) -> None:
    run = run_dir(tmp_path)
    write_run(run)
    ledger = ledger_of(run)
    assert ledger.run.parts_us == {
        "training": 17_300_000, "data": 9_400_000, "validation": 4_000_000, "checkpoints": 300_000,
        "start_up": 21_000_000, "stalls": 7_000_000, "repeated_steps": 10_000_000,
        "restarts": 10_000_000, "shutdown": 9_000_000, "pauses": 3_000_000, "unknown": 10_000_000,
    }  # fmt: skip
    assert sum(ledger.run.parts_us.values()) == 101_000_000
    assert ledger.run.stalls_us == {"killed": 7_000_000}
    assert [account.number for account in ledger.ranks] == [0, 1]


@pytest.mark.parametrize("most_rows", [0, 100_000])
def test_coarse_blocks_of_a_long_history_say_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_rows: int
) -> None:
    monkeypatch.setattr(time_queries, "MOST_ROWS", most_rows)
    run = run_dir(tmp_path)
    with closing(StoreWriter(run.db_path)) as store:
        store.begin_attempt(1, started_at=0.0, boot_id="b", resumed_path=None, resumed_step=None)
        store.commit(1, timed_steps(1, 1000, 50.0))
        store.commit(1, timed_steps(1001, 3000, 600.0))
        events = [
            event(550.0, "phase", "Validation began."),
            event(600.0, "phase", "Validation ended."),
        ]
        store.commit(1, Batch(events=events))
        store.end_attempt(1, 1700.0)
        store.write_snapshot(snapshot(state=RunState.FINISHED, created_at=0.0, ended_at=1700.0))
    fine, coarse = ledger_of(run), ledger_of(run, most_blocks=100)
    assert fine.run.parts_us == {
        "training": 1_200_000_000, "data": 300_000_000, "validation": 50_000_000,
        "start_up": 50_000_000, "shutdown": 100_000_000,
    }  # fmt: skip
    for part, us in fine.run.parts_us.items():
        assert abs(coarse.run.parts_us[part] - us) <= 40_000_000, part  # one window


def test_lists_and_reports_say_the_same(tmp_path: Path) -> None:
    """Two ranks take turns in being the slow one, which blocks of several steps do not show."""
    run = run_dir(tmp_path)
    with closing(StoreWriter(run.db_path)) as store:
        store.begin_attempt(1, started_at=0.0, boot_id="b", resumed_path=None, resumed_step=None)
        for rank in range(2):
            rows: list[StepRow] = []
            for _, step, values in timed_steps(1, 1500, 10.0).steps:
                row = list(values)
                row[StepField.STEP_S] = 0.5 if step % 2 == rank else 0.2
                rows.append((rank, step, row))
            store.commit(1, Batch(steps=rows, cursors={rank: Cursor(1501)}))
        store.end_attempt(1, 760.0)
        store.write_snapshot(snapshot(state=RunState.FINISHED, created_at=0.0, ended_at=760.0))
    with TimeStore(run) as reader:
        newest = reader.snapshot()
    listed, shown = read_time(run, newest).ledger, read_time(run, newest, in_detail=True).ledger
    assert listed.run == shown.run
    assert shown.run.parts_us["training"] == 600_000_000
