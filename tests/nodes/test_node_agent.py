"""What an agent closes when its attempt is over, and who finds its lock."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from ltui.training.lifecycle.supervisor_client import AttemptPlan
from ltui.training.process.identity import write_lock_text
from ltui.training.supervise.node_agent import NodeAgent


class _Agent(NodeAgent):
    """An agent with a real lock, whose attempt ends as it is told."""

    def __init__(self, lock: int, end: AttemptPlan | Exception | None) -> None:
        self.live = Mock(lock=lock)
        self._link, self._barrier, self._tails, self._probe = Mock(), Mock(), Mock(), None
        self._acknowledged = {}
        vars(self)["_supervise"] = Mock(return_value=None)
        vars(self)["_finish"] = Mock(side_effect=[end])


@pytest.mark.parametrize(
    ("end", "holds_lock"), [(AttemptPlan(), True), (None, False), (OSError("injected"), True)]
)
def test_an_attempt_is_closed_once_and_its_lock_is_kept_for_who_continues(
    end: AttemptPlan | Exception | None, holds_lock: bool, tmp_path: Path
) -> None:
    path = tmp_path / "supervisor.lock"
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    write_lock_text(lock, path)
    agent = _Agent(lock, end)
    agent.live.close = closed = Mock()  # type: ignore[method-assign]
    if isinstance(end, Exception):
        with pytest.raises(OSError, match="injected"):
            agent.run()
    else:
        assert agent.run() is end
    assert closed.call_count == 1
    assert bool(path.read_text()) is holds_lock
