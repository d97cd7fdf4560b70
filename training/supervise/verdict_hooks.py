"""Call the hook ``on_verdict``, a command or a webhook, in a thread of its own.

A command gets the verdict as JSON on its standard input and in ``LTUI_VERDICT``, without a shell. A
webhook gets the same JSON by POST. Both are stopped after their timeout. The number of calls is
limited. A call that fails or is left out becomes an event.

Act on verdicts: events when they begin and end, hooks, and the verdict that the policy acts on.
Only the supervisor's loop uses it. Hooks run in a thread of their own.
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
from collections.abc import Mapping, Sequence
from typing import IO, Any

from msgspec import Struct
from msgspec.structs import replace

from ltui.training.config.run_spec import RunSpec, VerdictLevel
from ltui.training.json_codec import to_json
from ltui.training.process.python_environment import user_umask
from ltui.training.state.run_snapshot import Event, Verdict
from ltui.training.state.verdicts import VerdictTracker, headline, triggers_hook

MAXIMUM_CALLS = 6
"""Maximum number of calls that start within ``WINDOW_S``."""
WINDOW_S = 300.0
"""Seconds for which calls are counted."""
MAXIMUM_WAITING = 16
"""Maximum number of calls that wait for a slow one. Further calls are left out."""
MAXIMUM_VARIABLE_BYTES = 100_000
"""Maximum size of an environment variable; the kernel's limit is 128 KiB. A longer verdict is
passed without its evidence."""
MAXIMUM_OUTPUT_BYTES = 300
"""Maximum length of a command's last line in an event."""
_MAXIMUM_TEXT = 4000
"""Maximum length of the verdict's text in an environment variable."""
_MAXIMUM_EVENTS = 64
"""Maximum number of events that wait to be taken."""


