"""Calls somebody on a verdict: a command of the user's, or a webhook. Never in the loop's thread.

A command gets the verdict as JSON on its standard input and in ``LTUI_VERDICT``, without a shell; a
webhook gets the same JSON by POST. Both are cut off after their time. Calls are rate limited, and
what fails or is left out becomes an event.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import queue
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any

from ltui.training.config.run_spec import RunSpec
from ltui.training.state.run_snapshot import Verdict, to_json
from ltui.training.state.verdict_tracker import headline

MOST_CALLS = 6
WINDOW_S = 300.0
"""At most ``MOST_CALLS`` calls start within so many seconds."""
WAITING = 16
"""Calls that may wait for a slow one; more are left out."""
MOST_ENVIRONMENT_BYTES = 100_000
"""The kernel takes no longer variable than 128 KiB: evidence is left out of a longer one."""
LAST_WORDS = 300

Event = tuple[float, str, dict[str, Any]]
"""Unix time, the sentence, and what came with it."""


@dataclass(frozen=True, slots=True)
class _Call:
    document: dict[str, Any]
    about: str


class VerdictHooks:
    """The calls of one attempt. Every method returns at once but ``close``."""

    def __init__(self, spec: RunSpec, attempt: int, run_dir: str) -> None:
        self._spec, self._attempt, self._run_dir = spec, attempt, run_dir
        self._calls: queue.Queue[_Call | None] = queue.Queue(WAITING)
        self._events: deque[Event] = deque(maxlen=64)
        self._started_s: deque[float] = deque()
        self._left_out = 0
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def call(self, verdict: Verdict) -> None:
        """Call for ``verdict`` as soon as the calls before it are over."""
        if self._spec.stall.on_verdict is None or self._closed:
            return
        about = headline(verdict)
        if not self._within_limit() or self._calls.full():
            self._left_out += 1
            if self._left_out == 1:
                self._tell(
                    f"on_verdict is not called for what follows: at most {MOST_CALLS} calls are "
                    f"made in {WINDOW_S / 60:.0f} minutes",
                    left_out=about,
                )
            return
        if self._left_out:
            self._tell(f"on_verdict was not called for {self._left_out} verdicts")
            self._left_out = 0
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="on_verdict", daemon=True)
            self._thread.start()
        self._calls.put_nowait(_Call(self._document(verdict), about))

    def take_events(self) -> list[Event]:
        """What has happened since the last call of this."""
        taken = []
        while self._events:
            taken.append(self._events.popleft())
        return taken

    def close(self, patience_s: float) -> bool:
        """Take no more calls; wait for those under way, not longer than ``patience_s``.

        Whether they are all over. May be called again, to wait longer.
        """
        self._closed = True
        if self._thread is None:
            return True
        with contextlib.suppress(queue.Full):
            self._calls.put_nowait(None)
        self._thread.join(patience_s)
        return not self._thread.is_alive()

    def _within_limit(self) -> bool:
        now_s = time.monotonic()
        while self._started_s and now_s - self._started_s[0] > WINDOW_S:
            self._started_s.popleft()
        if len(self._started_s) >= MOST_CALLS:
            return False
        self._started_s.append(now_s)
        return True

    def _document(self, verdict: Verdict) -> dict[str, Any]:
        """The verdict, and whose it is. ``text`` is what chat services show of a webhook."""
        spec = self._spec
        return {
            **to_json(verdict),
            "text": f"{spec.name}: {headline(verdict)}",
            "run": spec.id,
            "name": spec.name,
            "attempt": self._attempt,
            "what": spec.preset or " ".join(spec.command or ()),
            "host": socket.gethostname(),
            "run_dir": self._run_dir,
        }

    def _tell(self, text: str, **fields: Any) -> None:
        self._events.append((time.time(), text, fields))

    # -- the thread --------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            call = self._calls.get()
            if call is None:
                return
            begun_s = time.monotonic()
            try:
                failed = self._one(call)
            except Exception as error:  # noqa: BLE001 - the thread's top: it becomes an event
                failed = f"failed: {type(error).__name__}: {error}"
            seconds = time.monotonic() - begun_s
            what = f"on_verdict ({self._shown()})"
            ended = "was called" if failed is None else failed
            self._tell(f"{what} {ended}", about=call.about, seconds=seconds, failed=bool(failed))

    def _shown(self) -> str:
        """The command, or the webhook's host: a URL's path is often a secret."""
        target = self._spec.stall.on_verdict
        if isinstance(target, str):
            return urllib.request.Request(target).host  # noqa: S310 - checked to be http(s)
        return target[0] if target else ""

    def _one(self, call: _Call) -> str | None:
        target = self._spec.stall.on_verdict
        timeout_s = self._spec.stall.on_verdict_timeout_s
        if isinstance(target, str):
            return _post(target, call.document, timeout_s)
        return self._run(list(target or ()), call, timeout_s)

    def _run(self, command: list[str], call: _Call, timeout_s: float) -> str | None:
        """Why it failed, as the end of a sentence; None where it did not."""
        # Files, not pipes: neither a command that does not read nor a child that it leaves behind
        # with its output open can hold up this thread.
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as said:
            given.write(json.dumps(call.document).encode())
            given.seek(0)
            try:
                process = self._process = subprocess.Popen(
                    command,
                    stdin=given,
                    stdout=said,
                    stderr=said,
                    cwd=self._spec.cwd,
                    env=_environment(self._spec.env, call),
                    start_new_session=True,
                )
            except (OSError, ValueError) as error:
                return f"cannot be started: {getattr(error, 'strerror', None) or error}"
            try:
                code = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._kill()
                return f"took longer than {timeout_s:g} s and was killed"
            finally:
                self._process = None
            return None if code == 0 else _failure(code, _last_line(said))

    def _kill(self) -> None:
        """The command and whatever it started that still is in its session."""
        process = self._process
        if process is None:
            return
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)


def _failure(code: int, last: str) -> str:
    how = f"failed with exit code {code}" if code > 0 else f"was ended by signal {-code}"
    return f"{how}: {last}" if last else how


def _last_line(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - 4 * LAST_WORDS))
    return file.read().decode(errors="replace").strip().rpartition("\n")[2][-LAST_WORDS:]


def _environment(added: Mapping[str, str], call: _Call) -> dict[str, str]:
    document = call.document
    text = json.dumps(document)
    if len(text) > MOST_ENVIRONMENT_BYTES:
        text = json.dumps({**document, "evidence": {}})
    return {
        # Without the run's own marks: whatever a command leaves running is not of the run.
        **{k: v for k, v in os.environ.items() if not k.startswith("LTUI_RUN_")},
        **added,
        "LTUI_VERDICT": text[:MOST_ENVIRONMENT_BYTES].replace("\0", ""),
        "LTUI_VERDICT_TEXT": "".join(
            c if c.isprintable() else " " for c in str(document["text"])[:4000]
        ),
        "LTUI_VERDICT_KIND": str(document["kind"]),
        "LTUI_VERDICT_LEVEL": str(document["level"]),
        "LTUI_VERDICT_CULPRITS": " ".join(str(r) for r in document["culprits"]),
        "LTUI_VERDICT_RUN": str(document["run"]),
    }


def _post(url: str, document: Mapping[str, Any], timeout_s: float) -> str | None:
    """POST the document. Why it failed, as the end of a sentence; None where it did not."""
    request = urllib.request.Request(  # noqa: S310 - the scheme was checked with the preset
        url,
        data=json.dumps(document).encode(),
        headers={"Content-Type": "application/json", "User-Agent": "ltui"},
        method="POST",
    )
    try:
        # Its status says it all: the body is not waited for.
        with _opener().open(request, timeout=timeout_s):
            return None
    except urllib.error.HTTPError as error:
        return f"was answered with HTTP {error.code} {error.reason}"
    except TimeoutError:
        return f"gave no answer within {timeout_s:g} s"
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            return f"gave no answer within {timeout_s:g} s"
        reason = error.reason
        return f"cannot be reached: {getattr(reason, 'strerror', None) or reason}"
    except (OSError, http.client.HTTPException) as error:
        return f"cannot be reached: {getattr(error, 'strerror', None) or error}"


def _opener() -> urllib.request.OpenerDirector:
    """Without redirects: a POST that is turned into a GET tells nobody anything."""

    class NoRedirect(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_: Any) -> None:
            return None

    return urllib.request.build_opener(NoRedirect)
