"""The control socket: who may speak, how fast it answers, what it makes of nonsense."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from ltui.training.lifecycle.supervisor_client import ControlClient, NotSupervisedError
from ltui.training.process.identity import write_lock_text
from ltui.training.state.record_fold import FoldState
from ltui.training.state.run_snapshot import RunSnapshot, RunState
from ltui.training.store.run_directory import RunDir
from ltui.training.supervise import control_requests
from ltui.training.supervise.control_requests import (
    ControlServer,
    RequestHandler,
    check_coordination,
)
from tests.waiting import wait_for

carried_out: list[object] = []


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ControlServer]:
    path = tmp_path / "control.sock"
    started = ControlServer(path, path, _handle)
    yield started
    started.close()
    assert not path.exists()


def _handle(order: dict[str, object]) -> dict[str, object]:
    if order["cmd"] == "refuse":
        raise ValueError("not now.")
    if order["cmd"] == "fail":
        raise KeyError("an error in the handler")
    carried_out.append(order["cmd"])
    return {"ok": True, "echo": order}


def _connected(path: Path) -> socket.socket:
    link = socket.socket(socket.AF_UNIX)
    link.settimeout(60)
    link.connect(str(path))
    return link


def _ask(path: Path, data: bytes) -> list[dict[str, Any]]:
    with _connected(path) as link:
        link.sendall(data)
        link.shutdown(socket.SHUT_WR)
        with link.makefile("rb") as file:
            return [json.loads(line) for line in file]


def test_answers_in_order_and_refuses_nonsense(server: ControlServer, tmp_path: Path) -> None:
    lines = [
        b'{"cmd": "ping"}',
        b'{"cmd": "status"}',
        b"{",
        b"[1]",
        b'{"cmd": "refuse"}',
        b'{"cmd": 1}',
        b'{"cmd": "fail"}',
        b'{"cmd": ' + b"[" * 30_000,
        b'{"cmd": "ping"}',
    ]
    answers = _ask(tmp_path / "control.sock", b"\n".join(lines) + b"\n")
    assert [answer["ok"] for answer in answers] == [
        *(True, False, False, False, False, True, False, False, True)
    ]
    assert answers[0]["pid"] == os.getpid()
    assert answers[4]["error"] == "not now."


def test_only_the_latest_snapshot_is_returned(server: ControlServer, tmp_path: Path) -> None:
    for step in range(3):
        server.publish(RunSnapshot(id="a", name="a", state=RunState.RUNNING, global_step=step))
    (answer,) = _ask(tmp_path / "control.sock", b'{"cmd": "status"}\n')
    assert answer["snapshot"]["global_step"] == 2


def test_a_slow_reader_holds_nobody_up(server: ControlServer, tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    server.publish(RunSnapshot(id="a", name="n" * 3_000_000, state=RunState.RUNNING))
    with _connected(path) as sleeper:
        sleeper.sendall(b'{"cmd": "status"}\n')
        assert _ask(path, b'{"cmd": "ping"}\n')[0]["ok"]
        with sleeper.makefile("rb") as file:
            assert len(json.loads(file.readline())["snapshot"]["name"]) == 3_000_000


def test_a_handler_that_fails_and_a_missing_thread_use_up_no_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: dict[str, object]) -> dict[str, object]:
        raise ZeroDivisionError

    path, start = tmp_path / "failing.sock", threading.Thread.start
    server = ControlServer(path, path, fail)
    for _ in range(70):
        (answer,) = _ask(path, b'{"cmd": "fail"}\n')
        assert answer["error"] == "this request cannot be carried out (ZeroDivisionError)."

    def cannot_start(thread: threading.Thread) -> None:
        monkeypatch.setattr(threading.Thread, "start", start)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", cannot_start)
    with _connected(path) as link:
        assert link.recv(1) == b""
    assert _ask(path, b'{"cmd": "ping"}\n')[0]["ok"]
    server.close()


def test_the_request_of_a_client_that_has_left_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a pause of the supervisor: the client has said that nothing was changed."""
    path, carried_out[:] = tmp_path / "paused.sock", []
    frozen, accept = threading.Event(), socket.socket.accept

    def accept_later(listener: socket.socket) -> tuple[socket.socket, object]:
        frozen.wait()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accept_later)
    server = ControlServer(path, path, _handle)
    with _connected(path) as link:
        link.sendall(b'{"cmd": "left"}\n')
    frozen.set()
    assert _ask(path, b'{"cmd": "stays"}\n')[0]["ok"]
    assert carried_out == ["stays"]
    server.close()


def test_idle_clients_make_room(
    server: ControlServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_requests, "_IDLE_S", 0.2)
    path = tmp_path / "control.sock"
    with contextlib.ExitStack() as idle:
        for _ in range(64):
            idle.enter_context(_connected(path))
        wait_for(lambda: _answers(path), seconds=30)


