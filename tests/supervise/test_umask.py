"""What a run writes itself is private; the user's command writes as it does without ltui."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.required import required
from tests.supervise.conftest import Runs

SCRIPT = "umask; touch file; mkdir folder; while ! [ -e end ]; do sleep 0.05; done"


@pytest.fixture(params=[0o022, 0o002, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def _umask_of(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("Umask:")[2].split()[0], 8)


def test_a_command_has_the_umask_of_the_shell_that_started_it(
    runs: Runs, umask: int, tmp_path: Path
) -> None:
    run = runs.start("sh", "-c", SCRIPT)
    runs.until(run, lambda s: (tmp_path / "folder").exists() and s.supervisor_pid)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("file", "folder")]
    assert modes == [0o666 & ~umask, 0o777 & ~umask]
    next_supervisor = psutil.Process(required(runs.replace_supervisor(run).supervisor_pid))
    assert _umask_of(next_supervisor.pid) == 0o077
    assert int(next_supervisor.environ()["LTUI_RUN_UMASK"], 8) == umask
    (tmp_path / "end").touch()
    runs.ended(run)
    log = run.engine_log_path(1).read_text()
    assert int(log, 8) == umask
    private = [run.path, run.db_path, run.engine_log_path(1), run.path / "spec.yaml"]
    assert [stat.S_IMODE(path.stat().st_mode) & 0o077 for path in private] == [0] * len(private)
