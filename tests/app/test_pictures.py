"""The run screen as a picture at three sizes, from one constructed frame with a stalled rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from textual.pilot import Pilot

from ltui.training.state.run_snapshot import RankState, Verdict
from tests.app.frames import NOW, frame, rank, snapshot
from tests.app.one_run import OneRun, Script, settled, shown

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
