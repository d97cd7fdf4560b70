"""What a run in the foreground says of events and of its end, read from a real history."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ltui.app.foreground.follow_run import RunFollower, event_line, failure_lines
from ltui.app.interrupt_signals import ReceivedSignals
from ltui.training.json_codec import to_json
from ltui.training.state.run_snapshot import Event, RunState, Verdict
from ltui.training.store.history_reader import StoredEvent
from ltui.training.store.history_writer import Batch, StoreWriter
from tests.store.histories import begin, run_dir, snapshot

TRACE = "Traceback\n" + "".join(f"  line {n}\n" for n in range(30)) + "RuntimeError: reset by peer"


class Lines:
    """A display that keeps its lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def update(self, *_: object) -> None: ...
    def close(self) -> None: ...
    def print_line(self, line: str) -> None:
        self.lines.append(line)


Row = tuple[int | None, str, str, dict[str, object]]


def write_events(folder: Path, rows: list[Row]) -> None:
    store = StoreWriter(run_dir(folder).db_path)
    begin(store)
    later = time.time() + 60
    events = [Event(later, kind, text, data, rank=rank) for rank, kind, text, data in rows]
    store.commit(1, Batch(events=events))
    store.close()


def test_what_several_ranks_report_is_said_once_with_the_first_rank(tmp_path: Path) -> None:
    notes: list[tuple[int, str, str, dict[str, object]]] = [
        (rank, "note", f"The loss became nan at step 1 on rank {rank}.", {}) for rank in (1, 0)
    ]
    write_events(tmp_path, [*notes, (0, "paused", "Paused at step 200.", {})])
    lines = Lines()
    follower = RunFollower(run_dir(tmp_path), lines, ReceivedSignals())
    follower._print_events()
    follower._print_events()
    assert lines.lines == ["The loss became nan at step 1 on rank 1.", "Paused at step 200."]


def test_a_verdict_is_said_with_what_to_do() -> None:
    verdict = Verdict(kind="stopped", level="stalled", cause="c", remedy="Kill it.")
    event = StoredEvent(1, 1, None, 1.0, "verdict", "STALLED: c", {"verdict": to_json(verdict)})
    assert event_line(event) == "STALLED: c  Kill it."


@pytest.mark.parametrize("consequence", [True, False])
def test_the_rank_that_raised_because_another_died_did_not_fail_first(
    tmp_path: Path, consequence: bool
) -> None:
    write_events(tmp_path, [(0, "exception", "RuntimeError", {"traceback": TRACE})])
    dead = Verdict(
        kind="killed",
        level="dead",
        culprits=(1,),
        cause="rank 1 was killed",
        evidence={"consequences": {"0": "raised RuntimeError"} if consequence else {}},
    )
    run = snapshot(state=RunState.CRASHED, verdicts=(dead,))
    _, head, *lines = failure_lines(run_dir(tmp_path), run)
    assert lines[-1] == "  RuntimeError: reset by peer"
    if consequence:
        assert head == "rank 0 raised this as a consequence:"
        assert len(lines) == 3
    else:
        assert head == "rank 0 failed first:"
        assert len(lines) == 20


def test_the_line_of_the_user_is_in_the_excerpt_of_a_long_traceback(tmp_path: Path) -> None:
    """Below DDP most calls are torch's, which may be built in a folder of any name."""
    inner = [f'  File "/opt/torch/nn/m{n}.py", line {n}, in forward\n    x()\n' for n in range(30)]
    user = '  File "/home/u/train.py", line 4, in step\n    model(x)\n'
    site = '  File "/v/site-packages/lib/a.py", line 1, in run\n    y()\n'
    trace = f"Traceback\n{site}{user}{''.join(inner)}RuntimeError: shapes\n"
    data: dict[str, object] = {"traceback": trace, "torch_dir": "/opt/torch/"}
    write_events(tmp_path, [(1, "exception", "RuntimeError", data)])
    _, _, *lines = failure_lines(run_dir(tmp_path), snapshot(state=RunState.FAILED))
    assert [line.strip() for line in lines] == [
        "Traceback",
        "...",
        'File "/home/u/train.py", line 4, in step',
        "model(x)",
        "...",
        'File "/opt/torch/nn/m29.py", line 29, in forward',
        "x()",
        "RuntimeError: shapes",
    ]
