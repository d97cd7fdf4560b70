"""Commands whose ranks send no telemetry: what is shown, a stopped rank, a requested stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ltui.app.diagnosis.request_diagnosis import request_diagnosis
from ltui.training.problem import ProblemError
from ltui.training.process.identity import ProcessTable, identify
from ltui.training.state.run_snapshot import RankState, RunState
from ltui.training.state.stop_conditions import StopCondition
from ltui.training.supervise.machine_readings import Program, ProgramReader
from tests.required import required

from .conftest import Runs

_TWO_RANKS = """
trap 'kill $(jobs -p); exit 1' TERM
WORLD_SIZE=2 RANK=0 sleep 1000 &
WORLD_SIZE=2 RANK=1 sleep 1000 &
wait
"""


def test_a_command_without_telemetry_from_its_start_to_its_stop(runs: Runs) -> None:
    run = runs.start("bash", "-c", _TWO_RANKS)
    shown = runs.until(run, lambda s: s.state is RunState.RUNNING and len(s.ranks) == 2)
    assert shown.detail == "no steps: the command does not use PyTorch"
    assert shown.world_size == 2
    assert {rank.state for rank in shown.ranks} == {RankState.RUNNING}
    headline = request_diagnosis(run).diagnosis.headline
    assert headline.startswith("Unknown: ranks 0 and 1 send no telemetry")

    pid = required(shown.ranks[1].pid)
    os.kill(pid, signal.SIGSTOP)
    stalled = runs.until(run, lambda s: s.verdicts)
    (verdict,) = stalled.verdicts
    assert (verdict.kind, verdict.level, verdict.culprits) == ("stopped", "stalled", (1,))
    assert f"kill -CONT {pid}" in str(verdict.remedy)
    assert stalled.ranks[1].state is RankState.STALLED
    assert request_diagnosis(run).diagnosis.headline.startswith(
        "stalled: the process of rank 1 is stopped"
    )
    os.kill(pid, signal.SIGCONT)
    assert runs.until(run, lambda s: not s.verdicts).ranks[1].state is RankState.RUNNING

    os.kill(pid, signal.SIGSTOP)
    ended = runs.end(run, "stop")
    assert (ended.state, ended.exit_code) == (RunState.STOPPED, 1)
    assert (ended.detail or "").startswith("stopped on request (the command exited with code 1)")


def test_a_stopped_process_of_a_command_without_ranks_is_named(runs: Runs) -> None:
    run = runs.start("bash", "-c", "sleep 1000 & wait")
    (rank,) = runs.until(run, lambda s: s.state is RunState.RUNNING).ranks
    (child,) = (p for p in ProcessTable().tree(required(rank.pid)) if p != rank.pid)
    os.kill(child, signal.SIGSTOP)
    (verdict,) = runs.until(run, lambda s: s.verdicts).verdicts
    assert (verdict.kind, verdict.culprits) == ("stopped", (0,))
    assert f"kill -CONT {child}" in str(verdict.remedy)
    assert runs.end(run, "stop").state is RunState.STOPPED


_MAPS_A_LIBRARY = """
import mmap, sys
input()
file = open(sys.argv[1], "rb")
mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
print("mapped", flush=True)
input()
"""


def test_a_program_that_has_loaded_torch_is_recognised_by_its_memory_map(tmp_path: Path) -> None:
    library = tmp_path / "libtorch_cpu.so"
    library.write_bytes(b"x")
    process = subprocess.Popen(
        [sys.executable, "-c", _MAPS_A_LIBRARY, str(library)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": "/home/rank-side/0"},
    )  # fmt: skip
    try:
        mark, reader = required(identify(process.pid)), ProgramReader(tmp_path)

        def read() -> Program:
            return reader.read(ProcessTable(), mark, {0: mark})

        before = read()
        required(process.stdin).write(b"\n")
        required(process.stdin).flush()
        assert required(process.stdout).readline() == b"mapped\n"
        program = read()
        (tmp_path / f"torch-{process.pid}.imported").touch()
        imported = read()
        (tmp_path / f"keras-{process.pid}.imported").touch()
        keras = read()
    finally:
        process.kill()
        process.communicate()
    assert (before.python, before.torch) == (True, False)
    assert (program.python, program.torch) == (True, True)
    assert str(program.stage()).startswith("importing torch (")
    assert not program.runs(50.0)
    assert imported.stage() == "no training step yet"
    assert not imported.runs(50.0)
    assert keras.runs(50.0), "no step is expected"
    ended = reader.read(ProcessTable(), mark, {})
    assert (ended.torch, ended.keras) == (True, True)
    assert "Keras trains by optimizers that ltui does not see" in ended.describe()


def test_the_words_say_only_what_was_seen() -> None:
    assert Program(python=True).describe() == "no steps: the program does not use PyTorch"
    alone = Program(python=True, torch=True).describe()
    assert alone.startswith("no steps: no optimizer of torch.optim has stepped; ltui_rank.log")
    assert "on its 2 ranks no optimizer" in Program(torch=True, ranks=2).describe()
    assert Program().runs(10.0)
    assert not Program(python=True).runs(10.0)
    assert Program(python=True).runs(30.0)
    # A launcher has imported torch, and its ranks do: the import does not begin again.
    again = Program(torch=True, importing_s=2.0, imported_s=6.0).stage()
    assert again == "importing torch in another process (2 s)"
    assert not Program(torch=True, imported_s=30.0).runs(100.0)
    assert Program(torch=True, imported_s=70.0).runs(100.0)


@pytest.mark.parametrize(
    ("option", "path", "said"),
    [
        ("-s", "/src", "the program has replaced PYTHONPATH"),
        ("-s", None, "the program has replaced PYTHONPATH"),
        ("-E", "/home/rank-side/0", "Python runs with -E or -I"),
        ("-Is", "/home/rank-side/0", "Python runs with -E or -I"),
        ("-s", "/src:/home/rank-side/0", None),
    ],
)
def test_a_program_that_python_cannot_let_ltui_into_says_so_at_once(
    runs: Runs, tmp_path: Path, option: str, path: str | None, said: str | None
) -> None:
    library = tmp_path / "libtorch_cpu.so"
    library.write_bytes(b"x")
    variable = [] if path is None else [f"PYTHONPATH={path}"]
    python = [sys.executable, option, "-c", _MAPS_A_LIBRARY.replace("input()", "")]
    sleeping = f"{python[-1]}\nimport time\ntime.sleep(600)"
    run = runs.start("env", "-u", "PYTHONPATH", *variable, *python[:-1], sleeping, str(library))
    if said is None:
        starting = runs.until(run, lambda s: "importing torch" in (s.detail or ""))
        assert starting.cautions == ()
    else:
        seen = runs.until(run, lambda s: s.state is RunState.RUNNING and s.cautions)
        assert str(seen.detail).startswith(f"no steps: {said}")
        assert str(seen.cautions[0].what).startswith(said)
        conditions = [StopCondition(kind="step", step=2000).to_document()]
        with pytest.raises(ProblemError, match="cannot stop it at step 2000"):
            runs.order(run, "stop_when", conditions=conditions)
    ended = runs.end(run, "stop")
    assert bool(ended.cautions) == (said is not None)
