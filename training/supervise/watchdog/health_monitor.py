"""Judging in the loop: pulses, fold and evidence before the judge, from tick to tick."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ltui.training.config.run_spec import StallPolicy
from ltui.training.diagnosis.judge import Judgement, judge
from ltui.training.diagnosis.rules.judge_input import HealthHistory
from ltui.training.lifecycle.elastic_log import WorkerFailure
from ltui.training.lifecycle.queue_poller import QueuePoll
from ltui.training.state.record_fold import FoldState
from ltui.training.state.run_snapshot import Verdict
from ltui.training.supervise.watchdog.evidence_collector import EvidenceCollector


class HealthMonitor:
    """One attempt's judgements; remembers what the next one needs of the last."""

    def __init__(self, policy: StallPolicy, evidence: EvidenceCollector) -> None:
        self._policy = policy
        self._evidence = evidence
        self._health = HealthHistory()
        self._misjudged: str | None = None
        """The last mistake of the judge, so that each is logged once."""
        self._died: set[int] = set()
        """Ranks that were known to be dead before the run was told to end."""

    def judge(
        self,
        sight: QueuePoll,
        fold: FoldState,
        *,
        end_requested: bool,
        failures: Sequence[WorkerFailure] = (),
        gpu_verdicts: Sequence[Verdict] = (),
        cpu_delays: Mapping[int, float] | None = None,
    ) -> Judgement:
        """``end_requested``: ranks that die now, and had not before, died of nothing. ``devices``:
        what is wrong with the run's GPUs. ``delays``: how much ranks wait for a processor."""
        told = {
            **self._evidence.judging(sight, failures=failures),
            "devices": gpu_verdicts,
            "delays": cpu_delays,
        }
        try:
            judgement = self._judged(sight, fold, told)
        except Exception:
            # A mistake over evidence, which has a thousand forms, must not cost the run its
            # supervisor: pulses alone still tell who stands still.
            if told["evidence"] is None:
                raise
            text = traceback.format_exc()
            if text != self._misjudged:
                self._misjudged = text
                print(text, file=sys.stderr, flush=True)
            judgement = self._judged(sight, fold, {**told, "evidence": None, "closer": False})
        self._health = judgement.history
        return self._without_deaths_asked_for(judgement, end_requested)

    def _judged(self, sight: QueuePoll, fold: FoldState, told: dict[str, Any]) -> Judgement:
        return judge(
            time.monotonic_ns(),
            sight.pulses,
            self._policy,
            self._health,
            fold=fold,
            now_s=time.time(),
            **told,
        )

    def _without_deaths_asked_for(self, judgement: Judgement, end_requested: bool) -> Judgement:
        died = {r for v in judgement.verdicts if v.level == "dead" for r in v.culprits}
        if not end_requested:
            self._died = died
            return judgement
        if died <= self._died:
            return judgement
        verdicts = tuple(
            v for v in judgement.verdicts if v.level != "dead" or self._died >= {*v.culprits}
        )
        return replace(judgement, verdicts=verdicts)
