"""GPUs on the command line, with a stand-in for the driver that tells what a script says: the demo,
runs that wait for free ones, and what is said of those of the machine."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ltui.app.commands import doctor
from ltui.app.launch.local_machine import visible_gpus
from tests.cli.conftest import Ltui, OpenTerminal, RunsLeft
from tests.gpu.standin import nvml_stand_in
from tests.ltui_command import answer

Simulate = Callable[[str], dict[str, str]]
DEMO = (sys.executable, "-m", "ltui.app", "demo")


@pytest.fixture
def simulate(library: Path, tmp_path: Path) -> Simulate:
    """``simulate("gpus 2 h100")`` is the environment of a program that sees those GPUs."""

    def environment(script: str) -> dict[str, str]:
        path = tmp_path / "gpus"
        path.write_text(script)
        return nvml_stand_in.environment(library.parent, path)

    return environment


def test_the_demo_shows_gpus_and_says_that_they_are_simulated(
    terminal: OpenTerminal, runs_left: RunsLeft
) -> None:
    # Neither a driver nor a compiler is needed.
    env = {"PATH": "/nonexistent", "CC": "none"}
    shown = terminal("gpus", argv=DEMO, env=env, columns=140)
    shown.wait_for("simulated GPUs and ranks, not those of this machine")
    shown.wait_for("8 × H100")
    shown.wait_for("used by another process")
    shown.press("\r")
    shown.wait_for("tensor-core activity")
    shown.drawn = ""
    shown.press("\x1b")
    shown.wait_for("used by another process")
    shown.press("q")
    assert shown.wait() == 0
    assert runs_left() == []


def test_the_demo_of_machines_says_that_they_are_simulated(
    terminal: OpenTerminal, runs_left: RunsLeft
) -> None:
    shown = terminal("nodes", "--nodes", "3", argv=DEMO, columns=140)
    shown.wait_for("simulated machines, ranks and GPUs, not those of this machine")
    shown.wait_for("3 machines, 24 ranks")
    shown.press("4")
    shown.wait_for("sim-c  16-23")
    shown.press("q")
    assert shown.wait() == 0
    assert runs_left() == []


def test_exec_waits_for_a_free_gpu(ltui: Ltui, simulate: Simulate) -> None:
    env = simulate(f"gpus 2 h100\nset * mem_used 0\nprocess 0 {os.getpid()} 1e9\n")
    show = "import os; print('given', os.environ['CUDA_VISIBLE_DEVICES'])"
    done = ltui("exec", "--gpus", "free:1", "--", sys.executable, "-c", show, env=env)
    assert done.returncode == 0, done.stderr
    logs = ltui("logs", "last")
    assert "given GPU-5eed0000-0000-4000-8000-000000000001" in logs.stdout


def test_a_queued_run_is_shown_and_stopped(ltui: Ltui, command: Ltui, simulate: Simulate) -> None:
    env = simulate(f"gpus 1 h100\nprocess 0 {os.getpid()} 1e9\n")
    started = ltui(
        "exec", "--gpus", "free:1", "--name", "waits", "--detach", "--", "sleep", "60", env=env
    )
    assert started.returncode == 0, started.stderr
    assert "queued" in command("runs").stdout
    assert "waiting for GPUs" in command("show", "waits").stdout
    stopped = command("stop", "waits")
    assert "nothing was trained" in command("show", "waits").stdout
    assert stopped.returncode in (0, 1)


def findings(ltui: Ltui, env: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return what ``ltui doctor`` finds, by its subject."""
    report = answer(ltui("doctor", "--json", env=env).stdout)
    return {finding["what"]: finding for finding in report["findings"]}


