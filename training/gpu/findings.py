"""Plain-words findings about the GPUs of a run: what is wrong, since when, and whom it hits. Pure.

A fold: ``watch(state, gpus, ranks, now)`` takes one sample after the other; time is an argument.
A symptom becomes a finding once it has lasted as long as its kind asks, and stays one until it has
been gone for a while, so that nothing flickers on the screen.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ltui.training.gpu.symptoms import ERROR, Baseline, Symptom, symptoms
from ltui.training.state.run_snapshot import GpuSnapshot, RankSnapshot, Verdict
from ltui.training.state.verdict_kinds import GPU_KIND_PREFIX

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
"""By kind; the others are shown at once."""
CLEAR_DELAY_S = 5.0
CLEARED_AT_ONCE = frozenset({"unreadable", "xid"})
"""Kinds whose end is as certain as their beginning."""
GAP_S = 2.5
"""A symptom that isn't shown yet begins anew after this long without it."""
STALE_S = 5.0
"""An older reading is no evidence of now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    kind: str
    gpu: int
    """Index of the GPU or slice."""
    place: str
    """``GPU 3``."""
    text: str
    level: str
    """``warning`` or ``error``."""
    ranks: tuple[int, ...]
    since: float
    """Unix seconds when it began."""
    evidence: Mapping[str, Any]

    @property
    def sentence(self) -> str:
        return f"{self.place}: {self.text}"


@dataclass(frozen=True, slots=True)
class TrackedSymptom:
    """A symptom and its times, unix seconds."""

    symptom: Symptom
    label: str
    since: float
    last: float
    shown: bool


@dataclass(frozen=True, slots=True)
class FindingsState:
    seen: Mapping[tuple[str, int], TrackedSymptom] = field(default_factory=dict)
    baselines: Mapping[int, Baseline] = field(default_factory=dict)
    now: float = 0.0

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Those to show now: errors first, then the oldest."""
        shown = [_finding(seen, self.now) for seen in self.seen.values() if seen.shown]
        return tuple(sorted(shown, key=lambda f: (f.level != ERROR, f.since, f.gpu, f.kind)))


def update_findings(
    state: FindingsState, gpus: Sequence[GpuSnapshot], ranks: Iterable[RankSnapshot], now: float
) -> FindingsState:
    """The state after one more look at the GPUs."""
    current = [g for g in gpus if g.error or g.sampled_at is None or now - g.sampled_at <= STALE_S]
    baselines = {**state.baselines, **_baselines(state.baselines, current)}
    by_rank = {rank.rank: rank for rank in ranks}
    labels = {gpu.index: gpu.label or str(gpu.index) for gpu in gpus}
    seen = {key: old for key, old in state.seen.items() if now - old.last < _kept_s(old)}
    for symptom in symptoms(current, by_rank, baselines, now):
        key = (symptom.kind, symptom.gpu)
        before = state.seen.get(key) if symptom.kind in CLEARED_AT_ONCE else seen.get(key)
        if before is None and not symptom.starts_finding:
            continue
        since = _since(symptom, before, now)
        shown = (before is not None and before.shown) or now - since >= SHOW_DELAY_S.get(
            symptom.kind, 0.0
        )
        seen[key] = TrackedSymptom(
            symptom, labels.get(symptom.gpu, str(symptom.gpu)), since, now, shown
        )
    return replace(state, seen=seen, baselines=baselines, now=now)


def findings(
    history: Sequence[tuple[float, Sequence[GpuSnapshot]]],
    ranks: Iterable[RankSnapshot],
    now: float,
) -> tuple[Finding, ...]:
    """The findings after a history of ``(unix time, GPUs)``, with the ranks as they are now."""
    state, ranks = FindingsState(), tuple(ranks)
    for at, gpus in history:
        state = update_findings(state, gpus, ranks, at)
    if not history or history[-1][0] < now:
        state = update_findings(state, history[-1][1] if history else (), ranks, now)
    return state.findings


