"""Whether the process that a run directory names is that run's shim."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ltui.training.lifecycle.run_processes import shim_identity
from ltui.training.process.identity import boot_id, start_ticks
from ltui.training.store.run_directory import RunDir, write_json


@pytest.mark.parametrize(
    ("changes", "is_known"),
    [
        ({}, True),
        ({"start_ticks": 0}, False),
        ({"boot_id": None}, False),
        ({"boot_id": "another boot"}, False),
        ({"pid": "1"}, False),
    ],
)
def test_a_given_run_cannot_name_any_process_as_its_own(
    tmp_path: Path, changes: dict[str, object], is_known: bool
) -> None:
    run = RunDir(tmp_path / "given-0001")
    run.path.mkdir()
    pid = os.getpid()
    document = {"pid": pid, "start_ticks": start_ticks(pid), "boot_id": boot_id(), "attempt": 1}
    write_json(run.shim_path, {**document, **changes})
    assert (shim_identity(run) is not None) is is_known
