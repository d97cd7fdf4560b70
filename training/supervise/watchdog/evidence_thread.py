"""When ranks are looked at closely, in a thread of its own so that the loop never waits.

A suspicion is looked into at once, then again and again at growing distances while it lasts. Now
and then a healthy run is looked at too, to compare the call sites of its collectives.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ltui.training.diagnosis.evidence import Evidence
from ltui.training.supervise.watchdog.gather_evidence import EvidenceRequest, collect_evidence

_PAUSES_S = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Between a round's end and the next one's beginning, while a suspicion lasts."""
_FIRST_HEALTHY_S, _HEALTHY_S = 20.0, 300.0


class EvidenceThread:
    """One round at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._taken: Evidence | None = None
        self._error: str | None = None
        self._rounds = 0
        self._ended_s = 0.0
        self._began_s = 0.0
        self._healthy_due_s: float | None = None
        self._asked: list[tuple[float, Future[dict[str, Any]]]] = []

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def evidence(self) -> Evidence | None:
        """Of the last round."""
        return self._taken

    def ask(self) -> Future[dict[str, Any]]:
        """Somebody wants a diagnosis: fulfilled by ``answer`` after a round begun from now on."""
        future: Future[dict[str, Any]] = Future()
        self._asked.append((time.monotonic(), future))
        return future

    def look(
        self, *, suspicious: bool, training: bool, question: Callable[[], EvidenceRequest]
    ) -> None:
        """Begin a round where one is due."""
        now_s = time.monotonic()
        if not suspicious:
            self._rounds = 0
        if self.busy:
            return
        wanted = any(asked_s > self._began_s for asked_s, _ in self._asked)
        if suspicious:
            pause_s = _PAUSES_S[min(self._rounds, len(_PAUSES_S)) - 1] if self._rounds else 0.0
            wanted = wanted or now_s - self._ended_s >= pause_s
        elif training:
            if self._healthy_due_s is None:
                self._healthy_due_s = now_s + _FIRST_HEALTHY_S
            wanted = wanted or now_s >= self._healthy_due_s
        if not wanted:
            return
        self._rounds += suspicious
        self._healthy_due_s = now_s + _HEALTHY_S
        self._begin(question())

    def answer(self, make: Callable[[], dict[str, Any]]) -> None:
        """Fulfil those who asked before the last finished round began."""
        if self.busy or not self._asked:
            return
        due = [future for asked_s, future in self._asked if asked_s <= self._began_s]
        self._asked = [entry for entry in self._asked if entry[0] > self._began_s]
        if due:
            answer = make()
            for future in due:
                future.set_result(answer)

    def close(self) -> None:
        """Wait for nothing; who still asks is told no."""
        asked, self._asked = self._asked, []
        for _, future in asked:
            future.set_exception(ValueError("the run has just ended."))

    def _begin(self, question: EvidenceRequest) -> None:
        self._began_s = time.monotonic()
        self._thread = threading.Thread(
            target=self._take, args=(question,), name="evidence", daemon=True
        )
        self._thread.start()

    def _take(self, question: EvidenceRequest) -> None:
        try:
            self._taken = collect_evidence(question)
        except Exception as error:  # noqa: BLE001  (the top of the thread: verdicts do without)
            self._error = f"{type(error).__name__}: {error}"
        self._ended_s = time.monotonic()

    @property
    def error(self) -> str | None:
        return self._error