def verdict(finding: Finding) -> Verdict:
    """The finding as a run's picture carries it."""
    return Verdict(
        kind=f"{GPU_KIND_PREFIX}{finding.kind}",
        level="warning",
        culprits=finding.ranks,
        place=finding.place,
        cause=finding.text,
        began=finding.since,
        evidence=dict(finding.evidence),
    )


def verdicts(findings: Iterable[Finding]) -> tuple[Verdict, ...]:
    """The findings as a run's picture carries them; alike on several GPUs they are one."""
    alike: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        alike.setdefault((finding.kind, _wording(finding.text)), []).append(finding)
    return tuple(_joint(group) for group in alike.values())


def _wording(text: str) -> str:
    """The text without its figures, and without who uses the GPU."""
    return re.sub(r"\d+(\.\d+)?", "#", text.partition(" (")[0])


def _joint(group: Sequence[Finding]) -> Verdict:
    first = min(group, key=lambda f: f.gpu)
    place = _places([f.place.removeprefix("GPU ") for f in sorted(group, key=lambda f: f.gpu)])
    same = all(f.text == first.text for f in group)
    text = first.text if same else f"{first.text} (figures of {first.place}; similar on the others)"
    return replace(
        verdict(first),
        culprits=tuple(sorted({rank for f in group for rank in f.ranks})),
        place=place,
        cause=f"{place}: {text}",
        # The history tells verdicts of one kind apart by their beginning.
        began=min(f.since for f in group) + first.gpu * 1e-6,
        evidence={
            **first.evidence,
            "gpus": sorted(f.gpu for f in group),
            "serious": any(f.level == ERROR for f in group),
        },
    )


def _places(labels: Sequence[str]) -> str:
    """``GPU 3``, ``GPUs 0-3, 5``; slices are named one by one."""
    if len(labels) == 1:
        return f"GPU {labels[0]}"
    parts: list[str] = []
    run: list[int] = []

    def close() -> None:
        if run:
            parts.append(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)))
            run.clear()

    for label in labels:
        if not label.isdecimal():
            close()
            parts.append(label)
            continue
        if run and int(label) != run[-1] + 1:
            close()
        run.append(int(label))
    close()
    return f"GPUs {', '.join(parts)}"


def _kept_s(seen: TrackedSymptom) -> float:
    """How long a symptom outlives the last sample that showed it."""
    if seen.symptom.kind in CLEARED_AT_ONCE:
        return 0.0
    return CLEAR_DELAY_S if seen.shown else GAP_S


def _since(symptom: Symptom, before: TrackedSymptom | None, now: float) -> float:
    if symptom.kind == "xid":
        return float(symptom.evidence["at"])
    return now if before is None else before.since


def _finding(seen: TrackedSymptom, now: float) -> Finding:
    symptom = seen.symptom
    return Finding(
        kind=symptom.kind,
        gpu=symptom.gpu,
        place=f"GPU {seen.label}",
        text=symptom.text.replace("{age}", _age(now - seen.since)),
        level=symptom.level,
        ranks=symptom.ranks,
        since=seen.since,
        evidence=symptom.evidence,
    )


def _age(seconds: float) -> str:
    """``40 s``, ``3 min``, ``2 h``."""
    if seconds < 120:
        return f"{max(seconds, 0):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def _baselines(known: Mapping[int, Baseline], gpus: Sequence[GpuSnapshot]) -> dict[int, Baseline]:
    """First values of the counters; a counter that fell was begun anew by the driver."""
    fresh = {}
    for gpu in gpus:
        before = known.get(gpu.index, Baseline())
        ecc, up = before.ecc_uncorrected, before.nvlinks_up
        if gpu.ecc_uncorrected is not None and (ecc is None or gpu.ecc_uncorrected < ecc):
            ecc = gpu.ecc_uncorrected
        if gpu.nvlinks_up is not None and (up is None or gpu.nvlinks_up > up):
            up = gpu.nvlinks_up
        fresh[gpu.index] = Baseline(ecc, up)
    return fresh
