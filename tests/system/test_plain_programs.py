"""``ltui exec`` of programs without Lightning: their steps, pauses, stops and ends."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ltui.training.store.find_run import find_run
from ltui.training.store.history_reader import RunStore
from tests.nodes.addresses import free_port_pair
from tests.system.conftest import SCRIPTS, Ltui
from tests.waiting import wait_for

PROGRAM = str(SCRIPTS / "plain_program.py")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
ENDLESS = ("100000", "0.05")

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(autouse=True)
def surroundings(ltui: Ltui) -> None:
    ltui.environment["MASTER_PORT"] = str(free_port_pair())


def start(ltui: Ltui, *command: str) -> None:
    ltui("exec", "--detach", "--", *command)


def ended(ltui: Ltui, *command: str) -> dict[str, Any]:
    """Run a command to its end, and return the last snapshot."""
    start(ltui, *command)
    return ltui.ended()


def stopped(ltui: Ltui, *options: str) -> dict[str, Any]:
    """Stop the last run, and return its last snapshot."""
    ltui("stop", "last", *options, check=None)
    snapshot = ltui.ended()
    assert snapshot["state"] == "stopped", snapshot["detail"]
    return snapshot


def steps(snapshot: dict[str, Any]) -> list[int]:
    return [rank["global_step"] for rank in snapshot["ranks"]]


def states(snapshot: dict[str, Any]) -> list[str]:
    return [rank["state"] for rank in snapshot["ranks"]]


def test_two_ranks_under_torchrun_are_watched_paused_and_stopped(ltui: Ltui) -> None:
    start(ltui, *TORCHRUN, PROGRAM, "ddp", *ENDLESS)
    running = ltui.wait_for_step(10)
    assert running["program"] == "PyTorch DDP"
    assert (running["state"], running["epoch"], running["world_size"]) == ("running", None, 2)
    rank = running["ranks"][1]
    assert rank["samples_per_s"] is None or rank["samples_per_s"] > 0
    ltui("pause", "last")
    paused = ltui.wait(lambda s: s["state"] == "paused")
    assert len(set(steps(paused))) == 1, "the ranks paused at different steps"
    assert not paused["verdicts"]
    assert ltui.show()["ranks"][0]["global_step"] == paused["ranks"][0]["global_step"]
    refused = ltui("checkpoint", "last", check=2)
    assert "has not told ltui how to save a checkpoint" in refused.stderr
    ltui("continue", "last")
    ltui.wait_for_step(paused["global_step"] + 10)
    end = stopped(ltui)
    assert "the program has not told ltui how to save a checkpoint" in end["detail"]
    assert states(end) == ["ended", "ended"]


@pytest.mark.slow
def test_a_stop_at_a_step_is_exact(ltui: Ltui) -> None:
    start(ltui, *TORCHRUN, PROGRAM, "ddp", *ENDLESS)
    ltui.wait_for_step(3)
    assert steps(stopped(ltui, "--at-step", "120")) == [120, 120]


@pytest.mark.slow
def test_a_stopped_process_and_a_killed_rank_are_named(ltui: Ltui) -> None:
    start(ltui, *TORCHRUN, PROGRAM, "ddp", *ENDLESS)
    pid = ltui.wait_for_step(10)["ranks"][1]["pid"]
    os.kill(pid, signal.SIGSTOP)
    stalled = ltui.wait(lambda s: s["verdicts"])
    assert [(v["kind"], v["culprits"]) for v in stalled["verdicts"]] == [("stopped", [1])]
    os.kill(pid, signal.SIGCONT)
    ltui.wait(lambda s: not [v for v in s["verdicts"] if v["ended"] is None])
    os.kill(pid, signal.SIGKILL)
    crashed = ltui.ended()
    assert crashed["state"] == "crashed"
    assert re.search("rank 1 was killed by SIGKILL", crashed["detail"])


@pytest.mark.slow
def test_the_results_and_the_rate_are_those_of_the_program(ltui: Ltui) -> None:
    command = [*TORCHRUN, PROGRAM, "ddp", "200", "0.02"]
    bare = subprocess.run(
        command, cwd=ltui.cwd, env=ltui.environment, capture_output=True, text=True, check=True
    )
    finished = ended(ltui, *command)
    assert (finished["state"], finished["detail"]) == ("finished", "finished at step 200")
    assert steps(finished) == [200, 200]
    printed = ltui("logs", "last").stdout
    weights = {re.search(r"weights (\S+)", text)[1] for text in (bare.stdout, printed)}  # type: ignore[index]
    assert len(weights) == 1, "ltui changed the result"
    (step_s,) = re.findall(r"rank 0: 200 steps of (\S+) s", printed)
    shown = statistics.median(finished["ranks"][0]["recent_step_s"])
    assert shown == pytest.approx(float(step_s), rel=0.25)
    assert finished["verdicts"] == []
    (saved,) = finished["script_checkpoints"]
    assert saved["path"].endswith("weights.pt")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "step_s", "count", "program", "ranks"),
    [
        ("alone", "0.005", 400, "PyTorch", 1),
        ("skips", "0.005", 160, "PyTorch", 1),
        ("several", "0.005", 200, "PyTorch", 1),
        ("compiled", "0.005", 200, "PyTorch", 1),
        ("fork", "0.01", 200, "PyTorch DDP", 2),
        ("spawn", "0.01", 200, "PyTorch DDP", 2),
    ],
)
def test_the_steps_of_a_program_that_is_started_alone(
    ltui: Ltui, kind: str, step_s: str, count: int, program: str, ranks: int
) -> None:
    finished = ended(ltui, sys.executable, PROGRAM, kind, "200", step_s)
    assert (finished["state"], finished["detail"]) == ("finished", f"finished at step {count}")
    assert (finished["program"], finished["world_size"]) == (program, ranks)
    assert (steps(finished), states(finished)) == ([count] * ranks, ["ended"] * ranks)


@pytest.mark.slow
def test_the_exception_of_a_rank_is_the_end_of_the_run(ltui: Ltui) -> None:
    failed = ended(ltui, *TORCHRUN, PROGRAM, "raises", "200", "0.01")
    assert failed["state"] == "failed"
    assert failed["detail"] == "rank 1 raised ValueError: a bad batch at step 100"


@pytest.mark.slow
def test_a_rank_that_ends_before_the_others_is_named(ltui: Ltui) -> None:
    failed = ended(ltui, *TORCHRUN, PROGRAM, "early", "200", "0.01")
    assert failed["state"] == "failed"
    assert "rank 1 ended its training at step 100" in failed["detail"]
    assert [(v["kind"], v["culprits"]) for v in failed["verdicts"]] == [("finished_early", [1])]


@pytest.mark.slow
def test_ranks_that_may_take_different_steps_are_not_paused(ltui: Ltui) -> None:
    start(ltui, *TORCHRUN, PROGRAM, "unknown", *ENDLESS)
    assert ltui.wait_for_step(10)["program"] == "PyTorch"
    refused = ltui("pause", "last", check=2)
    assert "nothing shows that all ranks take the same steps" in refused.stderr
    assert "Only a kill" not in refused.stderr
    ltui.wait_for_step(30)
    stopped(ltui)


@pytest.mark.slow
def test_a_process_that_trains_beside_the_rank_is_named_and_not_left_out_of_a_pause(
    ltui: Ltui,
) -> None:
    start(ltui, sys.executable, PROGRAM, "beside", *ENDLESS)
    shown = ltui.wait_for_step(10)
    text = "trains as well. ltui watches one process of a rank"
    with RunStore(find_run(ltui.home, "last")) as store:
        wait_for(store.events, wanted=lambda events: text in str(events))
    refused = ltui("pause", "last", check=2)
    assert "trains as well, and ltui does not watch it" in refused.stderr
    assert f"process {shown['ranks'][0]['pid']}" not in refused.stderr
    stopped(ltui)


@pytest.mark.slow
def test_nothing_is_watched_if_torch_loads_no_extensions(ltui: Ltui) -> None:
    ltui.environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    finished = ended(ltui, sys.executable, PROGRAM, "several", "50", "0")
    assert (finished["state"], finished["detail"]) == ("finished", "exit code 0")
    assert finished["program"] is None


@pytest.mark.slow
def test_what_a_program_logs_is_a_metric_of_its_run(ltui: Ltui) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    finished = ended(ltui, *TORCHRUN, str(SCRIPTS / "logging_program.py"), "60", "0")
    assert (finished["state"], finished["detail"]) == ("finished", "finished at step 60")
    assert ltui("logs", "last").stderr == ""
    events = accumulator.EventAccumulator(str(ltui.cwd / "runs" / "train"))
    events.Reload()
    written = [(event.step, event.value) for event in events.Scalars("loss")]
    exported = json.loads(ltui("export", "last", "--format", "json").stdout)
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in exported:
        assert row["rank"] == 0
        curves.setdefault(row["metric"], []).append((row["step"], row["value"]))
    tens = list(range(10, 61, 10))
    assert [step for step, _ in curves["loss"]] == [step for step, _ in written]
    assert [v for _, v in curves["loss"]] == pytest.approx([v for _, v in written], rel=1e-6)
    assert curves["accuracy"] == [(step, step / 60) for step in tens]
    assert [step for step, _ in curves["val/loss"]] == tens
    loss = finished["metrics"]["loss"]
    assert (loss["step"], loss["last"]) == curves["loss"][-1]


@pytest.mark.slow
def test_a_program_without_an_optimizer_of_torch_is_named_and_its_values_are_read(
    ltui: Ltui,
) -> None:
    command = ("--detach", "--", sys.executable, str(SCRIPTS / "own_updates.py"), "3", "0.1")
    ltui("exec", "--metrics-pattern", "pairs", *command)
    shown = ltui.ended()
    assert (shown["state"], shown["program"]) == ("finished", "PyTorch without torch.optim")
    assert shown["saves_checkpoints"] is False
    assert set(shown["metrics"]) == {"batch", "loss", "val/loss"}
    assert ltui.steps_on_record(metric="loss") == [1, 2, 3]
    ltui("exec", "--metrics-pattern", "json", *command)
    nothing = ltui.ended()
    assert ["found no value" in each["what"] for each in nothing["cautions"]] == [True]


@pytest.mark.slow
def test_printed_values_are_metrics_only_by_a_pattern(ltui: Ltui) -> None:
    command = ("--detach", "--", sys.executable, str(SCRIPTS / "prints_values.py"), "50")
    ltui("exec", "--metrics-pattern", "pairs", *command)
    finished = ltui.ended()
    assert finished["detail"] == "finished at step 50"
    assert set(finished["metrics"]) == {"loss"}
    assert ltui.steps_on_record(metric="loss") == list(range(1, 51))
    assert "step 50 loss" in ltui("logs", "last").stdout
    assert finished["cautions"] == []
    ltui("exec", "--metrics-pattern", "accuracy (?P<accuracy>.+)", *command)
    nothing = ltui.ended()
    assert nothing["metrics"] == {}
    assert ["found no value" in each["what"] for each in nothing["cautions"]] == [True]
    ltui("exec", *command)
    assert ltui.ended()["metrics"] == {}
    refused = ltui("exec", "--metrics-pattern", "loss (", *command, check=2)
    assert "it is no regular expression" in refused.stderr
    assert refused.stderr.count("\n") <= 2
    ltui.wait_until_alone()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "number"), [("usr1", "SIGUSR1"), ("alone", "SIGINT")])
def test_a_program_is_stopped_by_the_signal_of_the_user(ltui: Ltui, kind: str, number: str) -> None:
    command = (sys.executable, PROGRAM, kind, *ENDLESS)
    ltui("exec", "--detach", "--stop-signal", number, "--", *command)
    ltui.wait_for_step(5)
    assert "killed" not in stopped(ltui, "--timeout", "20")["detail"]
    if kind == "usr1":
        assert "saved by the program" in ltui("logs", "last").stdout


def test_an_incident_file_lacks_secrets_that_only_the_run_had(ltui: Ltui) -> None:
    secret = "zq7-only-in/that.shell"
    ltui.environment["SOME_TOKEN"] = secret
    program = 'import os; v = os.environ["SOME_TOKEN"]; print(v, repr(v), f"[{v}]", v + ".")'
    ltui("exec", "--detach", "--", sys.executable, "-c", program)
    run = ltui.ended()
    del ltui.environment["SOME_TOKEN"]
    digests = Path(run["run_dir"], "engine", "1.secrets.json")
    assert digests.stat().st_mode & 0o777 == 0o600
    assert "only-in" not in digests.read_text(encoding="utf-8")
    printed = ltui("incident", "last", "-o", "x.ltui", "--yes").stdout
    packed = gzip.decompress((ltui.cwd / "x.ltui").read_bytes())
    assert b"only-in" not in packed
    assert b"[SOME_TOKEN] '[SOME_TOKEN]' [[SOME_TOKEN]] [SOME_TOKEN]." in packed
    assert "replaced 4 times: the value of SOME_TOKEN" in printed
