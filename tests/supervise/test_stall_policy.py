"""Tests of verdicts in a real run: events, the hook, and the stop by the policy."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from ltui.app.live.run_poller import RunPoller
from ltui.training.config.run_spec import StallPolicy
from ltui.training.lifecycle.launch_run import launch
from ltui.training.state.run_snapshot import LIVE, RunState, Verdict
from ltui.training.store.run_directory import RunDir
from ltui.training.supervise.verdict_hooks import VerdictNotifier
from tests.required import required

from .conftest import ENGINE, Runs, stored_events


def start(runs: Runs, **policy: Any) -> RunDir:
    spec = runs.spec(sys.executable, str(ENGINE), "2")
    return launch(replace(spec, stall=StallPolicy(**policy)), runs.home)


def signal_a_rank(runs: Runs, run: RunDir, number: int = signal.SIGSTOP) -> int:
    """Send a signal to rank 1 once both ranks train. Return its pid."""
    seen = runs.until(
        run, lambda s: len(s.ranks) == 2 and all((r.global_step or 0) >= 5 for r in s.ranks)
    )
    pid = required(seen.ranks[1].pid)
    os.kill(pid, number)
    return pid


def test_a_verdict_is_an_event_when_it_begins_and_ends_and_named_by_a_kill(runs: Runs) -> None:
    run = start(runs)
    pid = signal_a_rank(runs, run)
    runs.until(run, lambda _: len(stored_events(run, "verdict")))
    os.kill(pid, signal.SIGCONT)
    runs.until(run, lambda _: len(stored_events(run, "verdict_over")))
    watch = RunPoller(run)
    texts = [text for _, text in watch.poll(time.time(), time.monotonic_ns()).events]
    watch.close()
    assert [text.split(" ")[0] for text in texts][-2:] == ["STALLED:", "Recovered"]
    assert [e.text.split(":")[0] for e in stored_events(run, "verdict")] == ["STALLED"]
    (over,) = stored_events(run, "verdict_over")
    assert over.text.startswith("Recovered after ")
    document = over.data["verdict"]
    assert document["culprits"] == [1]
    assert document["ended"] >= document["began"]
    signal_a_rank(runs, run)
    runs.until(run, lambda _: len(stored_events(run, "verdict")) == 2)
    ended = runs.end(run, "kill")
    assert "killed on request (STALLED: the process of rank 1" in required(ended.detail)
    # Ranks that die because a person wanted it are no news.
    assert len(stored_events(run, "verdict")) == 2
    assert not [v for v in ended.verdicts if v.level == "dead"]


def test_the_hook_is_called_for_a_dead_rank_even_if_the_run_ends_at_once(
    runs: Runs, tmp_path: Path
) -> None:
    called = tmp_path / "called"
    run = start(runs, on_verdict=("sh", "-c", f"cat > {called}.part && mv {called}.part {called}"))
    signal_a_rank(runs, run, signal.SIGKILL)
    ended = runs.ended(run)
    assert ended.state not in LIVE
    assert '"level": "dead"' in called.read_text()
    assert len(stored_events(run, "on_verdict")) == 1


@pytest.mark.slow
def test_the_policy_restarts_from_the_last_good_checkpoint_and_then_stops(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LTUI_RESTART_DELAY_S", "1")
    run = start(runs, then="restart", then_after_s=0, restarts=1)
    runs.until(run, lambda s: len(s.ranks) == 2 and (s.global_step or 0) >= 5)
    runs.order(run, "checkpoint")
    saved = runs.until(run, lambda s: s.checkpoints).checkpoints[0].global_step
    signal_a_rank(runs, run)
    again = runs.until(run, lambda s: s.attempt == 2 and (s.global_step or 0) > saved + 5)
    assert again.state in LIVE
    assert "rank 1" in required(again.restarted_because)
    signal_a_rank(runs, run)
    ended = runs.ended(run)
    assert (ended.attempt, ended.state) == (2, RunState.STOPPED)
    assert required(ended.detail).startswith("stopped by its stall policy (STALLED: ")
    assert "not restarted: 1 of 1 restarts are used up" in required(ended.detail)
    assert [e.data["then"] for e in stored_events(run, "stall_policy")] == ["restart", "stop"]


@pytest.mark.parametrize(
    ("last_s", "last_step", "word"),
    [(4.0, 90, "Active"), (9.0, 90, "Recovered"), (30.0, 70, "Active"), (30.0, 71, "Active")],
)
def test_a_rank_that_was_slow_until_the_run_ended_has_not_recovered(
    runs: Runs, last_s: float, last_step: int, word: str
) -> None:
    """Also if the program takes long to exit after its last step."""
    slow = Verdict(kind="straggler", level="slow", culprits=(1,), cause="rank 1 is slow", began=0.0)
    notifier = VerdictNotifier(runs.spec(sys.executable, str(ENGINE), "2"), 1, "/nowhere")
    events = []
    for at, verdicts in ((0.0, [slow]), (2.0, [slow]), (3.0, []), (last_s, [])):
        step = 70 if at <= 3.0 else last_step
        events += notifier.update(verdicts, at, at, ending=False, step=step)
    events += notifier.end(last_s)
    notifier.wait_for_hooks(1.0)
    assert [event.text.split()[0] for event in events] == ["SLOW:", word]
