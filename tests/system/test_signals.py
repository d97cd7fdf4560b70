"""Signals to the engine, a rank, the supervisor or to all: the same agreed stop, workers or not.

The gate tries some; ``LTUI_SIGNALS=1`` (``make signals``) every signal to every process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from tests.system.conftest import SCRIPTS, Ltui

pytestmark = pytest.mark.timeout(500)

NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
EXEC = ["exec", "--detach", "--"]
SCRIPT = [str(SCRIPTS / "train.py"), "2000", "2"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *SCRIPT]
SETTINGS = ("trainer.max_epochs=2000", "data.init_args.loader=torch", "data.init_args.workers=2")
RUNS = {
    "preset": ["run", "quickstart", "--detach", *(w for s in SETTINGS for w in ("--set", s))],
    "torchrun": [*EXEC, *TORCHRUN],
    "script": [*EXEC, sys.executable, *SCRIPT],
    "shell": [*EXEC, "sh", "-c", f"{' '.join(TORCHRUN)}; exit $?"],
}
IN_GATE = {
    ("preset", "engine", signal.SIGUSR1),
    ("torchrun", "engine", signal.SIGTERM),
    ("torchrun", "all", signal.SIGINT),
    ("preset", "all", signal.SIGUSR2),
    ("script", "worker", signal.SIGTERM),
}
CASES = [
    pytest.param(
        kind,
        who,
        number,
        marks=[]
        if (kind, who, number) in IN_GATE
        else pytest.mark.skipif("LTUI_SIGNALS" not in os.environ, reason="make signals"),
    )
    for kind in RUNS
    for who in ("engine", "rank", "supervisor", "shim", "all", "worker")
    for number in NUMBERS
    # A shell keeps a SIGINT that is sent to it alone until its command ends, so nobody sees it.
    if (kind, who, number) != ("shell", "engine", signal.SIGINT)
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "who", "number"), CASES)
def test_it_is_an_agreed_stop(ltui: Ltui, kind: str, who: str, number: int) -> None:
    ltui(*RUNS[kind])
    running = ltui.wait_for_step(5)
    for pid in _targets(ltui, running, who):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    if who == "worker":
        # Nothing happens: it is no rank, and its rank needs it.
        ltui.wait_for_step(running["global_step"] + 200)
        ltui("stop", "last")
    _assert_stopped_with_checkpoint(ltui)


def _targets(ltui: Ltui, running: dict, who: str) -> list[int]:
    """Return the pids that get the signal."""
    ranks = [rank["pid"] for rank in running["ranks"]]
    children = [p.pid for rank in ranks for p in psutil.Process(rank).children()]
    workers = [pid for pid in children if pid not in ranks]  # rank 0 of a script starts rank 1
    assert len(workers) >= 4
    return {
        "engine": lambda: [psutil.Process(_shim(ltui).pid).children()[0].pid],
        "rank": lambda: ranks[1:],
        "supervisor": lambda: [running["supervisor_pid"]],
        "shim": lambda: [_shim(ltui).pid],
        "worker": lambda: workers,
        "all": lambda: [p.pid for p in ltui.processes()],
    }[who]()


def _assert_stopped_with_checkpoint(ltui: Ltui) -> None:
    ended = ltui.ended()
    assert ended["state"] == "stopped", ended["detail"]
    step = ended["global_step"]
    assert ended["detail"] == f"stopped at step {step}, checkpoint verified"
    saved = ended["checkpoints"][-1]
    assert (saved["global_step"], saved["reason"], saved["ok"]) == (step, "stop", True)
    assert [r["global_step"] for r in ended["ranks"]] == [step, step]


def _shim(ltui: Ltui) -> psutil.Process:
    (found,) = [p for p in ltui.processes() if any(Path(w).name == "shim.py" for w in p.cmdline())]
    return found
