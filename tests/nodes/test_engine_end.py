"""How the end of an engine of another machine is put into words."""

from __future__ import annotations

import pytest

from ltui.training.lifecycle.elastic_log import WorkerFailure
from ltui.training.lifecycle.run_processes import EngineExit
from ltui.training.nodes.messages import NodeReport
from ltui.training.supervise.node_reports import end_text


@pytest.mark.parametrize(
    ("end", "failures", "text"),
    [
        (EngineExit(error="its shim process was killed"), (), "its shim process was killed"),
        (EngineExit(signal=9), (), "signal 9"),
        (EngineExit(exit_code=2), (), "exit code 2"),
        (EngineExit(exit_code=1), ((3, -9),), "rank 3 was killed by signal 9"),
        (EngineExit(exit_code=1), ((3, 4),), "rank 3 exited with code 4"),
    ],
)
def test_an_engine_ended_by_its_first_failed_rank(
    end: EngineExit, failures: tuple[tuple[int, int], ...], text: str
) -> None:
    failed = tuple(WorkerFailure(rank=r, exit_code=code, first=True) for r, code in failures)
    report = NodeReport(node=1, version="0", host="b", engine_exit=end, failures=failed)
    assert end_text(report) == text


def test_the_error_of_that_rank_is_in_the_text() -> None:
    failed = (WorkerFailure(rank=1, exit_code=1, first=True),)
    report = NodeReport(
        node=1, version="0", host="b", failures=failed, last_line="ValueError: a mistake"
    )
    assert end_text(report) == "rank 1 exited with code 1: ValueError: a mistake"
