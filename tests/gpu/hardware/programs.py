"""Section ``programs``: the tests that need a GPU, ``ltui doctor``, and ``make run`` as it is.

The rehearsal expects that every such test is skipped.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tests.gpu.hardware.check import Check, Conditions, holds
from tests.gpu.hardware.instruments import installed_gpus
from tests.ltui_command import answer, run_ltui
from tests.run_module import ROOT, run_module

TESTS_LIMIT_S = 150.0
MARK = "pytest.mark.gpu"


def checks(conditions: Conditions) -> Iterator[Check]:
    """Run the three programs, one after the other."""
    for title, part in (
        ("tests that need a GPU", _tests),
        ("ltui doctor", _doctor),
        ("ltui run quickstart", _quickstart),
    ):
        try:
            yield from part(conditions)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            yield Check(title, str(error)[-300:], "no error", False)


# -- the tests -------------------------------------------------------------------------------------


def _tests(conditions: Conditions) -> Iterator[Check]:
    """Run the tests with the marker ``gpu``. Only their files are imported: another test's file
    may need a package that this machine lacks."""
    files = [
        path for path in sorted((ROOT / "tests").rglob("test_*.py")) if MARK in path.read_text()
    ]
    results = conditions.folder / "tests.xml"
    results.unlink(missing_ok=True)
    options = ["-m", "gpu", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    with contextlib.suppress(subprocess.TimeoutExpired):  # then there are no results
        run_module(
            "pytest",
            [*options, f"--junitxml={results}", *files],
            conditions.folder / "tests.txt",
            TESTS_LIMIT_S,
            os.environ,
        )
    yield from judge_tests(results, skipped=conditions.rehearsal)


def judge_tests(results: Path, *, skipped: bool) -> Iterator[Check]:
    """Judge pytest's results in JUnit's format. ``skipped``: each test is expected to be."""
    if not results.is_file():
        yield Check("tests that need a GPU", "pytest wrote no results", "results", False)
        return
    cases: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}
    for case in ElementTree.parse(results).getroot().iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
        bad = case.find("failure") is not None or case.find("error") is not None
        kind = "failed" if bad else "passed" if case.find("skipped") is None else "skipped"
        cases[kind].append(name)
    wanted, unwanted = ("skipped", "passed") if skipped else ("passed", "skipped")
    count = len(cases[wanted])
    yield Check(f"tests that need a GPU: {wanted}", count, "at least 1", count > 0)
    for kind in (unwanted, "failed"):
        yield Check(f"tests that need a GPU: {kind}", cases[kind], "none", not cases[kind])


# -- ltui doctor -----------------------------------------------------------------------------------


def _doctor(conditions: Conditions) -> Iterator[Check]:
    done = run_ltui("doctor", "--json", timeout=120)
    (conditions.folder / "doctor.json").write_text(done.stdout)
    yield Check("ltui doctor: exit code", done.returncode, "0", done.returncode == 0)
    document = answer(done.stdout)
    yield from judge_doctor(document, installed_gpus(), rehearsal=conditions.rehearsal)


def judge_doctor(
    document: dict[str, Any], gpus: list[tuple[str, str]], *, rehearsal: bool
) -> Iterator[Check]:
    """Judge the report of ``ltui doctor`` by nvidia-smi's names of the GPUs and the driver."""
    values = {finding["what"]: finding["value"] for finding in document["findings"]}
    yield holds("ltui doctor: nothing that a run needs is missing", document["ok"])
    missing = [f"{f['what']}: {f['value']}" for f in document["findings"] if not f["ok"]]
    yield Check("ltui doctor: notes", missing)
    if rehearsal:
        return
    for index, (name, driver) in enumerate(gpus):
        value = values.get(f"GPU {index}", "")
        yield Check(f"ltui doctor: GPU {index}", value, name, name in value)
        value = values.get("GPU driver", "")
        yield Check("ltui doctor: driver", value, driver, value == driver)
    cuda = values.get("torch on GPUs", "")
    usable = "CUDA" in cuda and "NCCL" in cuda and "none usable" not in cuda
    yield Check("ltui doctor: torch on GPUs", cuda, "versions of CUDA and NCCL", usable)


# -- make run < /dev/null --------------------------------------------------------------------------


def _quickstart(conditions: Conditions) -> Iterator[Check]:
    smaller = ("--set", "trainer.max_epochs=1") if conditions.rehearsal else ()
    began = time.monotonic()
    done = run_ltui("run", "quickstart", *smaller, timeout=conditions.seconds_left() - 10)
    seconds = time.monotonic() - began
    (conditions.folder / "quickstart.txt").write_text(f"{done.stdout}\n{done.stderr}")
    yield Check("ltui run quickstart: exit code", done.returncode, "0", done.returncode == 0)
    shown = run_ltui("show", "last", "--json")
    yield from judge_quickstart(answer(shown.stdout), conditions.accelerator)
    yield Check("ltui run quickstart: seconds", round(seconds, 1))


def judge_quickstart(run: dict[str, Any], device: str) -> Iterator[Check]:
    """Judge the snapshot of the ended run. ``device``: where its ranks must have trained."""
    yield Check("ltui run quickstart: state", run["state"], "finished", run["state"] == "finished")
    devices = [rank["device"] for rank in run["ranks"]]
    right = bool(devices) and all((where or "").startswith(device) for where in devices)
    yield Check("ltui run quickstart: devices of the ranks", devices, device, right)
    yield Check(
        "ltui run quickstart: steps", run["global_step"], "> 0", (run["global_step"] or 0) > 0
    )
    accuracy = run["metrics"].get("val/accuracy", {}).get("last")
    yield Check("ltui run quickstart: accuracy", accuracy, "> 0.5", (accuracy or 0) > 0.5)
