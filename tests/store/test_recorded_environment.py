"""The environment of an attempt: what is set again, what only differs, what is not kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ltui.training.store.recorded_environment import recall_environment, record_environment
from ltui.training.store.run_directory import RunDir


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    run_dir = RunDir(tmp_path)
    (tmp_path / "engine").mkdir()
    monkeypatch.setattr(os, "environ", {
        "STEPS": "300", "DATA": "/data", "HF_TOKEN": "hidden", "TERM": "xterm", "LTUI_HOME": "/x",
        "DATABASE": "postgres://me:secret7@host/db",
    })  # fmt: skip
    record_environment(run_dir, 2)
    return run_dir


def test_nothing_differs_in_another_terminal(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "TERM", "tmux")
    monkeypatch.setitem(os.environ, "SSH_CONNECTION", "somewhere")
    recalled = recall_environment(run_dir, 2)
    assert (dict(recalled.variables), recalled.text) == ({}, "")


def test_what_is_not_set_any_more_is_set_again_and_the_rest_is_named(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {"DATA": "/other", "CUDA_VISIBLE_DEVICES": "3", "HF_TOKEN": "other"}
    monkeypatch.setattr(os, "environ", environment)
    recalled = recall_environment(run_dir, 2)
    assert dict(recalled.variables) == {"STEPS": "300"}
    assert recalled.text == (
        "Environment variables, beside attempt 2: set again as then: STEPS; "
        "not set now, and not kept: DATABASE; with another value: DATA, HF_TOKEN; "
        "new: CUDA_VISIBLE_DEVICES."
    )


def test_secrets_are_not_stored(run_dir: RunDir) -> None:
    path = run_dir.recorded_environment_path(2)
    text = path.read_text(encoding="utf-8")
    assert "/data" in text
    assert "hidden" not in text
    assert "secret7" not in text
    assert path.stat().st_mode & 0o777 == 0o600


def test_nothing_of_several_machines_is_set_again(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_environment(run_dir, 3, values=False)
    monkeypatch.setattr(os, "environ", {"DATA": "/other"})
    recalled = recall_environment(run_dir, 3)
    assert dict(recalled.variables) == {}
    assert "and not kept: DATABASE, HF_TOKEN, STEPS; with another value: DATA." in recalled.text


@pytest.mark.parametrize("damaged", ["", "[]", "{}", '{"values": 1, "digests": {}, "key": "00"}'])
def test_an_attempt_of_which_nothing_is_known_differs_in_nothing(
    run_dir: RunDir, damaged: str
) -> None:
    run_dir.recorded_environment_path(1).write_text(damaged, encoding="utf-8")
    for attempt in (1, 7):
        assert recall_environment(run_dir, attempt).text == ""
