"""Judges the ranks of an attempt in every tick of the supervisor's loop."""

from __future__ import annotations

import sys
import traceback
from dataclasses import replace

from ltui.training.config.verdict_severity import VerdictLevel
from ltui.training.diagnosis.judge import Judgement, judge
from ltui.training.diagnosis.judge_input import HealthHistory, JudgeInput
from ltui.training.state.run_snapshot import Verdict


class HealthMonitor:
    """Judges one attempt, and keeps the history that the next judgement needs."""

    def __init__(self) -> None:
        self.history = HealthHistory()
        """The history of the last judgement, which is part of the next input."""
        self._last_error: str | None = None
        """The last exception of the judge, so that each is logged once."""
        self._dead_before_end: set[int] = set()
        """Ranks that were dead before the run was asked to end."""

    def judge(self, inputs: JudgeInput, *, end_requested: bool) -> Judgement:
        """Judge the ranks.

        ``end_requested`` means that the run was asked to end: ranks that die now are not reported.
        """
        judgement = self._judge_safely(inputs)
        self.history = judgement.history
        return self._without_requested_deaths(judgement, end_requested)

    def _judge_safely(self, inputs: JudgeInput) -> Judgement:
        """Judge again without evidence if the judge fails.

        Evidence takes very many forms. An error while judging it must not end the supervisor, and
        pulses alone still show which ranks make no progress.
        """
        try:
            return judge(inputs)
        except Exception:
            if inputs.evidence is None:
                raise
            text = traceback.format_exc()
            if text != self._last_error:
                self._last_error = text
                print(text, file=sys.stderr, flush=True)
            return judge(replace(inputs, evidence=None, evidence_expected=False))

    def _without_requested_deaths(self, judgement: Judgement, end_requested: bool) -> Judgement:
        """Remove verdicts on ranks that died because the run was asked to end."""
        if not end_requested:
            verdicts = judgement.verdicts
            dead = {r for v in verdicts if v.level == VerdictLevel.DEAD for r in v.culprits}
            self._dead_before_end = dead
            return judgement
        active, ended = map(self._not_requested, (judgement.verdicts, judgement.ended))
        return replace(judgement, verdicts=active, ended=ended)

    def _not_requested(self, verdicts: tuple[Verdict, ...]) -> tuple[Verdict, ...]:
        return tuple(
            v
            for v in verdicts
            if v.level != VerdictLevel.DEAD or self._dead_before_end >= {*v.culprits}
        )