def test_the_doctor_lists_gpus_and_asks_torch_itself(ltui: Ltui, simulate: Simulate) -> None:
    """The driver is only simulated, so torch can't use it."""
    env = simulate("driver 575.1\ngpus 2 h100\n")
    found = findings(ltui, {**env, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"})
    assert found["GPU driver"]["value"] == "575.1"
    assert [name for name in found if name.startswith("GPU ")] == ["GPU driver", "GPU 0", "GPU 1"]
    assert "GiB free" in found["GPU 0"]["value"]
    assert not found["torch on GPUs"]["ok"]
    assert found["torch on GPUs"]["value"].startswith("none usable, ")


def test_the_doctor_lists_the_optional_parts_with_what_installs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda _: None)
    found = {finding.what: finding for finding in doctor._check_extras()}
    assert set(found) == {f"ltui[{name}]" for name in ("serve", "png", "parquet", "tensorboard")}
    serve = found["ltui[serve]"]
    assert (serve.value, serve.ok) == ("not installed (used by ltui serve)", False)
    assert "textual-serve" in str(serve.remedy)


def test_the_doctor_says_what_runs_occupy(private_home: Path) -> None:
    run = private_home / "runs" / "owl-0001"
    for name, size in (("checkpoints/a.ckpt", 3 << 20), ("code/frozen-1/train.py", 2 << 20)):
        (run / name).parent.mkdir(parents=True)
        (run / name).write_bytes(b"1" * size)
    (run / "spec.yaml").touch()
    (run / "code" / "frozen-1" / "data").symlink_to(run / "checkpoints")
    found = next(doctor._kept_on_disk(private_home))
    # Folders occupy something, too, and the link to 3 MiB nothing.
    pattern = r"checkpoints 3\.0\d MiB, frozen code 2\.0\d MiB, bin 0 B"
    assert re.fullmatch(pattern, found.value), found.value


TOO_OLD = "CUDA initialization: The NVIDIA driver is too old. Update it. (Triggered internally)"


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ({"cuda": "13.0", "nccl": "2.28.9", "devices": 1}, "CUDA 13.0, NCCL 2.28.9, 1 usable"),
        (
            {"cuda": "13.0", "reason": TOO_OLD},
            "none usable, CUDA 13.0: CUDA initialization: The NVIDIA driver is too old",
        ),
        ({}, "none usable, it is built without CUDA"),
    ],
)
def test_the_doctor_says_whether_torch_can_use_the_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: dict[str, object], value: str
) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    printed = json.dumps({"cuda": None, "nccl": None, "devices": 0, "reason": None, **answer})
    python.write_text(f"#!/bin/sh\n[ \"$1\" = -c ] && echo '{printed}'\n")
    python.chmod(0o755)
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path))
    (found,) = doctor._check_cuda([doctor.Finding("GPU 0", "H100")])
    assert (found.value, found.ok) == (value, "devices" in answer)
    assert found.ok or "pytorch.org" in str(found.remedy)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("init LIB_RM_VERSION_MISMATCH\ngpus 1 h100\n", "mismatch"),
        ("gpus 1 h100\nhang - DeviceGetCount forever\n", "the driver does not answer"),
    ],
)
def test_the_doctor_says_that_the_driver_fails_or_hangs(
    ltui: Ltui, simulate: Simulate, script: str, said: str
) -> None:
    (gpu,) = (f for name, f in findings(ltui, simulate(script)).items() if name.startswith("GPU"))
    assert gpu["ok"] is False
    assert said in gpu["value"].lower()


@pytest.mark.parametrize(
    ("devices", "visible", "said"),
    [
        ("4", None, "4 GPUs requested, but this machine has 2"),
        ("2", "1", "2 GPUs requested, but this machine has 1"),
        ("[0, 5]", None, "there is no GPU 5: this machine has 2"),
    ],
)
def test_more_gpus_than_exist(
    ltui: Ltui,
    simulate: Simulate,
    runs_left: RunsLeft,
    devices: str,
    visible: str | None,
    said: str,
) -> None:
    env = simulate("gpus 2 h100\n")
    if visible is not None:
        env["CUDA_VISIBLE_DEVICES"] = visible
    words = ("quickstart", "--detach", "--set", f"trainer.devices={devices}")
    done = ltui("run", *words, env=env)
    assert done.returncode == 2
    assert said in done.stderr
    assert runs_left() == []


@pytest.mark.parametrize(
    ("chosen", "count"),
    [
        (None, 4),
        ("", 0),
        ("0,1", 2),
        ("0,9,1", 1),
        ("-1", 0),
        ("GPU-aa,GPU-bb", 2),
        ("MIG-aa", 1),
    ],
)
def test_visible_devices(chosen: str | None, count: int) -> None:
    environment = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    assert visible_gpus(4, environment) == count
    assert visible_gpus(None, environment) is None
