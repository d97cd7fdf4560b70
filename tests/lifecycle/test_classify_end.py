"""The sentence that says how a run ended, from what is known of it."""

from __future__ import annotations

import re
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
from tests.state.records import pulse

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
FAILURES = tuple(worker_failures(ELASTIC_LOG))
"""Rank 1 was killed first, then rank 0 failed."""


def _pulses(*outcomes: Outcome) -> dict[int, PulseState]:
    return {
        rank: pulse(rank, Phase.FORWARD, global_step=7, outcome=outcome)
        for rank, outcome in enumerate(outcomes)
    }


def _raised(rank: int, name: str, message: str) -> FoldState:
    fields: dict[str, Any] = {"type": name, "message": message, "t": 4.0 + rank, "step": 7}
    event = FoldedEvent(rank=rank, t_ns=0, kind="exception", text=message, fields=fields)
    return FoldState(ranks={rank: RankFold(rank=rank, exception=event)})


def _facts(**changes: Any) -> EndFacts:
    running = _pulses(Outcome.RUNNING, Outcome.RUNNING)
    return replace(EndFacts(exit=EngineExit(exit_code=1), pulses=running, global_step=7), **changes)


VICTIM = _raised(0, "RuntimeError", "Connection closed by peer [127.0.0.1]:3")
OWN = _raised(1, "ValueError", "a mistake")
TIMEOUT = _raised(0, "RuntimeError", "[gloo] Socket timeout")
INDEX = _raised(1, "IndexError", "index 9 is out of bounds\nfor axis 0")
ZERO = EngineExit(exit_code=0)
WELL = _pulses(Outcome.FINISHED, Outcome.FINISHED)
LEFT_EARLY = _pulses(Outcome.RAISED, Outcome.FINISHED)
STOPPED = _facts(exit=ZERO, pulses=_pulses(Outcome.STOPPED, Outcome.STOPPED))
WHOLE = CheckpointInfo(path="p", global_step=7, ok=True, saved_at=1.0)
TORCHRUN = EndFacts(exit=EngineExit(exit_code=1), user_command=True, stop_requested=True)
"""torchrun answers SIGTERM with an exception of its own and exit code 1."""
SIGNALLED = "torch.distributed.elastic.multiprocessing.api.SignalException: Process 7 got signal: "
PRESET = replace(TORCHRUN, user_command=False, last_line=f"{SIGNALLED}15")
TWO_NODES = _facts(multi_node=True)
LOST_LAUNCHER = replace(
    TWO_NODES, machines={0: "a", 1: "b"}, lost_engines={"b": EngineExit(signal=9)}
)


