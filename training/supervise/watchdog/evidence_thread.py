"""Decides when to collect evidence, and collects it in a thread so that the loop never waits.

While a run is suspicious, rounds follow each other at growing intervals. Now and then evidence of a
healthy run is collected too, to compare the call sites of its collectives.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ltui.training.diagnosis.evidence import Diagnosis, Evidence
from ltui.training.supervise.watchdog.gather_evidence import EvidenceRequest, collect_evidence

_PAUSES_S = (0.0, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds between the end of a round and the next one, by the number of rounds so far in which the
run was suspicious."""
_PATIENCE_S = 6.0
"""Seconds that a request for a diagnosis waits for the evidence of other machines."""
_FIRST_HEALTHY_ROUND_S, _HEALTHY_ROUND_PERIOD_S = 20.0, 300.0
"""Seconds of training before the first round of a healthy run, and between two such rounds."""


class EvidenceThread:
    """Runs one round of evidence collection at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self.evidence: Evidence | None = None
        """The evidence of the last complete round."""
        self.error: str | None = None
        """The exception of a round that failed; verdicts then do without evidence."""
        self._suspicious_rounds = 0
        self._ended_s = 0.0
        self._began_s = 0.0
        self._healthy_due_s: float | None = None
        self._requests: list[tuple[float, Future[dict[str, Any]]]] = []
        """(monotonic second of the request, its future answer)."""

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def diagnosis_requested(self) -> bool:
        return bool(self._requests)

    def request_diagnosis(self) -> Future[dict[str, Any]]:
        """Return a future that ``answer`` fulfils after a round that begins from now on."""
        future: Future[dict[str, Any]] = Future()
        self._requests.append((time.monotonic(), future))
        return future

    def start_if_due(
        self, *, suspicious: bool, training: bool, make_request: Callable[[], EvidenceRequest]
    ) -> None:
        """Start a round if one is due."""
        now_s = time.monotonic()
        if not suspicious:
            self._suspicious_rounds = 0
        if self.busy:
            return
        due = any(requested_s > self._began_s for requested_s, _ in self._requests)
        if suspicious:
            rounds = min(self._suspicious_rounds, len(_PAUSES_S) - 1)
            due = due or now_s - self._ended_s >= _PAUSES_S[rounds]
        elif training:
            if self._healthy_due_s is None:
                self._healthy_due_s = now_s + _FIRST_HEALTHY_ROUND_S
            due = due or now_s >= self._healthy_due_s
        if not due:
            return
        self._suspicious_rounds += suspicious
        self._healthy_due_s = now_s + _HEALTHY_ROUND_PERIOD_S
        self._began_s = now_s
        self._thread = threading.Thread(
            target=self._collect, args=(make_request(),), name="evidence", daemon=True
        )
        self._thread.start()

    def answer(
        self,
        make_diagnosis: Callable[[], Diagnosis],
        complete_since: Callable[[float], bool] | None,
    ) -> None:
        """Fulfil the requests that are older than the last complete round.

        A request waits some seconds for the other machines too, until ``complete_since`` it.
        """
        if self.busy or not self._requests:
            return
        late_s = time.monotonic() - _PATIENCE_S
        entries = [
            entry
            for entry in self._requests
            if entry[0] <= self._began_s
            and (entry[0] < late_s or complete_since is None or complete_since(entry[0]))
        ]
        due = [future for _, future in entries]
        self._requests = [entry for entry in self._requests if entry not in entries]
        if due:
            answer = {"ok": True, "diagnosis": make_diagnosis().to_document()}
            for future in due:
                future.set_result(answer)

    def close(self) -> None:
        """Refuse the open requests, without waiting for a round."""
        requests, self._requests = self._requests, []
        for _, future in requests:
            future.set_exception(ValueError("the run has just ended."))

    def _collect(self, request: EvidenceRequest) -> None:
        try:
            self.evidence = collect_evidence(request)
        except Exception as error:  # noqa: BLE001  (the top of the thread: verdicts do without)
            self.error = f"{type(error).__name__}: {error}"
        self._ended_s = time.monotonic()
