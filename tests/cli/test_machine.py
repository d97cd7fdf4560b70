"""What is said of the GPUs, with a stand-in for the driver that tells what a script says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ltui.app.commands import doctor
from ltui.app.launch.local_machine import call_with_timeout, visible_gpus
from tests.cli.conftest import Ltui
from tests.gpu.standin import nvml_stand_in

Simulate = Callable[[str], dict[str, str]]


@pytest.fixture
def simulate(library: Path, tmp_path: Path) -> Simulate:
    """``simulate("gpus 2 h100")`` is the environment of a program that sees those GPUs."""

    def environment(script: str) -> dict[str, str]:
        path = tmp_path / "gpus"
        path.write_text(script)
        return nvml_stand_in.environment(library.parent, path)

    return environment


def gpu_findings(ltui: Ltui, env: dict[str, str]) -> list[dict[str, Any]]:
    report = json.loads(ltui("doctor", "--json", env=env).stdout)
    return [f for f in report["findings"] if f["what"].startswith("GPU")]


def test_the_doctor_lists_gpus(ltui: Ltui, simulate: Simulate) -> None:
    driver, *gpus = gpu_findings(ltui, simulate("driver 575.1\ngpus 2 h100\n"))
    assert driver["value"] == "575.1"
    assert [gpu["what"] for gpu in gpus] == ["GPU 0", "GPU 1"]
    assert "GiB free" in gpus[0]["value"]


def test_the_doctor_lists_the_optional_parts_with_what_installs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda _: None)
    findings = {finding.what: finding for finding in doctor._check_extras()}
    assert set(findings) == {f"ltui[{name}]" for name in ("serve", "png", "parquet", "tensorboard")}
    serve = findings["ltui[serve]"]
    assert (serve.value, serve.ok) == ("not installed (used by ltui serve)", False)
    assert "textual-serve" in str(serve.remedy)


def test_the_doctor_says_whether_torch_can_use_the_gpus(
    ltui: Ltui, simulate: Simulate, tmp_path: Path
) -> None:
    env = simulate("gpus 1 h100\n")
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    env["VIRTUAL_ENV"] = str(tmp_path)

    def finding(**answer: object) -> dict[str, Any]:
        python.write_text(f"#!/bin/sh\n[ \"$1\" = -c ] && echo '{json.dumps(answer)}'\n")
        python.chmod(0o755)
        report = json.loads(ltui("doctor", "--json", env=env).stdout)
        (found,) = (f for f in report["findings"] if f["what"] == "torch on GPUs")
        return found  # type: ignore[no-any-return]

    usable = finding(cuda="13.0", nccl="2.28.9", devices=1, reason=None)
    assert (usable["value"], usable["ok"]) == ("CUDA 13.0, NCCL 2.28.9, 1 usable", True)
    reason = "CUDA initialization: The NVIDIA driver is too old. Update it. (Triggered internally)"
    old = finding(cuda="13.0", nccl=None, devices=0, reason=reason)
    assert old["value"] == (
        "none usable, CUDA 13.0: CUDA initialization: The NVIDIA driver is too old"
    )
    assert "pytorch.org" in old["remedy"]
    none = finding(cuda=None, nccl=None, devices=0, reason=None)
    assert none["value"] == "none usable, it is built without CUDA"


def test_the_doctor_asks_torch_itself(ltui: Ltui, simulate: Simulate) -> None:
    """The driver is only simulated, so torch can't use it."""
    env = {**simulate("gpus 1 h100\n"), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    report = json.loads(ltui("doctor", "--json", env=env).stdout)
    (found,) = (f for f in report["findings"] if f["what"] == "torch on GPUs")
    assert not found["ok"]
    assert found["value"].startswith("none usable, ")


def test_the_doctor_says_why_the_driver_fails(ltui: Ltui, simulate: Simulate) -> None:
    (gpu,) = gpu_findings(ltui, simulate("init LIB_RM_VERSION_MISMATCH\ngpus 1 h100\n"))
    assert gpu["ok"] is False
    assert "mismatch" in gpu["value"].lower()


def test_a_driver_that_hangs_holds_nobody_up(ltui: Ltui, simulate: Simulate) -> None:
    env = simulate("gpus 1 h100\nhang - DeviceGetCount forever\n")
    (gpu,) = gpu_findings(ltui, env)
    assert gpu["value"] == "the driver does not answer"


@pytest.mark.parametrize(
    ("overrides", "visible", "said"),
    [
        (["trainer.devices=4"], None, "4 GPUs requested, but this machine has 2"),
        (["trainer.devices=2"], "1", "2 GPUs requested, but this machine has 1"),
        (["trainer.devices=[0, 5]"], None, "there is no GPU 5: this machine has 2"),
    ],
)
def test_more_gpus_than_exist(
    ltui: Ltui, simulate: Simulate, overrides: list[str], visible: str | None, said: str
) -> None:
    env = simulate("gpus 2 h100\n")
    if visible is not None:
        env["CUDA_VISIBLE_DEVICES"] = visible
    words = [word for override in overrides for word in ("--set", override)]
    done = ltui("run", "quickstart", "--detach", *words, env=env)
    assert done.returncode == 2
    assert said in done.stderr
    assert ltui("runs", "--json").stdout.strip() == "[]"


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


def test_an_answer_in_time_is_given() -> None:
    assert call_with_timeout(60.0, lambda: 3) == 3
