"""Waiting until an abandoned run is recovered."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ltui.training.lifecycle import run_status
from ltui.training.process.identity import identify
from ltui.training.state.run_snapshot import RunSnapshot, RunState
from ltui.training.store.run_directory import RunDir


@pytest.mark.parametrize("state", [RunState.QUEUED, RunState.STARTING])
def test_a_recovered_run_that_goes_on_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: RunState
) -> None:
    this_process = identify(os.getpid())
    for name, result in {
        "is_abandoned": True,
        "lock_holder": this_process,
        "has_live_shim": state is RunState.STARTING,
        "resolve_snapshot": RunSnapshot(id="a", name="a", state=state),
    }.items():
        monkeypatch.setattr(run_status, name, lambda _, result=result: result, raising=False)
    monkeypatch.setattr(run_status, "restart_supervisor", lambda _: None)
    began_s = time.monotonic()
    assert run_status.recover_run(RunDir(tmp_path), 20.0)
    assert time.monotonic() - began_s < 10
