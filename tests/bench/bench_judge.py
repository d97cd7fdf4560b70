"""What judging costs, and what a rank's heartbeat thread costs in a healthy run."""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from ltui.training.config.run_spec import StallPolicy
from ltui.training.diagnosis.judge import judge
from ltui.training.diagnosis.judge_input import JudgeInput
from ltui.training.rank.heartbeat.heartbeat_thread import BEAT_S, HeartbeatThread
from ltui.training.state.record_fold import FoldState, fold
from ltui.training.tensor_queue.heartbeat_table import TABLE_FILE_NAME, HeartbeatTable
from ltui.training.tensor_queue.record_types import Phase
from tests.diagnosis.recordings import load
from tests.state.records import pulse, steps

RANKS, ROUNDS = 256, 7


def _stalled() -> float:
    """Seconds for one round over 256 ranks of which one is stuck in its dataset, with evidence."""
    recorded = load("data_sleep")
    ranks = {
        r: replace(recorded.ranks[1 if r == 37 else 0], rank=r, pid=1000 + r, still_s=8.0)
        for r in range(RANKS)
    }
    evidence = replace(recorded, ranks=ranks)
    pulses = {
        r: replace(
            pulse(r, Phase.FETCH if r == 37 else Phase.BACKWARD, 0.0, batch=20),
            pid=1000 + r,
            changed_ns=evidence.taken_ns - 8_000_000_000,
        )
        for r in range(RANKS)
    }
    state = FoldState()
    for rank in range(RANKS):
        state = fold(state, rank, steps(40, 0.1))
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        found = judge(
            JudgeInput(
                now_ns=evidence.taken_ns + 1_000_000_000,
                pulses=pulses,
                policy=StallPolicy(),
                fold=state,
                evidence=evidence,
                evidence_expected=True,
                now_s=evidence.taken_at,
            )
        )
        times.append(time.perf_counter() - began)
        assert [v.culprits for v in found.verdicts] == [(37,)]
    return statistics.median(times)


def _heartbeat() -> float:
    """Microseconds of one beat, on the rank's own processor time."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        (run_dir / "queue" / "1").mkdir(parents=True)
        heartbeat = HeartbeatThread(run_dir, 1, 0)
        times = []
        for _ in range(200):
            began = time.thread_time_ns()
            heartbeat._beat()
            times.append(time.thread_time_ns() - began)
        assert HeartbeatTable(run_dir / "queue" / "1").read()[0].beat_ns > 0, TABLE_FILE_NAME
    return statistics.median(times) / 1e3


def measure() -> list[dict[str, Any]]:
    beat_us = _heartbeat()
    return [
        {"what": f"judging {RANKS} ranks, one stalled", "value": _stalled() * 1e3, "unit": "ms",
         "bound": 200},
        {"what": "the heartbeat thread, one beat", "value": beat_us, "unit": "us"},
        {"what": "the heartbeat thread, share of a core", "value": beat_us / BEAT_S / 1e4,
         "unit": "%", "bound": 0.1},
    ]  # fmt: skip
