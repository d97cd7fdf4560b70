"""Recorded evidence of real faults, ``recorded/*.json``, from runs of the fault catalogue.

    python -m tests.diagnosis.recordings DIAGNOSIS.json NAME

makes a recording from a stored diagnosis: its evidence, shortened, without the paths of a machine.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ltui.training.diagnosis.evidence import Diagnosis, Evidence
from ltui.training.diagnosis.judge import Judgement
from ltui.training.json_codec import from_json, to_json
from ltui.training.shared.record_types import Outcome, Phase, PulseState
from ltui.training.state.record_fold import FoldState, fold
from tests.diagnosis.machines import at
from tests.state.records import SECOND, pulse, steps

FOLDER = Path(__file__).with_name("recorded")
_LABELS = {phase.label: phase for phase in Phase}


@functools.cache
def load(name: str) -> Evidence:
    return from_json(Evidence, json.loads((FOLDER / f"{name}.json").read_text()))


def pulses_of(evidence: Evidence) -> dict[int, PulseState | None]:
    """Return the pulses at the time when the evidence was collected."""
    pulses: dict[int, PulseState | None] = {}
    for rank, seen in evidence.ranks.items():
        if seen.phase is None:
            pulses[rank] = None
            continue
        still_s = seen.still_s or 0.0
        pulses[rank] = dataclasses.replace(
            pulse(rank, _LABELS[seen.phase], 0.0),
            pid=seen.pid or 0,
            world_size=len(evidence.ranks),
            epoch=seen.epoch or 0,
            batch=seen.batch or 0,
            global_step=seen.global_step or 0,
            changed_ns=evidence.taken_ns - round(still_s * 1e9),
            outcome=Outcome[(seen.outcome or "running").upper()],
        )
    return pulses


def judged(
    evidence: Evidence,
    later_s: float = 0.5,
    batches: int = 20,
    planned: Mapping[int, int] | None = None,
    **more: Any,
) -> Judgement:
    """Judge ``later_s`` after the evidence was collected, in a run with steps of 0.1 s.

    ``planned``: rank -> batches that Lightning planned for an epoch; then the batches that each
    rank completed are those of the evidence.
    """
    state = FoldState()
    for rank in evidence.ranks if batches else ():
        state = fold(state, rank, steps(batches, 0.1))
    for rank, count in (planned or {}).items():
        rank_fold = replace(
            state.ranks[rank],
            plan={"batches_per_epoch": count},
            epoch_batches=evidence.ranks[rank].epoch_batches,
        )
        state = replace(state, ranks={**state.ranks, rank: rank_fold})
    return at(
        evidence.taken_ns / SECOND + later_s,
        pulses_of(evidence),
        fold=state,
        evidence=evidence,
        wall_s=evidence.taken_at + later_s,
        **more,
    )


def _anywhere(text: str) -> str:
    text = re.sub(r'"[^"]*/site-packages/', '"/env/lib/python3/site-packages/', text)
    text = re.sub(r'"[^"]*/lib/python3\.\d+/', '"/usr/lib/python3.11/', text)
    text = re.sub(r'"[^"]*/ltui/training/', '"/home/user/.ltui/rank-side/0/ltui/training/', text)
    text = re.sub(r'"[^"]*/tests/faults/scripts/', '"/home/user/project/', text)
    return re.sub(r'"host": "[^"]*"', '"host": "box"', text)


def _shortened(evidence: Evidence) -> Evidence:
    ranks = {
        r: replace(
            e,
            collectives=tuple(replace(c, frames=()) for c in e.collectives[-12:]),
            stacks=tuple(
                replace(s, frames=s.frames[:34] + s.frames[-2:]) for s in e.stacks if s.main
            ),
            earlier_stacks=tuple(replace(s, frames=s.frames[:20]) for s in e.earlier_stacks),
            log_tail=(),
        )
        for r, e in evidence.ranks.items()
    }
    return replace(evidence, ranks=ranks)


def main(source: str, name: str) -> None:
    kept = Diagnosis.from_document(json.loads(Path(source).read_text()))
    assert kept.evidence is not None
    text = json.dumps(to_json(_shortened(kept.evidence)))
    (FOLDER / f"{name}.json").write_text(_anywhere(text) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