@pytest.mark.parametrize(
    ("facts", "state", "first_failed_rank", "detail"),
    [
        # The rank that died is the cause, and not those whose connections it broke.
        (_facts(failures=FAILURES, fold=VICTIM), "crashed", 1,
         r"^rank 1 was killed by SIGKILL.* at step 7$"),
        (_facts(fold=VICTIM), "crashed", 1, "died without a Python error"),
        (_facts(fold=VICTIM, pulses=LEFT_EARLY), "failed", 0,
         "^rank 1 ended its training at step 7 while the others went on; then rank 0 raised"),
        (_facts(fold=FoldState(ranks={**TIMEOUT.ranks, **INDEX.ranks})), "failed", 1,
         "^rank 1 raised IndexError: index 9 is out of bounds at step 7$"),
        # Ends that are no failure.
        (_facts(exit=ZERO, pulses=WELL), "finished", None, ""),
        (EndFacts(exit=ZERO, user_command=True), "finished", None, "^exit code 0$"),
        (_facts(exit=ZERO), "finished", None,
         "exit code 0, but rank 0 had not ended its training"),
        (replace(STOPPED, checkpoints=(WHOLE,)), "stopped", None,
         "^stopped at step 7, checkpoint verified$"),
        (replace(STOPPED, checkpoints=(replace(WHOLE, ok=False),)), "stopped", None,
         "^stopped at step 7, no checkpoint was saved$"),
        # Signals as shells report them.
        (EndFacts(exit=EngineExit(exit_code=137), user_command=True), "crashed", None, "SIGKILL"),
        (replace(TORCHRUN, exit=EngineExit(exit_code=143)), "stopped", None, "SIGTERM"),
        # A stop that was requested is no failure of a command without telemetry.
        (TORCHRUN, "stopped", None,
         r"^stopped on request \(the command exited with code 1\); no checkpoint was saved$"),
        (replace(TORCHRUN, failures=FAILURES), "crashed", 1, "SIGKILL"),
        (replace(TORCHRUN, stop_requested=False), "failed", None, "exited with code 1"),
        (replace(TORCHRUN, user_command=False), "failed", None, "exited with code 1"),
        # A stop before the ranks train. The launcher of a preset is torchrun.
        (PRESET, "stopped", None, "no checkpoint was saved"),
        (replace(PRESET, stop_requested=False), "failed", None, ""),
        (replace(PRESET, last_line=f"{SIGNALLED}11"), "failed", None, ""),
        (replace(PRESET, last_line="ImportError: no module named data"), "failed", None, ""),
        (replace(PRESET, failures=FAILURES), "crashed", 1, ""),
        # A stop on one of several nodes.
        (replace(TWO_NODES, stop_requested=True), "stopped", None, "no checkpoint was saved"),
        (replace(TWO_NODES, stop_requested=True, fold=VICTIM), "stopped", None,
         "no checkpoint was saved"),
        (replace(TWO_NODES, stop_requested=True, fold=OWN), "failed", 1, ""),
        (TWO_NODES, "failed", None, ""),
        # A launcher that was killed on another machine.
        (replace(LOST_LAUNCHER, fold=VICTIM), "crashed", None,
         "^on b the launcher was killed by SIGKILL.* at step 7; "
         "the error of rank 0 on a followed from that$"),
        (replace(LOST_LAUNCHER, fold=OWN), "failed", 1, "raised ValueError"),
        # Nobody saw the end, or it could not begin.
        (_facts(exit=None), "lost", None, "how it ended is unknown; last seen at step 7, "),
        (EndFacts(), "lost", None, "how it ended is unknown; no checkpoint was saved$"),
        (_facts(exit=None, rebooted=True), "lost", None, "the machine was restarted"),
        (_facts(exit=None, pulses=WELL), "finished", None, ""),
        (_facts(exit=None, shim_died=True), "crashed", None, ""),
        (EndFacts(exit=EngineExit(exit_code=127, error="x could not be started: no")),
         "failed", None, "^x could not be started: no$"),
    ],
)  # fmt: skip
def test_the_state_the_rank_and_the_cause_of_an_end(
    facts: EndFacts, state: str, first_failed_rank: int | None, detail: str
) -> None:
    end = classify_end(facts)
    assert (end.state.value, end.first_failed_rank) == (state, first_failed_rank)
    assert re.search(detail, end.detail), end.detail
    assert end.exit_code == (facts.exit.exit_code if facts.exit else None)


@pytest.mark.parametrize(
    ("name", "message", "is_consequence"),
    [
        # Errors of the user's own, whatever words of ours they happen to contain.
        ("KeyError", "no such store: 'train'", False),
        ("ValueError", "the peer of sample 7 is missing", False),
        ("RuntimeError", "barrier height must be positive", False),
        ("RuntimeError", "Default process group has not been initialized", False),
        # What torch says of a partner that has gone.
        ("DistStoreError", "wait timeout after 300000ms, keys: /default_pg/0//1", True),
        ("DistNetworkError", "The client socket has timed out after 60000ms while trying", True),
        (
            "RuntimeError",
            "[pair.cc:525] Read error [127.0.1.1]:2: Connection reset by peer",
            True,
        ),
        (
            "RuntimeError",
            "[unbound_buffer.cc:81] Timed out waiting 1800ms for recv operation",
            True,
        ),
        ("RuntimeError", "Application timeout caused pair closure", True),
        ("RuntimeError", "Rank 1 failed to pass monitoredBarrier in 1800000 ms", True),
        ("DistBackendError", "NCCL error in: x.cpp:3, remote process exited or there was", True),
        ("SIGTERMException", "", True),
    ],
)
def test_an_error_of_the_users_own_is_no_consequence_as_those_of_torch_are(
    name: str, message: str, is_consequence: bool
) -> None:
    end = classify_end(_facts(failures=FAILURES, fold=_raised(0, name, message)))
    assert end.first_failed_rank == int(is_consequence)
    own = f"rank 0 raised {name}: {message} at step 7"
    assert end.state is RunState.CRASHED if is_consequence else end.detail == own


def test_torch_elastic_says_who_failed_first() -> None:
    assert [(f.rank, f.exit_code, f.first) for f in FAILURES] == [(0, 1, False), (1, -9, True)]
    earlier = f"earlier output\n{ELASTIC_LOG}"
    assert (tuple(worker_failures(earlier)), worker_failures("nothing")) == (FAILURES, [])


def test_the_end_says_what_the_verdict_knows_of_a_dead_rank() -> None:
    end = classify_end(_facts(fold=VICTIM))
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
