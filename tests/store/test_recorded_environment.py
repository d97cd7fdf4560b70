"""What differs between the environment of an attempt and that of now."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ltui.training.store.recorded_environment import PART, environment_changes, environment_digests
from ltui.training.store.run_directory import RunDir, write_json


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    run_dir = RunDir(tmp_path)
    (tmp_path / "engine").mkdir()
    monkeypatch.setenv("STEPS", "300")
    monkeypatch.setenv("DATA", "/data")
    write_json(run_dir.secret_digests_path(2), {PART: environment_digests({"SEED": "s3cr3t"})})
    return run_dir


def test_variables_that_differ_are_named_and_values_are_not_stored(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"SEED": "s3cr3t"}
    assert environment_changes(run_dir, 2, own) == ""
    monkeypatch.setenv("SSH_CONNECTION", "another terminal")
    assert environment_changes(run_dir, 2, own) == ""
    monkeypatch.delenv("STEPS")
    monkeypatch.setenv("DATA", "/other")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert environment_changes(run_dir, 2, own) == (
        "The environment differs from that of attempt 2: CUDA_VISIBLE_DEVICES is set now, "
        "DATA has another value, STEPS is not set now."
    )
    stored = run_dir.secret_digests_path(2).read_text(encoding="utf-8")
    assert "/data" not in stored
    assert "s3cr3t" not in stored


def test_many_differences_are_counted(run_dir: RunDir) -> None:
    own = {f"VARIABLE_{number}": "" for number in range(20)} | {"SEED": "s3cr3t"}
    assert environment_changes(run_dir, 2, own).endswith("VARIABLE_15 is set now, 12 more.")


@pytest.mark.parametrize(
    "damaged", [None, [], {}, {PART: 1}, {PART: {"key": "x", "variables": {}}}]
)
def test_an_attempt_of_which_nothing_is_known_differs_in_nothing(
    run_dir: RunDir, damaged: object
) -> None:
    run_dir.secret_digests_path(1).write_text(json.dumps(damaged), encoding="utf-8")
    assert environment_changes(run_dir, 1, {}) == ""
    assert environment_changes(run_dir, 7, {}) == ""
