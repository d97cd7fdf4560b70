"""Commands and webhooks that are called on a verdict: real programs, a real server."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ltui.training.config.run_spec import RunSpec, StallPolicy
from ltui.training.process.proc_files import entry_of
from ltui.training.state.run_snapshot import Verdict
from ltui.training.supervise import verdict_hooks
from ltui.training.supervise.verdict_hooks import VerdictHooks
from tests.required import required
from tests.waiting import wait_for

STALL = Verdict(
    kind="frozen", level="stalled", culprits=(1, 3), waiting=(0, 2), place="forward, train.py:8",
    cause="ranks 1 and 3 stand still in train.py:8", began=100.0, evidence={"frame": "train.py:8"},
)  # fmt: skip


def calls(target: tuple[str, ...] | str | None, cwd: Path, timeout_s: float = 20) -> VerdictHooks:
    spec = RunSpec(
        id="brave-owl-3f2a", name="brave-owl", created_at=0, cwd=str(cwd), python=sys.executable,
        preset="quickstart", stall=StallPolicy(on_verdict=target, on_verdict_timeout_s=timeout_s),
    )  # fmt: skip
    return VerdictHooks(spec, 2, str(cwd / "run"))


def texts(made: VerdictHooks) -> list[str]:
    assert made.close(90)
    return [event.text for event in made.take_events()]


class Server(ThreadingHTTPServer):
    """Answers each request with a status, once it may."""

    status = 204

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Hook)
        self.got: list[tuple[str, str, Any]] = []
        self.may_answer = threading.Event()
        self.may_answer.set()


class Hook(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append((self.path, self.headers["Content-Type"], json.loads(body)))
        self.server.may_answer.wait(60)
        self.send_response(self.server.status)
        self.send_header("Location", "/elsewhere")
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server
    server.may_answer.set()
    server.shutdown()
    server.server_close()
    thread.join()


def url(server: Server) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}/secret/path"


def script(folder: Path, text: str) -> tuple[str, ...]:
    path = folder / "called.py"
    path.write_text(text)
    return sys.executable, str(path), "an argument; $HOME"


def test_a_command_gets_the_verdict_without_a_shell(tmp_path: Path) -> None:
    command = script(
        tmp_path,
        "import json, os, sys\n"
        "said = {'stdin': json.load(sys.stdin), 'args': sys.argv[1:], 'cwd': os.getcwd()}\n"
        "said['env'] = {k: v for k, v in os.environ.items() if k.startswith('LTUI_')}\n"
        "open('said.json', 'w').write(json.dumps(said))\n",
    )
    made = calls(command, tmp_path)
    made.call(STALL)
    assert texts(made) == [f"on_verdict ({sys.executable}) was called"]
    received = json.loads((tmp_path / "said.json").read_text())
    document = received["stdin"]
    assert (document["kind"], document["level"]) == ("frozen", "stalled")
    assert (document["culprits"], document["waiting"]) == ([1, 3], [0, 2])
    assert (document["run"], document["attempt"]) == ("brave-owl-3f2a", 2)
    assert document["text"] == "brave-owl: STALLED: ranks 1 and 3 stand still in train.py:8"
    assert json.loads(received["env"]["LTUI_VERDICT"]) == document
    assert received["env"]["LTUI_VERDICT_CULPRITS"] == "1 3"
    assert received["env"]["LTUI_VERDICT_NODES"] == ""
    # What a command leaves running must not pass for a process of the run.
    assert "LTUI_RUN_ID" not in received["env"]
    assert received["args"] == ["an argument; $HOME"]
    assert Path(received["cwd"]) == tmp_path


def test_evidence_too_long_for_the_environment_is_left_out(tmp_path: Path) -> None:
    command = script(
        tmp_path,
        "import json, os, sys\n"
        "whole, short = json.load(sys.stdin), json.loads(os.environ['LTUI_VERDICT'])\n"
        "assert len(whole['evidence']['log']) == 300000 and short['evidence'] == {}\n",
    )
    made = calls(command, tmp_path)
    made.call(
        Verdict(kind="k", level="dead", cause="c\0d\x1b[31m", evidence={"log": "x" * 300_000})
    )
    assert texts(made) == [f"on_verdict ({sys.executable}) was called"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import sys; print('first'); sys.exit('no such user')", "exit code 1: no such user"),
        ("import os; os.kill(os.getpid(), 9)", "ended by signal 9"),
        (None, "cannot be started: No such file or directory"),
    ],
)
def test_a_command_that_fails_or_is_missing_is_reported(
    tmp_path: Path, text: str | None, words: str
) -> None:
    command = (str(tmp_path / "nothing"),) if text is None else script(tmp_path, text)
    made = calls(command, tmp_path)
    made.call(STALL)
    assert words in texts(made)[0]


def test_a_command_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    command = script(
        tmp_path,
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "open('pids.part', 'w').write(f'{os.getpid()} {child.pid}')\n"
        "os.rename('pids.part', 'pids')\n"
        "time.sleep(600)\n",
    )
    for timeout_s in (2, 60):
        made = calls(command, tmp_path, timeout_s)
        made.call(STALL)
        assert required(made._thread).is_alive(), "the caller was held up"
        assert f"took longer than {timeout_s} s and was killed" in texts(made)[0]
        # On a machine under load the command may not even have begun.
        if (tmp_path / "pids").exists():
            break
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    wait_for(lambda: not any((e := entry_of(pid)) and e.living for pid in pids))


def test_a_webhook_gets_the_verdict(hook: Server, tmp_path: Path) -> None:
    made = calls(url(hook), tmp_path)
    made.call(STALL)
    (text,) = texts(made)
    # The path of a webhook is often its password.
    assert text == f"on_verdict ({url(hook).split('/')[2]}) was called"
    ((path, kind, document),) = hook.got
    assert (path, kind) == ("/secret/path", "application/json")
    assert document["culprits"] == [1, 3]
    assert document["text"].startswith("brave-owl: STALLED")


@pytest.mark.parametrize("status", [500, 302, 404])
def test_a_webhook_that_refuses_is_reported(hook: Server, tmp_path: Path, status: int) -> None:
    hook.status = status
    made = calls(url(hook), tmp_path)
    made.call(STALL)
    assert f"was answered with HTTP {status}" in texts(made)[0]
    assert len(hook.got) == 1


def test_a_webhook_that_hangs_does_not_block(hook: Server, tmp_path: Path) -> None:
    hook.may_answer.clear()
    made = calls(url(hook), tmp_path, timeout_s=1)
    made.call(STALL)
    assert "gave no answer within 1 s" in texts(made)[0]


def test_an_unreachable_webhook_is_reported(hook: Server, tmp_path: Path) -> None:
    free = url(hook)
    hook.socket.close()
    made = calls(free, tmp_path)
    made.call(STALL)
    assert "cannot be reached" in texts(made)[0]


def test_calls_are_rate_limited_and_that_is_reported(
    hook: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = calls(url(hook), tmp_path)
    for _ in range(verdict_hooks.MAXIMUM_CALLS + 5):
        made.call(STALL)
    event_texts = texts(made)
    assert len(hook.got) == verdict_hooks.MAXIMUM_CALLS
    assert sum("is not called for what follows" in text for text in event_texts) == 1
    monkeypatch.setattr(verdict_hooks, "WINDOW_S", 0.0)
    again = calls(url(hook), tmp_path)
    again._left_out = 5
    again.call(STALL)
    assert "on_verdict was not called for 5 verdicts" in texts(again)


def test_no_hook_is_called_after_the_end_or_without_a_target(tmp_path: Path) -> None:
    nobody = calls(None, tmp_path)
    nobody.call(STALL)
    assert texts(nobody) == []
    ended = calls(script(tmp_path, f"open({os.fspath(tmp_path / 'called')!r}, 'w')"), tmp_path)
    assert ended.close(1)
    ended.call(STALL)
    assert texts(ended) == []
    assert not (tmp_path / "called").exists()
