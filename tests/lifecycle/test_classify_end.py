"""The sentence that says how a run ended, from what is known of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from ltui.training.lifecycle.classify_end import (
    AttemptEnd,
    EndFacts,
    classify_end,
    with_verdict_cause,
)
from ltui.training.lifecycle.elastic_log import UNGUARDED, last_error_line, worker_failures
from ltui.training.lifecycle.run_processes import EngineExit
from ltui.training.shared.record_types import Outcome, Phase, PulseState
from ltui.training.state.record_fold import FoldedEvent, FoldState, RankFold
from ltui.training.state.run_snapshot import CheckpointInfo, RunState, Verdict

ELASTIC_LOG = """\
W1121 torch/distributed/elastic/multiprocessing/api.py:1000] Sending process 4301 closing signal
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
/bin/sh FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-21_04:20:00
  host      : vm
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 4300)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_04:19:59
  host      : vm
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 4301)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 4301
============================================================
"""


def _pulse(rank: int, outcome: Outcome = Outcome.RUNNING, changed: float = 1.0) -> PulseState:
    return PulseState(
        pid=100 + rank, start_ticks=1, rank=rank, local_rank=rank, world_size=2,
        phase=Phase.FORWARD, epoch=0, batch=0, global_step=7, changed_ns=0,
        changed_wall_s=changed, outcome=outcome, decision_done=0, telemetry_ok=True, restarts=0,
    )  # fmt: skip


def _raised(rank: int, t: float, name: str, message: str) -> RankFold:
    fields: dict[str, Any] = {"type": name, "message": message, "t": t, "step": 7}
    event = FoldedEvent(rank=rank, t_ns=0, kind="exception", text=message, fields=fields)
    return RankFold(rank=rank, exception=event)


def _facts(**changes: Any) -> EndFacts:
    facts = EndFacts(
        exit=EngineExit(exit_code=1),
        pulses={0: _pulse(0), 1: _pulse(1)},
        global_step=7,
    )
    return replace(facts, **changes)


def test_a_stop_on_one_of_several_nodes() -> None:
    gone = _raised(1, 1.0, "RuntimeError", "Connection closed by peer")
    for fold in (FoldState(), FoldState(ranks={1: gone})):
        end = classify_end(_facts(stop_requested=True, multi_node=True, fold=fold))
        assert end.state is RunState.STOPPED
        assert "no checkpoint was saved" in end.detail
    own = FoldState(ranks={1: _raised(1, 1.0, "ValueError", "a mistake")})
    assert (
        classify_end(_facts(stop_requested=True, multi_node=True, fold=own)).state
        is RunState.FAILED
    )
    assert classify_end(_facts(multi_node=True)).state is RunState.FAILED


def test_a_launcher_that_was_killed_on_another_machine_is_the_cause() -> None:
    victim = FoldState(ranks={0: _raised(0, 1.0, "RuntimeError", "Connection reset by peer")})
    machines, lost = {0: "a", 1: "b"}, {"b": EngineExit(signal=9)}
    facts = _facts(multi_node=True, fold=victim, machines=machines, lost_engines=lost)
    end = classify_end(facts)
    assert end.state is RunState.CRASHED
    assert end.detail.startswith("on b the launcher was killed by SIGKILL")
    assert end.detail.endswith("at step 7; the error of rank 0 on a followed from that")
    own = FoldState(ranks={1: _raised(1, 1.0, "ValueError", "a mistake")})
    assert "raised ValueError" in classify_end(replace(facts, fold=own)).detail


def test_torch_elastic_says_who_failed_first() -> None:
    failures = worker_failures(f"earlier output\n{ELASTIC_LOG}")
    assert [(f.rank, f.exit_code, f.first) for f in failures] == [(0, 1, False), (1, -9, True)]
    assert worker_failures("nothing of the kind") == []


def test_the_killed_rank_is_the_cause_and_not_its_victim() -> None:
    victim = _raised(0, 5.0, "RuntimeError", "Connection closed by peer [127.0.0.1]:3")
    end = classify_end(
        _facts(failures=tuple(worker_failures(ELASTIC_LOG)), fold=FoldState(ranks={0: victim}))
    )
    assert (end.state, end.first_failed_rank) == (RunState.CRASHED, 1)
    assert end.detail.startswith("rank 1 was killed by SIGKILL")
    assert end.detail.endswith("at step 7")


def test_without_an_agent_the_silent_rank_is_the_cause() -> None:
    victim = _raised(0, 5.0, "RuntimeError", "Connection reset by peer")
    end = classify_end(_facts(fold=FoldState(ranks={0: victim})))
    assert (end.state, end.first_failed_rank) == (RunState.CRASHED, 1)


def test_a_rank_that_ended_before_the_others_is_named_before_their_error() -> None:
    victim = FoldState(ranks={0: _raised(0, 5.0, "RuntimeError", "Connection reset by peer")})
    pulses = {0: _pulse(0, Outcome.RAISED), 1: _pulse(1, Outcome.FINISHED)}
    end = classify_end(_facts(fold=victim, pulses=pulses))
    assert end.state is RunState.FAILED
    assert end.detail.startswith(
        "rank 1 ended its training at step 7 while the others went on; then rank 0 raised"
    )


def test_the_real_exception_wins_over_those_it_caused() -> None:
    ranks = {
        0: _raised(0, 4.0, "RuntimeError", "[gloo] Socket timeout"),
        1: _raised(1, 5.0, "IndexError", "index 9 is out of bounds\nfor axis 0"),
    }
    end = classify_end(_facts(fold=FoldState(ranks=ranks)))
    assert end.state is RunState.FAILED
    assert end.detail == "rank 1 raised IndexError: index 9 is out of bounds at step 7"


def test_an_error_of_the_users_own_is_no_consequence() -> None:
    """Whatever words of ours it happens to contain."""
    own = (
        ("KeyError", "no such store: 'train'"),
        ("ValueError", "the peer of sample 7 is missing"),
        ("RuntimeError", "barrier height must be positive"),
        ("RuntimeError", "Default process group has not been initialized"),
    )
    failures = tuple(worker_failures(ELASTIC_LOG))
    for name, message in own:
        fold = FoldState(ranks={0: _raised(0, 5.0, name, message)})
        end = classify_end(_facts(failures=failures, fold=fold))
        assert end.detail == f"rank 0 raised {name}: {message} at step 7"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("DistStoreError", "wait timeout after 300000ms, keys: /default_pg/0//1"),
        ("DistNetworkError", "The client socket has timed out after 60000ms while trying"),
        ("RuntimeError", "[pair.cc:525] Read error [127.0.1.1]:24232: Connection reset by peer"),
        ("RuntimeError", "[unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation"),
        ("RuntimeError", "Application timeout caused pair closure"),
        ("RuntimeError", "Rank 1 failed to pass monitoredBarrier in 1800000 ms"),
        ("DistBackendError", "NCCL error in: x.cpp:3, remote process exited or there was"),
        ("SIGTERMException", ""),
    ],
)
def test_what_torch_says_of_a_partner_that_has_gone(name: str, message: str) -> None:
    fold = FoldState(ranks={0: _raised(0, 5.0, name, message)})
    end = classify_end(_facts(failures=tuple(worker_failures(ELASTIC_LOG)), fold=fold))
    assert (end.state, end.first_failed_rank) == (RunState.CRASHED, 1)


def test_ends_that_are_no_failure() -> None:
    well = {r: _pulse(r, Outcome.FINISHED) for r in (0, 1)}
    assert (
        classify_end(_facts(exit=EngineExit(exit_code=0), pulses=well)).state is RunState.FINISHED
    )
    left = {r: _pulse(r, Outcome.STOPPED) for r in (0, 1)}
    whole = CheckpointInfo(path="p", global_step=7, ok=True, saved_at=1.0)
    stopped = classify_end(_facts(exit=EngineExit(exit_code=0), pulses=left, checkpoints=(whole,)))
    assert stopped.detail == "stopped at step 7, checkpoint verified"
    broken = replace(whole, ok=False)
    stopped = classify_end(_facts(exit=EngineExit(exit_code=0), pulses=left, checkpoints=(broken,)))
    assert stopped.detail == "stopped at step 7, no checkpoint was saved"
    plain = classify_end(EndFacts(exit=EngineExit(exit_code=0), user_command=True))
    assert (plain.state, plain.detail) == (RunState.FINISHED, "exit code 0")


def test_an_end_before_training_ended_says_so() -> None:
    end = classify_end(_facts(exit=EngineExit(exit_code=0)))
    assert "exit code 0, but rank 0 had not ended its training" in end.detail


def test_signals_as_shells_report_them() -> None:
    end = classify_end(EndFacts(exit=EngineExit(exit_code=137), user_command=True))
    assert (end.state, "SIGKILL" in end.detail) == (RunState.CRASHED, True)
    asked = classify_end(
        EndFacts(exit=EngineExit(exit_code=143), user_command=True, stop_requested=True)
    )
    assert asked.state is RunState.STOPPED


def test_a_stop_that_was_asked_for_is_no_failure_of_a_command_without_telemetry() -> None:
    """torchrun answers SIGTERM with an exception of its own and exit code 1."""
    torchrun = EndFacts(exit=EngineExit(exit_code=1), user_command=True, stop_requested=True)
    end = classify_end(torchrun)
    assert (end.state, end.exit_code) == (RunState.STOPPED, 1)
    assert end.detail == (
        "stopped on request (the command exited with code 1); no checkpoint was saved"
    )
    failed = replace(torchrun, failures=tuple(worker_failures(ELASTIC_LOG)))
    assert classify_end(failed).state is not RunState.STOPPED, "a rank had failed by itself"
    assert classify_end(replace(torchrun, stop_requested=False)).state is RunState.FAILED
    preset = replace(torchrun, user_command=False)
    assert classify_end(preset).state is RunState.FAILED


def test_a_stop_before_the_ranks_train_is_no_failure() -> None:
    """The launcher of a preset is torchrun, which ends with an exception at the signal."""
    line = "torch.distributed.elastic.multiprocessing.api.SignalException: Process 7 got signal: "
    facts = EndFacts(exit=EngineExit(exit_code=1), stop_requested=True, last_line=f"{line}15")
    end = classify_end(facts)
    assert (end.state, end.exit_code) == (RunState.STOPPED, 1)
    assert "no checkpoint was saved" in end.detail
    for other in (
        replace(facts, stop_requested=False),
        replace(facts, last_line=f"{line}11"),
        replace(facts, last_line="ImportError: no module named data"),
        replace(facts, failures=tuple(worker_failures(ELASTIC_LOG))),
    ):
        assert classify_end(other).state is not RunState.STOPPED


def test_the_end_says_what_the_verdict_knows_of_a_dead_rank() -> None:
    victim = _raised(0, 5.0, "RuntimeError", "Connection closed by peer")
    end = classify_end(_facts(fold=FoldState(ranks={0: victim})))
    assert "died without a Python error" in end.detail
    verdict = Verdict(
        kind="killed", level="dead", culprits=(1,), cause="...", confidence=0.95,
        evidence={
            "reasons": {"1": "was killed by SIGKILL (not the out-of-memory killer)"},
            "consequences": {"0": "raised RuntimeError"},
        },
    )  # fmt: skip
    with_cause = with_verdict_cause(end, (verdict,), 7)
    assert with_cause.detail == (
        "rank 1 was killed by SIGKILL (not the out-of-memory killer) at step 7"
        "; the error of rank 0 followed from that"
    )
    unsure = replace(verdict, confidence=0.55)
    assert with_verdict_cause(end, (unsure,), 7) == end
    engine = AttemptEnd(state=RunState.FAILED, detail="the command exited with code 1", exit_code=1)
    cause = replace(verdict, cause="rank 1 was killed by SIGKILL")
    with_cause = with_verdict_cause(engine, (cause,), 7)
    assert (with_cause.state, with_cause.first_failed_rank) == (RunState.CRASHED, 1)
    assert with_cause.detail == "rank 1 was killed by SIGKILL at step 7"
    raised = replace(verdict, kind="raised")
    assert with_verdict_cause(end, (raised,), 7) == end
    other = replace(verdict, evidence={"reasons": {"0": "was killed by SIGKILL"}})
    assert with_verdict_cause(end, (other,), 7) == end


def test_a_command_that_could_not_start() -> None:
    end = classify_end(EndFacts(exit=EngineExit(exit_code=127, error="x could not be started: no")))
    assert (end.state, end.detail) == (RunState.FAILED, "x could not be started: no")


def test_nobody_saw_it() -> None:
    assert classify_end(_facts(exit=None)).state is RunState.LOST
    assert "the machine was restarted" in classify_end(_facts(exit=None, rebooted=True)).detail
    well = {r: _pulse(r, Outcome.FINISHED) for r in (0, 1)}
    assert classify_end(_facts(exit=None, pulses=well)).state is RunState.FINISHED
    assert classify_end(_facts(exit=None, shim_died=True)).state is RunState.CRASHED


def test_the_line_that_says_most() -> None:
    log = "a\nTraceback\nValueError: bad\nbye\n\n"
    assert last_error_line(log) == "ValueError: bad"
    assert last_error_line("one\ntwo\n") == "two"
    assert last_error_line("") is None


def test_a_warning_after_the_exception_is_not_the_cause() -> None:
    trace = "Traceback (most recent call last):\n  File 't.py', line 3, in f\n    g()\n    ^^^\n"
    warning = (
        "/x/resource_tracker.py:254: UserWarning: resource_tracker: 1 leaked semaphore objects\n"
        "  warnings.warn('resource_tracker: ...')\n"
    )
    ignored = f"Exception ignored in: <function Pool.__del__>\n{trace}TypeError: no\n"
    assert last_error_line(f"{trace}my.Surprise: 3\n{warning}{ignored}") == "my.Surprise: 3"
    prefixed = "".join(f"[rank1]: {line}\n" for line in f"{trace}ValueError: bad".split("\n"))
    assert last_error_line(prefixed + warning) == "ValueError: bad"
    chained = f"{trace}KeyError: 1\n\nDuring handling of the above:\n\n{trace}OSError: 2\n"
    assert last_error_line(chained) == "OSError: 2"
    assert last_error_line(f"gives up\n{warning}") == "gives up"
    assert last_error_line("gives up\n/l/loop.py:224: You're resuming from ...\n") == "gives up"


def test_a_script_that_a_worker_runs_again_is_named_before_what_followed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing\n"
        "worker = multiprocessing.get_context('forkserver').Process(target=print)\n"
        "worker.start()\n"
        "worker.join()\n"
        "raise RuntimeError('a worker exited unexpectedly')\n"
    )
    argv = (sys.executable, str(script))
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr.endswith("RuntimeError: a worker exited unexpectedly\n")
    assert last_error_line(done.stderr) == UNGUARDED


def test_what_a_rank_said_goes_before_the_agents_own_traceback() -> None:
    log = (
        "W1121 05:21:31.1 25653 torch/distributed/run.py:982] Setting OMP_NUM_THREADS\n"
        "rank 1 gives up early\n"
        "W1121 05:21:31.5 25653 torch/distributed/elastic/multiprocessing/api.py:1028] closing\n"
        "E1121 05:21:31.5 25653 torch/distributed/elastic/multiprocessing/api.py:1002] failed\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    )
    assert last_error_line(log) == "rank 1 gives up early"
    assert last_error_line(ELASTIC_LOG) is not None
