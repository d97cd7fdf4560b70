"""The control block: requests, decisions, signals; several processes; writers killed half way."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from ltui.training.tensor_queue.control_block import (
    Command,
    ControlFile,
    ControlFileError,
    Decision,
    Request,
)
from tests.required import required
from tests.tensor_queue.children import killed_at_every_line, run_child


def test_the_first_process_creates_the_file_and_all_read_the_same(tmp_path: Path) -> None:
    path = tmp_path / "control.bin"
    supervisor, rank = ControlFile.open(path), ControlFile.open(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert {p.name for p in tmp_path.iterdir()} <= {"control.bin", "home"}
    first = required(rank.poll())
    assert (first.request, first.decision, first.signal) == (None, None, 0)
    assert rank.poll() is None
    supervisor.request(Command.PAUSE, 1)
    assert required(rank.poll()).request == Request(1, Command.PAUSE)
    assert rank.poll() is None
    rank.decide(1, Command.PAUSE, 41)
    supervisor.request(Command.CONTINUE, 2)
    state = required(rank.poll())
    assert (state.request, state.decision) == (
        Request(2, Command.CONTINUE),
        Decision(1, Command.PAUSE, 41),
    )
    assert supervisor.read().decision == Decision(1, Command.PAUSE, 41)
    supervisor.close()
    rank.close()
    rank.close()


def test_the_same_request_again_is_a_change(tmp_path: Path) -> None:
    control = ControlFile.open(tmp_path / "c")
    control.poll()
    for request_id in range(1, 70_000, 997):
        control.request(Command.CHECKPOINT, request_id)
        assert required(control.poll()).request == Request(request_id, Command.CHECKPOINT)
        assert control.poll() is None
    control.close()


def test_more_decisions_than_the_word_can_count(tmp_path: Path) -> None:
    control, other_process = ControlFile.open(tmp_path / "c"), ControlFile.open(tmp_path / "c")
    for decision_id in range(1, (1 << 16) + 10):
        control.decide(decision_id, Command.CHECKPOINT, decision_id)
    assert required(other_process.poll()).decision == Decision(
        (1 << 16) + 9, Command.CHECKPOINT, (1 << 16) + 9
    )
    assert other_process.poll() is None
    control.decide(1 << 17, Command.STOP, 3)
    assert required(other_process.poll()).decision == Decision(1 << 17, Command.STOP, 3)
    control.close()
    other_process.close()


def test_a_signal_is_seen_by_other_processes_and_not_from_forked_children(tmp_path: Path) -> None:
    control = ControlFile.open(tmp_path / "c")
    control.poll()

    def receive(number: int, *, in_child: bool) -> None:
        own = ControlFile.open(tmp_path / "c")
        signal.signal(number, lambda received, _: own.raise_signal(received))
        kill = partial(signal.raise_signal, number)
        run_child(kill) if in_child else kill()

    run_child(lambda: receive(signal.SIGUSR1, in_child=False))
    assert required(control.poll()).signal == signal.SIGUSR1
    control.clear_signal()
    assert required(control.poll()).signal == 0
    run_child(lambda: receive(signal.SIGTERM, in_child=True))
    assert control.poll() is None
    control.close()


def test_a_writer_killed_at_any_line_leaves_the_old_request_or_the_new(tmp_path: Path) -> None:
    def prepare(path: Path) -> Callable[[], None]:
        control = ControlFile.open(path)
        control.request(Command.PAUSE, 1)
        control.decide(1, Command.PAUSE, 10)

        def write() -> None:
            control.request(Command.STOP, 2)
            control.decide(2, Command.STOP, 20)

        return write

    outcomes = set()
    for path in killed_at_every_line(tmp_path, "control_block.py", prepare):
        control = ControlFile.open(path)
        state = control.read()
        assert state.request in (Request(1, Command.PAUSE), Request(2, Command.STOP))
        assert state.decision in (Decision(1, Command.PAUSE, 10), Decision(2, Command.STOP, 20))
        outcomes.add((state.request, state.decision))
        # The one who takes the writer's place is understood by one who watched all along.
        other_process = ControlFile.open(path)
        other_process.poll()
        control.request(Command.CHECKPOINT, 3)
        control.decide(3, Command.CHECKPOINT, 30)
        seen = required(other_process.poll())
        assert seen.request == Request(3, Command.CHECKPOINT)
        assert seen.decision == Decision(3, Command.CHECKPOINT, 30)
        assert other_process.poll() is None
        control.close()
        other_process.close()
    assert len(outcomes) == 3


def test_a_slot_written_to_any_point_leaves_the_decision_before(tmp_path: Path) -> None:
    control = ControlFile.open(tmp_path / "c")
    for step in range(1, 6):
        control.decide(step, Command.CHECKPOINT, step)
    before = (tmp_path / "c").read_bytes()
    control.decide(6, Command.STOP, 1 << 40)
    after = (tmp_path / "c").read_bytes()
    control.close()
    # Of what differs, the word that announces it stands first in the file, and is stored last.
    slot = [at for at in range(1024, len(after)) if before[at] != after[at]]
    assert len(slot) > 3
    for cut in range(slot[0], slot[-1] + 1):
        torn = tmp_path / "torn"
        torn.write_bytes(before[:1024] + after[1024:cut] + before[cut:])
        reading = ControlFile.open(torn)
        assert reading.read().decision == Decision(5, Command.CHECKPOINT, 5)
        reading.close()


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "not a control file"),
        (bytes(4096), "not a control file"),
        (b"LTUICTRL\x02\0\0\0" + bytes(4084), "newer"),
        (b"LTUICTRL\x01\0\0\0", "truncated"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, what: str) -> None:
    (tmp_path / "c").write_bytes(content)
    with pytest.raises(ControlFileError, match=what):
        ControlFile.open(tmp_path / "c")


def test_a_folder_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no-such"):
        ControlFile.open(tmp_path / "no-such" / "c")
    assert os.listdir(tmp_path) in ([], ["home"])