class VerdictHooks:
    """Calls the hook of one attempt. Every method except ``close`` returns at once."""

    def __init__(self, spec: RunSpec, attempt: int, run_dir: str) -> None:
        self._spec, self._attempt, self._run_dir = spec, attempt, run_dir
        self._calls: queue.Queue[Verdict | None] = queue.Queue(MAXIMUM_WAITING)
        """Verdicts to call the hook for. None ends the thread."""
        self._events: deque[Event] = deque(maxlen=_MAXIMUM_EVENTS)
        self._started_s: deque[float] = deque()
        """Monotonic seconds of the calls within the window."""
        self._left_out = 0
        self._thread: threading.Thread | None = None
        self._closed = False

    def call(self, verdict: Verdict) -> None:
        """Call the hook for ``verdict`` as soon as the calls before it have ended."""
        if self._spec.stall.on_verdict is None or self._closed:
            return
        if not self._within_limit() or self._calls.full():
            self._left_out += 1
            if self._left_out == 1:
                self._add_event(
                    f"on_verdict is not called for what follows: at most {MAXIMUM_CALLS} calls are "
                    f"made in {WINDOW_S / 60:.0f} minutes",
                    left_out=headline(verdict),
                )
            return
        if self._left_out:
            self._add_event(f"on_verdict was not called for {self._left_out} verdicts")
            self._left_out = 0
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="on_verdict", daemon=True)
            self._thread.start()
        self._calls.put_nowait(verdict)

    def take_events(self) -> list[Event]:
        """Return the events since the last call of this method."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def close(self, timeout_s: float) -> bool:
        """Accept no more calls, and wait up to ``timeout_s`` for the calls in progress.

        Return True if all of them have ended. It may be called again to wait longer.
        """
        self._closed = True
        if self._thread is None:
            return True
        with contextlib.suppress(queue.Full):
            self._calls.put_nowait(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _within_limit(self) -> bool:
        """Return True if another call may start now, and count it."""
        now_s = time.monotonic()
        while self._started_s and now_s - self._started_s[0] > WINDOW_S:
            self._started_s.popleft()
        if len(self._started_s) >= MAXIMUM_CALLS:
            return False
        self._started_s.append(now_s)
        return True

    def _document(self, verdict: Verdict) -> dict[str, Any]:
        """Return the verdict and its run. Chat services show the ``text`` of a webhook."""
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

    def _add_event(self, text: str, **data: Any) -> None:
        self._events.append(Event(time.time(), "on_verdict", text, data))

    # -- in the thread -----------------------------------------------------------------------------

    def _work(self) -> None:
        while (verdict := self._calls.get()) is not None:
            began_s = time.monotonic()
            try:
                failure = self._make_call(self._document(verdict))
            except Exception as error:  # noqa: BLE001 - the thread's top: it becomes an event
                failure = f"failed: {type(error).__name__}: {error}"
            self._add_event(
                f"on_verdict ({self._target_name()}) {failure or 'was called'}",
                about=headline(verdict),
                seconds=time.monotonic() - began_s,
                failed=bool(failure),
            )

    def _target_name(self) -> str:
        """Return the command, or only the host of a webhook, whose path is often a secret."""
        target = self._spec.stall.on_verdict
        if isinstance(target, str):
            return urllib.request.Request(target).host  # noqa: S310 - checked to be http(s)
        return target[0] if target else ""

    def _make_call(self, document: dict[str, Any]) -> str | None:
        """Call the hook. Return why it failed, as the end of a sentence, or None."""
        target = self._spec.stall.on_verdict
        if isinstance(target, str):
            return _post(target, document, self._spec.stall.on_verdict_timeout_s)
        return self._run_command(list(target or ()), document)

    def _run_command(self, command: list[str], document: dict[str, Any]) -> str | None:
        """Run the command. Return why it failed, as the end of a sentence, or None."""
        timeout_s = self._spec.stall.on_verdict_timeout_s
        # Files, not pipes: neither a command that does not read nor a child that keeps its output
        # open can block this thread.
        with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as output:
            stdin.write(json.dumps(document).encode())
            stdin.seek(0)
            try:
                process = subprocess.Popen(
                    command,
                    stdin=stdin,
                    stdout=output,
                    stderr=output,
                    cwd=self._spec.cwd,
                    env=_environment(self._spec.env, document),
                    umask=user_umask(),
                    start_new_session=True,
                )
            except (OSError, ValueError) as error:
                return f"cannot be started: {getattr(error, 'strerror', None) or error}"
            try:
                code = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                # Kill also the processes that it started and that are still in its session.
                with contextlib.suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(1.0)
                return f"took longer than {timeout_s:g} s and was killed"
            if code == 0:
                return None
            how = f"failed with exit code {code}" if code > 0 else f"was ended by signal {-code}"
            last_line = _last_line(output)
            return f"{how}: {last_line}" if last_line else how


def _last_line(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - 4 * MAXIMUM_OUTPUT_BYTES))
    text = file.read().decode(errors="replace").strip()
    return text.rpartition("\n")[2][-MAXIMUM_OUTPUT_BYTES:]


def _environment(added: Mapping[str, str], document: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment of a command, with the verdict in ``LTUI_VERDICT*``."""
    text = json.dumps(document)
    if len(text) > MAXIMUM_VARIABLE_BYTES:
        text = json.dumps({**document, "evidence": {}})
    return {
        # Without the variables that mark the run's processes: the command is not one of them.
        **{k: v for k, v in os.environ.items() if not k.startswith("LTUI_RUN_")},
        **added,
        "LTUI_VERDICT": text[:MAXIMUM_VARIABLE_BYTES].replace("\0", ""),
        "LTUI_VERDICT_TEXT": "".join(
            c if c.isprintable() else " " for c in str(document["text"])[:_MAXIMUM_TEXT]
        ),
        "LTUI_VERDICT_KIND": str(document["kind"]),
        "LTUI_VERDICT_LEVEL": str(document["level"]),
        "LTUI_VERDICT_CULPRITS": " ".join(str(r) for r in document["culprits"]),
        "LTUI_VERDICT_NODES": " ".join(str(n) for n in document["nodes"]),
        "LTUI_VERDICT_RUN": str(document["run"]),
    }