def _answers(path: Path) -> bool:
    try:
        return bool(_ask(path, b'{"cmd": "ping"}\n'))
    except OSError:
        return False


def test_an_endless_request_is_cut_off(server: ControlServer, tmp_path: Path) -> None:
    link = _connected(tmp_path / "control.sock")
    with link, pytest.raises(OSError):  # noqa: PT011 - reset or broken pipe
        link.sendall(b"x" * (64 << 20))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_refused(server: ControlServer, tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    path.chmod(0o666)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == 0 and str(folder).startswith("/tmp/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        try:
            link = _connected(path)
            link.sendall(b'{"cmd": "ping"}\n')
            os.write(write_end, b"answer:" + link.recv(100))
        except OSError as error:
            os.write(write_end, f"error:{type(error).__name__}".encode())
        os._exit(0)
    os.close(write_end)
    os.waitpid(child, 0)
    with os.fdopen(read_end, "rb") as file:
        output = file.read()
    assert output in (b"answer:", b"error:BrokenPipeError", b"error:ConnectionResetError"), output


def test_a_stale_socket_is_replaced_by_one_of_the_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()
    server = ControlServer(path, path, _handle)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    _connected(path).close()
    server.close()


def test_a_client_waits_while_many_others_connect(tmp_path: Path) -> None:
    """Linux refuses a connection with EAGAIN while the queue of the listener is full."""
    run_dir = RunDir(tmp_path)
    with run_dir.lock_path.open("w+b") as lock:
        write_lock_text(lock.fileno(), run_dir.lock_path)
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(str(run_dir.socket_path))
        listener.listen(0)
        first.connect(str(run_dir.socket_path))
        with pytest.raises(NotSupervisedError, match=r"does not answer.*nothing is changed"):
            ControlClient(run_dir).request({"cmd": "stop"}, 0.1)
        threading.Timer(0.1, listener.accept).start()
        with pytest.raises(NotSupervisedError, match="does not answer"):
            ControlClient(run_dir).request({"cmd": "ping"}, 2.0)
        assert listener.accept()


# Requests that the ranks of a run cannot carry out are refused with the reason.


@pytest.mark.parametrize("command", ["stop", "stop_when", "pause", "continue", "checkpoint"])
def test_ranks_that_cannot_act_together_are_not_asked_to(command: str) -> None:
    check_coordination({"cmd": command}, None)
    with pytest.raises(ValueError, match=r"its ranks cannot .*TypeError: no.*Only a kill"):
        check_coordination({"cmd": command}, "TypeError: no")
    for needs_no_rank in ({"cmd": "kill"}, {"cmd": "stop_when", "cancel": True}):
        check_coordination(needs_no_rank, "TypeError: no")


def test_a_program_without_checkpoints_is_stopped_although_its_ranks_cannot_agree() -> None:
    check_coordination({"cmd": "stop"}, "no DDP", saves=False)
    for command in ("pause", "stop_when"):
        with pytest.raises(ValueError, match=r"\(no DDP\)\. It can be stopped, by a signal"):
            check_coordination({"cmd": command}, "no DDP", saves=False)


def _handler(state: RunState, command: tuple[str, ...] | None) -> RequestHandler:
    attempt: Any = SimpleNamespace(
        snapshot=RunSnapshot(id="a", name="a", state=state),
        spec=SimpleNamespace(nodes=None, command=command, env={}),
        evidence=SimpleNamespace(rounds=SimpleNamespace(request_diagnosis=Future)),
        coordination_error=lambda: None,
        fold=FoldState(),
        has_pulses=lambda: False,
    )
    return RequestHandler(attempt, Mock(), threading.Event())


@pytest.mark.parametrize(
    ("state", "command", "why"),
    [
        (RunState.STARTING, ("sh",), "the ranks have not begun to train yet"),
        (RunState.RUNNING, ("sh",), "this command sends no telemetry, so ltui cannot pause it"),
        (RunState.RUNNING, None, "the ranks have not begun to train yet"),
        (RunState.FINISHED, ("sh",), "the run is finished"),
    ],
)
def test_ranks_without_a_pulse_are_not_paused(
    state: RunState, command: tuple[str, ...] | None, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        _handler(state, command).accept({"cmd": "pause"})


@pytest.mark.parametrize("request_", [{"cmd": "diagnose"}, {"cmd": "stop_when", "cancel": True}])
def test_a_request_without_an_answer_is_given_up(
    request_: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_requests, "ANSWER_S", 0.01)
    with pytest.raises(ValueError, match="its supervisor does not answer"):
        _handler(RunState.RUNNING, None).accept(request_)
