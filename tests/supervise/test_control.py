"""The control socket: who may speak, how fast it answers, what it makes of nonsense."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ltui.training.lifecycle.supervisor_client import ControlClient, NotSupervisedError
from ltui.training.process.identity import write_lock_text
from ltui.training.state.run_snapshot import RunSnapshot, RunState
from ltui.training.store.run_directory import RunDir
from ltui.training.supervise import control_requests
from ltui.training.supervise.control_requests import ControlServer
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


def _ask(path: Path, data: bytes) -> list[dict[str, Any]]:
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(60)
        link.connect(str(path))
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
    path = str(tmp_path / "control.sock")
    big = RunSnapshot(id="a", name="n" * 3_000_000, state=RunState.RUNNING)
    server.publish(big)
    with socket.socket(socket.AF_UNIX) as sleeper, socket.socket(socket.AF_UNIX) as link:
        sleeper.connect(path)
        sleeper.sendall(b'{"cmd": "status"}\n')
        link.settimeout(60)
        link.connect(path)
        link.sendall(b'{"cmd": "ping"}\n')
        with link.makefile("rb") as file:
            assert json.loads(file.readline())["ok"]
        sleeper.settimeout(60)
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
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(60)
        link.connect(str(path))
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
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(str(path))
        link.sendall(b'{"cmd": "left"}\n')
    frozen.set()
    assert _ask(path, b'{"cmd": "stays"}\n')[0]["ok"]
    assert carried_out == ["stays"]
    server.close()


def test_idle_clients_make_room(
    server: ControlServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_requests, "_IDLE_S", 0.2)
    path = str(tmp_path / "control.sock")
    with contextlib.ExitStack() as idle:
        for _ in range(64):
            idle.enter_context(socket.socket(socket.AF_UNIX)).connect(path)
        wait_for(lambda: _answers(path), seconds=30)


def _answers(path: str) -> bool:
    try:
        return bool(_ask(Path(path), b'{"cmd": "ping"}\n'))
    except OSError:
        return False


def test_an_endless_request_is_cut_off(server: ControlServer, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(60)
        link.connect(str(tmp_path / "control.sock"))
        with pytest.raises(OSError):  # noqa: PT011 - reset or broken pipe
            link.sendall(b"x" * (64 << 20))


def test_the_socket_is_the_users_alone(server: ControlServer, tmp_path: Path) -> None:
    assert stat.S_IMODE((tmp_path / "control.sock").stat().st_mode) == 0o600


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
            link = socket.socket(socket.AF_UNIX)
            link.settimeout(60)
            link.connect(str(path))
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


def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()
    server = ControlServer(path, path, _handle)
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(60)
        link.connect(str(path))
    server.close()
    assert threading.active_count() < 20
    assert sys.getrefcount(server) < 10


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
