"""Findings about the GPUs of a run: the problem, its beginning and the affected ranks. Pure.

A fold: ``watch(state, gpus, ranks, now)`` takes one sample after the other; time is an argument.
A symptom becomes a finding after the delay of its kind, and stays one until it has been absent for
a while, so that nothing flickers on the screen.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ltui.training.gpu.symptoms import ERROR, Baseline, Symptom, symptoms
from ltui.training.state.run_snapshot import GpuSnapshot, RankSnapshot, Verdict
from ltui.training.state.verdicts import GPU_KIND_PREFIX

SHOW_DELAY_S = {
    "waiting": 20.0,
    "thermal": 2.0,
    "power_brake": 2.0,
    "memory_full": 3.0,
    "slow_clock": 10.0,
    "pcie_width": 20.0,
    "pcie_generation": 20.0,
    "unseen": 10.0,
}
"""Seconds that a symptom must last before it is shown, by kind. Other kinds are shown at once."""
CLEAR_DELAY_S = 5.0
"""Seconds without its symptom after which a finding ends."""
CLEARED_AT_ONCE = frozenset({"unreadable", "xid"})
"""Kinds that end immediately, because their end is as certain as their beginning."""
GAP_S = 2.5
"""Seconds without a symptom, not shown yet, after which its delay restarts."""
STALE_S = 5.0
"""Age in seconds from which a reading is ignored."""


class Finding(Struct, frozen=True, kw_only=True):
    """A problem of one GPU to show to the user."""

    kind: str
    gpu: int
    """Index of the GPU or MIG device."""
    place: str
    """Displayed name, such as ``GPU 3``."""
    text: str
    level: str
    """``warning`` or ``error``."""
    ranks: tuple[int, ...]
    since: float
    """Unix seconds when it began."""
    evidence: Mapping[str, Any]

    @property
    def sentence(self) -> str:
        """Place and text."""
        return f"{self.place}: {self.text}"


class TrackedSymptom(Struct, frozen=True):
    """A symptom with its times in unix seconds."""

    symptom: Symptom
    since: float
    last: float
    shown: bool


class FindingsState(Struct, frozen=True):
    """State of the fold after a sample."""

    tracked: Mapping[tuple[str, int], TrackedSymptom] = field(default_factory=dict)
    baselines: Mapping[int, Baseline] = field(default_factory=dict)
    now: float = 0.0

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Findings to show now: errors first, then by age."""
        shown = [_finding(symptom, self.now) for symptom in self.tracked.values() if symptom.shown]
        return tuple(sorted(shown, key=lambda f: (f.level != ERROR, f.since, f.gpu, f.kind)))


def update_findings(
    state: FindingsState, gpus: Sequence[GpuSnapshot], ranks: Iterable[RankSnapshot], now: float
) -> FindingsState:
    """Return the state after another sample of the GPUs."""
    current = [g for g in gpus if g.error or g.sampled_at is None or now - g.sampled_at <= STALE_S]
    baselines = {**state.baselines, **_baselines(state.baselines, current)}
    by_rank = {rank.rank: rank for rank in ranks}
    tracked = {key: old for key, old in state.tracked.items() if now - old.last < _expiry_s(old)}
    for symptom in symptoms(current, by_rank, baselines, now):
        key = (symptom.kind, symptom.gpu.index)
        before = (state.tracked if symptom.kind in CLEARED_AT_ONCE else tracked).get(key)
        if before is None and not symptom.starts_finding:
            continue
        since = _since(symptom, before, now)
        shown = (before is not None and before.shown) or now - since >= SHOW_DELAY_S.get(
            symptom.kind, 0.0
        )
        tracked[key] = TrackedSymptom(symptom, since, now, shown)
    return replace(state, tracked=tracked, baselines=baselines, now=now)


def verdicts(findings: Iterable[Finding]) -> tuple[Verdict, ...]:
    """Convert findings to verdicts; similar findings of several GPUs become one verdict."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.kind, _text_pattern(finding.text)), []).append(finding)
    return tuple(_merge(group) for group in groups.values())


def _text_pattern(text: str) -> str:
    """Return the text without its numbers and without the user of the GPU."""
    return re.sub(r"\d+(\.\d+)?", "#", text.partition(" (")[0])


def _merge(group: Sequence[Finding]) -> Verdict:
    first = min(group, key=lambda f: f.gpu)
    place = _places([f.place.removeprefix("GPU ") for f in sorted(group, key=lambda f: f.gpu)])
    all_equal = all(f.text == first.text for f in group)
    text = (
        first.text
        if all_equal
        else f"{first.text} (figures of {first.place}; similar on the others)"
    )
    return Verdict(
        kind=f"{GPU_KIND_PREFIX}{first.kind}",
        level="warning",
        culprits=tuple(sorted({rank for f in group for rank in f.ranks})),
        place=place,
        cause=f"{place}: {text}",
        # The history distinguishes verdicts of one kind by their beginning.
        began=min(f.since for f in group) + first.gpu * 1e-6,
        evidence={
            **first.evidence,
            "gpus": sorted(f.gpu for f in group),
            "serious": any(f.level == ERROR for f in group),
        },
    )


def _places(labels: Sequence[str]) -> str:
    """Return a text such as ``GPU 3`` or ``GPUs 0-3, 5``; MIG devices are listed one by one."""
    if len(labels) == 1:
        return f"GPU {labels[0]}"

    def series(place: tuple[int, str]) -> object:
        """Return the distance of a number to its place, which is equal within a range."""
        number, label = place
        return int(label) - number if label.isdecimal() else label

    parts = []
    for _, places in groupby(enumerate(labels), series):
        run = [label for _, label in places]
        parts.append(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(run))
    return f"GPUs {', '.join(parts)}"


def _expiry_s(tracked: TrackedSymptom) -> float:
    """Return the seconds that a symptom is kept after the last sample that showed it."""
    if tracked.symptom.kind in CLEARED_AT_ONCE:
        return 0.0
    return CLEAR_DELAY_S if tracked.shown else GAP_S


def _since(symptom: Symptom, before: TrackedSymptom | None, now: float) -> float:
    if symptom.kind == "xid":
        return float(symptom.evidence["at"])
    return now if before is None else before.since


def _finding(tracked: TrackedSymptom, now: float) -> Finding:
    symptom, gpu = tracked.symptom, tracked.symptom.gpu
    return Finding(
        kind=symptom.kind,
        gpu=gpu.index,
        place=f"GPU {gpu.label or gpu.index}",
        text=symptom.text.replace("{age}", _age(now - tracked.since)),
        level=symptom.level,
        ranks=gpu.ranks,
        since=tracked.since,
        evidence=symptom.evidence,
    )


def _age(seconds: float) -> str:
    """Return a duration such as ``40 s``, ``3 min`` or ``2 h``."""
    if seconds < 120:
        return f"{max(seconds, 0):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def _baselines(
    previous: Mapping[int, Baseline], gpus: Sequence[GpuSnapshot]
) -> dict[int, Baseline]:
    """Return the first values of the counters. A counter that decreased was reset by the driver."""
    updated = {}
    for gpu in gpus:
        before = previous.get(gpu.index, Baseline())
        ecc, links_up = before.ecc_uncorrected, before.nvlinks_up
        if gpu.ecc_uncorrected is not None and (ecc is None or gpu.ecc_uncorrected < ecc):
            ecc = gpu.ecc_uncorrected
        if gpu.nvlinks_up is not None and (links_up is None or gpu.nvlinks_up > links_up):
            links_up = gpu.nvlinks_up
        updated[gpu.index] = Baseline(ecc, links_up)
    return updated
