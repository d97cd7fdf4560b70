"""Ranks whose process was stopped from outside, by SIGSTOP or a debugger. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ltui.training.config.run_spec import VerdictLevel
from ltui.training.diagnosis.judge_input import (
    LIVE_STATES,
    PreparedInput,
    first_change_s,
    position_facts,
)
from ltui.training.diagnosis.verdict_words import verb, waiting_text
from ltui.training.state.run_snapshot import RankState, Verdict
from ltui.training.state.verdicts import VerdictKind

STOPPED_AFTER_S = 1.0
"""Seconds that a process must be stopped before it is reported: a debugger stops it briefly."""


def find_stopped_ranks(inputs: PreparedInput) -> tuple[int, ...]:
    """Return the ranks whose process has been stopped for longer than ``STOPPED_AFTER_S``."""
    return tuple(
        sorted(
            r
            for r in inputs.stopped_pids
            if r in inputs.silent_s
            or (
                inputs.states.get(r) in LIVE_STATES and inputs.still_s.get(r, 0.0) > STOPPED_AFTER_S
            )
        )
    )


def is_independent_of(verdict: Verdict, stopped: Iterable[int]) -> bool:
    """Return True if a verdict names a line or worker of ranks that are not stopped.

    Such a verdict is about a second fault, which the stopped processes do not explain.
    """
    line = verdict.evidence.get("frame") or verdict.evidence.get("worker")
    return bool(line and verdict.culprits and not set(verdict.culprits) & set(stopped))


def stopped_verdict(
    inputs: PreparedInput, stopped: tuple[int, ...], other_culprits: set[int]
) -> Verdict:
    """Return the verdict on stopped ranks.

    Other ranks without progress wait for them, unless they are ``other_culprits`` themselves.
    """
    waiting = tuple(
        sorted(
            r
            for r, s in inputs.states.items()
            if s is RankState.OK
            and r not in stopped
            and r not in other_culprits
            and inputs.still_s.get(r, 0.0) > STOPPED_AFTER_S
        )
    )
    pulses = inputs.pulses_of(stopped)
    phase = next((p.phase.label for p in pulses.values()), None)
    subject = inputs.ranks_text(stopped)
    if len(stopped) == 1:
        subject = f"the process of {subject}"
    cause = f"{subject} {verb(stopped, 'is', 'are')} stopped (SIGSTOP or a debugger)"
    if phase is not None:
        cause += f" in {phase} for {max(inputs.still_s[r] for r in pulses):.0f} s"
    cause += waiting_text(waiting, None, inputs.machines)
    pids = {r: inputs.stopped_pids[r] for r in stopped}
    return Verdict(
        kind=VerdictKind.STOPPED,
        level=VerdictLevel.STALLED,
        culprits=stopped,
        waiting=waiting,
        place=phase,
        cause=cause,
        remedy=_remedy(inputs, pids),
        confidence=1.0,
        began=first_change_s(pulses),
        evidence={
            "stopped_pids": {str(r): pid for r, pid in pids.items()},
            "still_s": inputs.still_facts((*stopped, *waiting)),
            "ranks": position_facts(pulses),
        },
    )


def _remedy(inputs: PreparedInput, pids: Mapping[int, int]) -> str:
    """Return the command that continues the processes, for each machine."""
    pids_by_machine: dict[str | None, list[str]] = {}
    for rank, pid in pids.items():
        pids_by_machine.setdefault(inputs.machines.get(rank), []).append(str(pid))
    commands = [
        f"kill -CONT {' '.join(group)}" + (f" on {machine}" if machine is not None else "")
        for machine, group in pids_by_machine.items()
    ]
    return f"To continue it: {'; '.join(commands)}"
