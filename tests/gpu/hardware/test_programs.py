"""The judgement of the section ``programs``: wrong results are not accepted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.hardware.programs import MARK, judge_doctor, judge_quickstart, judge_tests
from tests.run_module import ROOT

ONE_TEST = """
import pytest

@pytest.mark.gpu
def test_one():
    {body}
"""


@pytest.mark.parametrize(
    ("body", "off"),
    [
        ("pass", []),
        ("assert False", ["passed", "failed"]),
        ("pytest.skip('no reason')", ["passed", "skipped"]),
    ],
)
def test_a_skipped_test_is_no_passed_one(tmp_path: Path, body: str, off: list[str]) -> None:
    (tmp_path / "test_one.py").write_text(ONE_TEST.format(body=body))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu")
    subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "gpu", "--junitxml=tests.xml"],
        cwd=tmp_path,
        capture_output=True,
        timeout=120,
    )
    checks = list(judge_tests(tmp_path / "tests.xml", skipped=False))
    assert [c.what.rpartition(" ")[2] for c in checks if c.ok is False] == off


def test_tests_without_results_are_off(tmp_path: Path) -> None:
    (check,) = judge_tests(tmp_path / "tests.xml", skipped=False)
    assert check.ok is False


def test_a_file_of_each_test_that_needs_a_gpu_is_found() -> None:
    """The section imports only the files that contain the marker's full name."""
    texts = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    assert [MARK in text for text in texts if "mark.gpu" in text].count(False) == 0
    assert sum(MARK in text for text in texts) >= 3


GPUS = [("NVIDIA H200", "580.65.06")]


@pytest.mark.parametrize(
    ("changed", "off"),
    [
        ({}, 0),
        ({"GPU driver": "575.1"}, 1),
        ({"GPU 0": "NVIDIA H100, 1 GiB of 80 GiB free"}, 1),
        ({"torch on GPUs": "none usable, CUDA 13.0: the driver is too old, NCCL 2.28"}, 1),
        ({"torch on GPUs": "CUDA 13.0, 1 usable"}, 1),
    ],
)
def test_a_doctor_that_is_wrong_is_off(changed: dict[str, str], off: int) -> None:
    values = {
        "GPU driver": "580.65.06",
        "GPU 0": "NVIDIA H200, 139 GiB of 140 GiB free",
        "torch on GPUs": "CUDA 13.0, NCCL 2.28.9, 1 usable",
        **changed,
    }
    findings = [{"what": what, "value": value, "ok": True} for what, value in values.items()]
    document = {"ok": True, "findings": findings}
    checks = list(judge_doctor(document, GPUS, rehearsal=False))
    assert sum(check.ok is False for check in checks) == off


@pytest.mark.parametrize(
    ("changed", "off"),
    [
        ({}, 0),
        ({"state": "failed"}, 1),
        ({"ranks": [{"device": "cpu"}]}, 1),
        ({"ranks": [], "global_step": None, "metrics": {}}, 3),
    ],
)
def test_a_quickstart_that_did_not_train_on_the_gpu_is_off(
    changed: dict[str, Any], off: int
) -> None:
    run = {
        "state": "finished",
        "ranks": [{"device": "cuda:0"}],
        "global_step": 2520,
        "metrics": {"val/accuracy": {"last": 0.98}},
        **changed,
    }
    assert sum(check.ok is False for check in judge_quickstart(run, "cuda")) == off
