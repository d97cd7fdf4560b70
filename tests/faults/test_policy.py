"""Tests of the stall policy with real faults in real runs. ``make zoo`` runs them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ltui.training.state.run_snapshot import LIVE, RunSnapshot, RunState
from ltui.training.store.history_reader import RunStore
from tests.faults.fault import GRAVE, SCRIPTS, Fault, line_of, one
from tests.faults.run import FaultRun, fault_environment
from tests.faults.verdicts import active_verdicts
from tests.live_processes import wait_until_gone
from tests.ltui_command import answer
from tests.store.histories import stored_rows
from tests.supervise.conftest import read_diagnoses

pytestmark = [
    pytest.mark.skipif("LTUI_POLICY" not in os.environ, reason="minutes: LTUI_POLICY=all"),
    pytest.mark.timeout(600),
]
STEP = 200
"""Step of the fault, late enough for checkpoints before it."""


@contextlib.contextmanager
def _running(folder: Path, inject: str, **stall: Any) -> Iterator[FaultRun]:
    """Run the catalogue's preset with a stall policy, two ranks, many checkpoints and one fault."""
    fault = Fault(
        id="policy", title="", expected=one(), inject=inject,
        env={"ZOO_STEP": str(STEP), "ZOO_ONCE": "1", "LTUI_RESTART_DELAY_S": "0",
             "PYTHONPATH": str(SCRIPTS)},
    )  # fmt: skip
    preset = yaml.safe_load((SCRIPTS / "zoo.yaml").read_text())
    preset["ltui"] |= {"stall": {"then_after_s": 1, **stall}, "checkpoint": {"every_s": 0.5}}
    (folder / "policy.yaml").write_text(yaml.safe_dump(preset))
    run = FaultRun(folder, fault_environment(fault, folder, {}), deprived=False)
    try:
        run.ltui("run", "policy.yaml", "--detach")
        yield run
    finally:
        run.end()


def _assert_no_process_is_left(run: FaultRun) -> None:
    wait_until_gone(run.processes)


def test_stop_ends_the_run_and_stores_the_diagnosis(tmp_path: Path) -> None:
    with _running(tmp_path, "data_sleep", then="stop") as run:
        run.wait_for_injection()
        ended = run.until(lambda s: s.state not in LIVE)
        assert ended.state is RunState.STOPPED, run.log()
        assert ended.detail is not None
        assert ended.detail.startswith("stopped by its stall policy (STALLED: rank 1 ")
        assert any(c.global_step <= STEP for c in ended.checkpoints)
        (diagnosis, *_) = read_diagnoses(run.run_dir, 1)
        verdict = diagnosis.verdicts[0]
        assert (verdict.kind, verdict.level, verdict.culprits) == ("frozen", "stalled", (1,))
        assert line_of("data_sleep") in str(verdict.place)
        assert diagnosis.evidence is not None
        stack = diagnosis.evidence.ranks[1].main_stack
        assert stack is not None
        assert "stuck_sample" in [f.function for f in stack.frames]
        document = answer(run.ltui("diagnose", "last", "--json"))
        assert any(line_of("data_sleep") in v["cause"] for v in document["verdicts"])
        _assert_no_process_is_left(run)


@pytest.mark.parametrize("inject", ["data_gil", "worker_stop", "rank0_barrier"])
def test_restart_resumes_from_the_last_good_checkpoint(tmp_path: Path, inject: str) -> None:
    with _running(tmp_path, inject, then="restart", restarts=1) as run:
        saved: set[int] = set()

        def has_continued(seen: RunSnapshot) -> bool:
            if seen.attempt == 1:
                saved.update(c.global_step for c in seen.checkpoints)
            return seen.attempt == 2 and (seen.global_step or 0) > STEP + 20

        run.wait_for_injection()
        again = run.until(has_continued, 240)
        assert again.state in LIVE, run.log()
        assert not [v for v in active_verdicts(again) if v.level in GRAVE]
        assert again.restarted_because is not None
        assert "STALLED: rank " in again.restarted_because
        with RunStore(run.run_dir) as store:
            (acted,) = [e for e in store.events() if e.kind == "stall_policy"]
        first, second = stored_rows(run.run_dir, "attempts")
        assert acted.data["then"] == "restart"
        assert 0 < max(saved) <= STEP
        assert second["resumed_step"] == max(saved)
        assert read_diagnoses(run.run_dir, first["attempt"])