def _post(url: str, document: Mapping[str, Any], timeout_s: float) -> str | None:
    """POST the document. Return why it failed, as the end of a sentence, or None."""
    request = urllib.request.Request(  # noqa: S310 - the scheme was checked with the preset
        url,
        data=json.dumps(document).encode(),
        headers={"Content-Type": "application/json", "User-Agent": "ltui"},
        method="POST",
    )
    try:
        # The status is enough, so the body is not read.
        with _opener().open(request, timeout=timeout_s):
            return None
    except urllib.error.HTTPError as error:
        return f"was answered with HTTP {error.code} {error.reason}"
    except (OSError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(reason, TimeoutError):
            return f"gave no answer within {timeout_s:g} s"
        return f"cannot be reached: {getattr(reason, 'strerror', None) or reason}"


def _opener() -> urllib.request.OpenerDirector:
    """Return an opener that follows no redirects, because they turn a POST into a GET."""

    class NoRedirect(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_: Any) -> None:
            return None

    return urllib.request.build_opener(NoRedirect)


SETTLE_S = 1.5
"""Seconds that a verdict must last before it is reported, because its cause may show only then."""

RECOVERY_SETTLE_S = 5.0
"""Seconds that a slow rank must be as fast as the others before its recovery is reported."""
RECOVERY_STEPS = 2
"""Steps that the run must make in that time. After its last step no rank is slow any more."""


class _EndedVerdict(Struct, frozen=True):
    """A verdict that has ended at the monotonic time ``at_s`` and at a step of the run."""

    verdict: Verdict
    at_s: float
    step: int | None

    def has_stepped(self, step: int | None) -> bool:
        """Return whether the run has made steps since then; True if no steps are known."""
        return self.step is None or step is None or step >= self.step + RECOVERY_STEPS


class VerdictNotifier:
    """Reports the verdicts of one attempt from tick to tick."""

    def __init__(self, spec: RunSpec, attempt: int, run_dir: str) -> None:
        self._policy = spec.stall
        self._tracker = VerdictTracker()
        self._hooks = VerdictHooks(spec, attempt, run_dir)
        self._policy_has_acted = False
        self._over: list[_EndedVerdict] = []
        """Verdicts that have ended and are not reported yet."""

    def restore(self, verdicts: Sequence[Verdict], now_s: float, monotonic_s: float) -> None:
        """Take over the verdicts that an earlier supervisor of the attempt has already reported."""
        self._tracker, _, _ = self._tracker.update(verdicts, now_s, monotonic_s)

    def update(
        self,
        verdicts: Sequence[Verdict],
        now_s: float,
        monotonic_s: float,
        *,
        ending: bool,
        step: int | None = None,
    ) -> list[Event]:
        """Return the events that follow from the current verdicts, and start hooks.

        ``ending`` means that the run was asked to end: ranks that die are not reported. ``step`` is
        the furthest step of the ranks; None if it is not known.
        """
        reportable = [v for v in verdicts if not (ending and v.level == VerdictLevel.DEAD)]
        self._tracker, begun, ended = self._tracker.update(
            reportable, now_s, monotonic_s, settle_s=SETTLE_S
        )
        events = [self._report(verdict, now_s) for verdict in begun]
        self._over += [_EndedVerdict(verdict, monotonic_s, step) for verdict in ended]
        # Ranks that have ended are not slow any more, but they have not recovered either.
        due = [
            one
            for one in self._over
            if one.verdict.level != VerdictLevel.SLOW
            or ((begun or monotonic_s - one.at_s >= RECOVERY_SETTLE_S) and one.has_stepped(step))
        ]
        self._over = [one for one in self._over if one not in due]
        recovered = (one.verdict for one in due)
        events += [_event(now_s, "verdict_over", _recovered_text(v), v) for v in recovered]
        return events + self._hooks.take_events()

    def verdict_to_act_on(self, monotonic_s: float) -> Verdict | None:
        """Return the verdict that the policy acts on now: at most one in an attempt."""
        if self._policy_has_acted:
            return None
        verdict = self._tracker.verdict_to_act_on(self._policy, monotonic_s)
        self._policy_has_acted = verdict is not None
        return verdict

    def end(self, now_s: float) -> list[Event]:
        """End all verdicts with the attempt. Report first those that have not been reported."""
        active, self._tracker = self._tracker.active, VerdictTracker()
        events = [self._report(entry.verdict, now_s) for entry in active if not entry.reported]
        for one in self._over:
            events.append(_event(now_s, "verdict_over", _until_the_end(one.verdict), one.verdict))
        self._over = []
        for entry in active:
            verdict = replace(entry.verdict, ended=max(now_s, entry.verdict.began or now_s))
            events.append(_event(now_s, "verdict_over", _until_the_end(verdict), verdict))
        return events + self._hooks.take_events()

    def wait_for_hooks(self, timeout_s: float) -> list[Event]:
        """Wait for hooks in progress, at most ``timeout_s``, and return events with the results."""
        self._hooks.close(timeout_s)
        return self._hooks.take_events()

    def _report(self, verdict: Verdict, now_s: float) -> Event:
        """Return the event of a new verdict, and start its hook."""
        if triggers_hook(verdict, self._policy):
            self._hooks.call(verdict)
        return _event(now_s, "verdict", headline(verdict), verdict)


def _event(now_s: float, kind: str, text: str, verdict: Verdict) -> Event:
    # The evidence is stored with the verdict itself. An event is one line.
    return Event(now_s, kind, text, {"verdict": to_json(replace(verdict, evidence={}))})


def _until_the_end(verdict: Verdict) -> str:
    return f"Active until the run ended: {headline(verdict)}"


def _recovered_text(verdict: Verdict) -> str:
    lasted = ""
    if verdict.began is not None:
        lasted = f" after {max(0.0, (verdict.ended or 0.0) - verdict.began):.0f} s"
    return f"Recovered{lasted}. It was: {headline(verdict)}"
