"""Stopping what does not want to stop."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from ltui.training.config.run_spec import StallPolicy
from ltui.training.diagnosis.judge import Judgement
from ltui.training.diagnosis.judge_input import Death, JudgeInput
from ltui.training.lifecycle.run_status import resolve_snapshot
from ltui.training.lifecycle.stop_escalation import (
    INTERRUPT_S,
    NOT_STOPPED,
    StopEscalation,
    StopStage,
)
from ltui.training.process.identity import ProcessIdentity
from ltui.training.state.run_snapshot import RunState
from ltui.training.store.run_directory import RunDir
from ltui.training.supervise import stops
from ltui.training.supervise.health_monitor import HealthMonitor
from ltui.training.supervise.stops import Stops
from ltui.training.tensor_queue.control_block import Command
from tests.required import required
from tests.state.records import SECOND
from tests.supervise.conftest import Runs


def test_the_stages_follow_each_other() -> None:
    escalation = StopEscalation(100.0, 60.0, telemetry=True)
    assert escalation.stage(100.0) is StopStage.AGREE
    words = "stopping: waiting for the ranks to stop together, 3 s of 60 s"
    assert escalation.describe(103.0) == words
    assert escalation.forced_reason(159.0) is None
    assert escalation.stage(160.0) is StopStage.INTERRUPT
    assert escalation.stage(160.0 + INTERRUPT_S) is StopStage.KILL
    assert escalation.forced_reason(170.0) == "because the ranks did not stop together within 60 s"
    saving = escalation.describe(103.0, saving=True)
    assert saving == "stopping: saving the checkpoint, 3 s of 60 s"
    late = escalation.describe(160.0, stopped=True)
    assert late == "stopping: the program did not end within 60 s"
    silent = StopEscalation(0.0, 10.0, telemetry=False)
    assert (silent.stage(0.0), silent.stage(10.0)) == (StopStage.TERMINATE, StopStage.KILL)
    assert StopEscalation(0.0, 60.0, telemetry=True, kill_at_once=True).stage(0.0) is StopStage.KILL


def test_a_frozen_rank_is_killed_in_the_end(runs: Runs) -> None:
    run = runs.training()
    frozen = required(resolve_snapshot(run).ranks[1].pid)
    os.kill(frozen, signal.SIGSTOP)
    runs.order(run, "stop", timeout_s=5)
    words = "stopping: waiting for the ranks to stop together"
    waiting = runs.until(run, lambda s: (s.detail or "").startswith(words))
    assert waiting.state is RunState.STOPPING
    ended = runs.ended(run)
    assert ended.state is RunState.STOPPED
    assert "killed because the ranks did not stop together within 5 s" in required(ended.detail)


def test_a_program_that_goes_on_after_its_ranks_have_stopped_is_what_is_waited_for(
    runs: Runs, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    run = runs.training("--end-gate", str(gate))
    runs.order(run, "stop", timeout_s=600)
    words = "stopping: all ranks have stopped; waiting for the program to end, "
    waiting = runs.until(run, lambda s: (s.detail or "").startswith(words))
    assert waiting.state is RunState.STOPPING
    assert [c.reason for c in waiting.checkpoints] == ["stop"]
    gate.touch()
    assert runs.ended(run).state is RunState.STOPPED


def test_a_command_that_ignores_sigterm_is_killed_also_by_the_next_supervisor(runs: Runs) -> None:
    script = "trap '' TERM; echo deaf; while true; do sleep 0.1; done"
    run = runs.start("bash", "-c", script)
    runs.until(run, lambda _: run.engine_log_path(1).read_text())
    runs.order(run, "stop", timeout_s=4)
    runs.until(run, lambda s: s.state is RunState.STOPPING)
    runs.replace_supervisor(run)
    ended = runs.ended(run)
    assert ended.state is RunState.STOPPED
    assert "because the command did not end within 4 s" in required(ended.detail)


def test_kill_cuts_a_stop_short(runs: Runs) -> None:
    run = runs.training()
    os.kill(required(resolve_snapshot(run).ranks[0].pid), signal.SIGSTOP)
    runs.order(run, "stop", timeout_s=600)
    runs.until(run, lambda s: s.state is RunState.STOPPING)
    assert "killed on request" in required(runs.end(run, "kill").detail)


@pytest.mark.parametrize("requested_at", [1, 2])
def test_only_ranks_that_died_before_the_end_was_requested_are_reported(requested_at: int) -> None:
    monitor = HealthMonitor()

    def judged(tick: int, *dead: int) -> Judgement:
        inputs = JudgeInput(
            now_ns=tick * SECOND,
            now_s=tick,
            pulses={0: None, 1: None},
            policy=StallPolicy(),
            history=monitor.history,
            dead=frozenset(dead),
            deaths={rank: Death(signal="SIGTERM") for rank in dead},
        )
        return monitor.judge(inputs, end_requested=tick >= requested_at)

    first, second, third = judged(1, 0), judged(2, 0, 1), judged(3)
    died_before = [] if requested_at == 1 else [(0,)]
    assert [verdict.culprits for verdict in first.verdicts] == died_before
    assert second.verdicts == ()
    assert [v.culprits for v in (*second.ended, *third.ended)] == died_before


def test_ranks_that_cannot_save_are_not_forced(tmp_path: Path) -> None:
    controller = Stops(RunDir(tmp_path), 1)
    controller.stop(0.0, 60.0, telemetry=True)
    controller.stop_failed("No checkpoint was saved at step 7: the disk is full. Training goes on.")
    assert controller.escalation is None
    assert required(controller.error).startswith(NOT_STOPPED)
    controller.escalate(1000.0, {}, None, {})
    assert controller.forced_reason is None
    controller.kill(1001.0)
    controller.stop_failed("too late")
    assert controller.escalation is not None
    controller.close()


def test_a_pause_ends_when_a_rank_cannot_take_part(tmp_path: Path) -> None:
    controller = Stops(RunDir(tmp_path), 1)
    controller.pause_failed("nothing was requested")
    assert controller.error is None
    controller.request(Command.PAUSE)
    controller.pause_failed("This rank cannot pause any more: TimeoutError.")
    assert not controller.pausing
    assert controller.error == "not paused: This rank cannot pause any more: TimeoutError."
    controller.close()


def test_each_rank_is_interrupted_twice_even_by_a_late_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[float, int, int]] = []
    controller = Stops(RunDir(tmp_path), 1)
    controller.escalation = StopEscalation(0.0, 60.0, telemetry=True)
    for now_s in (63.0, 63.25, 64.0, 65.0, 65.25, 67.0):

        def send(process: ProcessIdentity, number: int, *, at_s: float = now_s) -> None:
            sent.append((at_s, process.pid, number))

        monkeypatch.setattr(stops, "send_signal", send)
        ranks = {0: ProcessIdentity(11, 1)} | ({1: ProcessIdentity(12, 1)} if now_s > 64 else {})
        controller.escalate(now_s, {}, None, ranks)
    assert sorted(sent) == [
        (63.0, 11, signal.SIGINT),
        (65.0, 11, signal.SIGINT),
        (65.0, 12, signal.SIGINT),
        (67.0, 12, signal.SIGINT),
    ]
