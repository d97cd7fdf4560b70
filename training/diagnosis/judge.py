"""Decide which rank is dead, stalled, slow or only waiting, and why. Pure.

``judge`` calls the rules in ``diagnosis/stalls`` and ``diagnosis/rules``. Pulses alone show which
ranks make no progress. With evidence, a verdict names the line, the process or the collective that
is at fault. A paused or finished run never stalls.

Call ``judge`` at least every two seconds, each time with the history that it returned. A longer gap
means that the supervisor itself was asleep, such as on a suspended laptop, and the ranks get their
whole budget again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from ltui.training.config.run_spec import BLOCKING_LEVELS, VerdictLevel, severity
from ltui.training.diagnosis.judge_input import (
    BEFORE_TRAINING,
    LIVE_STATES,
    HealthHistory,
    JudgeInput,
    PreparedInput,
    prepare,
    verdict_key,
)
from ltui.training.diagnosis.rules import early_warnings, slow_node, straggler
from ltui.training.diagnosis.rules.deaths import death_verdicts
from ltui.training.diagnosis.rules.stopped_processes import (
    find_stopped_ranks,
    is_independent_of,
    stopped_verdict,
)
from ltui.training.diagnosis.stalls.find_stalls import Stalls, find_stalls
from ltui.training.diagnosis.stalls.missing_ranks import machine_verdicts
from ltui.training.diagnosis.thresholds import slowest_step_s
from ltui.training.shared.record_types import STEP_PHASES, Phase
from ltui.training.state.run_snapshot import RankState, Verdict
from ltui.training.state.verdicts import VerdictKind

_STRAGGLING_S = 2.0
"""Seconds that a rank must straggle before it is reported."""
_EVIDENCE_ROUND_S = 0.9
"""Evidence that is complete this many seconds after a beginning has observed part of what began."""
_STRAGGLER_PATIENCE_S = 6.0
"""Seconds after which a straggler is reported without evidence of it."""
_EVIDENCE_LIFETIME_S = 60.0
"""Age in seconds up to which call sites in evidence are compared."""

_TRAINING_STATES = LIVE_STATES | {RankState.WAITING, RankState.STALLED}
_EXPLAINED_BY_DEATH = frozenset({
    VerdictKind.TRANSPORT, VerdictKind.UNKNOWN, VerdictKind.FINISHED_EARLY, VerdictKind.LEFT_EARLY,
    VerdictKind.UNEVEN, VerdictKind.RENDEZVOUS, VerdictKind.NODE_UNREACHABLE,
    VerdictKind.AGENT_KILLED, VerdictKind.AGENT_FROZEN,
})  # fmt: skip
"""Verdicts that the end of a rank causes among the ranks that are left."""
_EXPLAINS_DRIFT = frozenset(
    {VerdictKind.UNEVEN, VerdictKind.FINISHED_EARLY, VerdictKind.LEFT_EARLY}
)
"""Verdicts that replace a warning about drift."""


class Judgement(Struct, frozen=True, kw_only=True):
    """The result of one call of ``judge``."""

    states: Mapping[int, RankState]
    verdicts: tuple[Verdict, ...]
    """Active verdicts, the most severe first."""
    ended: tuple[Verdict, ...]
    """Verdicts that were active at the last call and are not any more, with ``ended`` set."""
    history: HealthHistory
    suspects: frozenset[int] = frozenset()
    """Ranks of which evidence is to be collected."""

    @property
    def is_blocked(self) -> bool:
        """Whether a rank is stalled or dead."""
        return any(v.level in BLOCKING_LEVELS and v.ended is None for v in self.verdicts)


def judge(inputs: JudgeInput) -> Judgement:
    """Return the state of every rank and what is wrong with the run."""
    prepared = prepare(inputs)
    verdicts = death_verdicts(prepared)
    stalls, stall_verdicts = _stalls(prepared)
    suspects = stalls.suspects
    verdicts += stall_verdicts
    kinds = {v.kind for v in verdicts}
    verdicts += [v for v in machine_verdicts(prepared) if v.kind not in kinds]
    straggling_since_ns: int | None = None
    if RankState.PAUSED not in prepared.states.values():
        prepared = replace(prepared, states=_final_states(prepared, verdicts, stalls.waiting))
        slowness, straggling_since_ns, straggler_suspects = _slowness(prepared, verdicts)
        verdicts += slowness
        suspects |= straggler_suspects
    verdicts += _early_warnings(prepared, verdicts)
    drift, drift_ns = _drift(prepared, verdicts)
    verdicts += drift
    verdicts.sort(key=lambda v: severity(v.level))
    history = prepared.history
    verdicts = [_with_machine(prepared, v) for v in verdicts]
    current = tuple(_with_beginning(v, history, inputs.now_s) for v in verdicts)
    active = {verdict_key(v): v for v in current}
    return Judgement(
        states=prepared.states,
        verdicts=current,
        ended=_ended_verdicts(history, active, inputs.now_s),
        suspects=suspects,
        history=_next_history(prepared, active, drift_ns, straggling_since_ns),
    )


def _stalls(inputs: PreparedInput) -> tuple[Stalls, list[Verdict]]:
    """Return the stalls, and the verdicts that neither a stopped process nor a death explains.

    In a paused run only stopped processes are reported.
    """
    paused = RankState.PAUSED in inputs.states.values()
    stalls = Stalls() if paused else find_stalls(inputs, slowest_step_s(inputs.fold))
    stopped = find_stopped_ranks(inputs)
    independent = [v for v in stalls.verdicts if not stopped or is_independent_of(v, stopped)]
    verdicts = []
    if stopped:
        other_culprits = {r for v in independent for r in v.culprits}
        verdicts.append(stopped_verdict(inputs, stopped, other_culprits))
    if RankState.DEAD in inputs.states.values():
        independent = [
            v
            for v in independent
            if v.level == VerdictLevel.STALLED and v.kind not in _EXPLAINED_BY_DEATH
        ]
    return stalls, verdicts + independent


def _final_states(
    inputs: PreparedInput, verdicts: Sequence[Verdict], waiting: frozenset[int]
) -> dict[int, RankState]:
    """Return the states of ranks according to the verdicts."""
    states = dict(inputs.states)
    live = set(inputs.alive)
    stopped = {r for v in verdicts if v.kind == VerdictKind.STOPPED for r in v.culprits}
    states.update(dict.fromkeys(stopped & inputs.silent_s.keys(), RankState.STALLED))
    gone = {r for v in verdicts if v.kind == VerdictKind.NODE_GONE for r in v.culprits}
    states.update(dict.fromkeys(gone, RankState.DEAD))
    if verdicts and verdicts[0].level == VerdictLevel.DEAD:
        held_up = {r for r in live if inputs.still_s.get(r, 0.0) > inputs.policy.floor_s}
        states.update(dict.fromkeys(held_up, RankState.WAITING))
    states.update(dict.fromkeys(live & waiting, RankState.WAITING))
    for verdict in verdicts:
        if verdict.level != VerdictLevel.DEAD:
            states.update(dict.fromkeys(live.intersection(verdict.waiting), RankState.WAITING))
    for verdict in verdicts:
        if verdict.level == VerdictLevel.STALLED:
            stalled = verdict.culprits or (() if verdict.nodes else verdict.waiting)
            states.update(dict.fromkeys(live.intersection(stalled), RankState.STALLED))
    return states


def _slowness(
    inputs: PreparedInput, verdicts: Sequence[Verdict]
) -> tuple[list[Verdict], int | None, frozenset[int]]:
    """Return the verdict on a slow machine, a straggler or slow data, once it lasts.

    Return also since when a rank straggles, and the ranks of which evidence is to be collected.
    """
    kinds = {v.kind for v in verdicts}
    if any(v.level in BLOCKING_LEVELS for v in verdicts):
        return [], None, frozenset()
    since_ns = inputs.history.straggling_since_ns or inputs.now_ns
    if VerdictKind.STRAGGLER in kinds:
        return [], since_ns, frozenset()
    spans = straggler.recent_spans(inputs)
    slow_machine = slow_node.slow_node_verdict(inputs, spans)
    if slow_machine is not None:
        lasts = inputs.now_ns - since_ns > _STRAGGLING_S * 1e9
        return [slow_machine] if lasts else [], since_ns, frozenset()
    current = straggler.find_straggler(inputs, spans)
    if current is None:
        reported = inputs.history.active_of(VerdictKind.STRAGGLER)
        if reported is not None and straggler.still_straggles(inputs, reported.culprits[0]):
            return [reported], since_ns, frozenset(reported.culprits)
        if kinds & {VerdictKind.SLOW_DATA, VerdictKind.SLOW_STEP}:
            return [], None, frozenset()
        slow_data = slow_node.slow_data_verdict(inputs)
        return [] if slow_data is None else [slow_data], None, frozenset()
    evidence = inputs.evidence
    began_ns = since_ns + _EVIDENCE_ROUND_S * 1e9
    if evidence is not None and evidence.taken_of(current.subject) <= began_ns:
        evidence = None
    lasted_s = (inputs.now_ns - since_ns) / 1e9
    need_not_wait = (
        evidence is not None or not inputs.evidence_expected or lasted_s > _STRAGGLER_PATIENCE_S
    )
    suspects = frozenset(current.ranks)
    if lasted_s <= _STRAGGLING_S or not need_not_wait:
        return [], since_ns, suspects
    rank_evidence = evidence.ranks.get(current.subject) if evidence is not None else None
    return [straggler.straggler_verdict(inputs, current, rank_evidence)], since_ns, suspects


def _early_warnings(inputs: PreparedInput, verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return warnings about the loss, the machines and the call sites of collectives."""
    kinds = {v.kind for v in verdicts}
    warnings = [early_warnings.loss_warning(inputs.fold, inputs.machines, inputs.checkpoints)]
    if inputs.alive:
        warnings += [w for w in _host_warnings(inputs) if w.kind not in kinds]
        warnings += early_warnings.clock_jump_warnings(inputs)
    evidence = inputs.evidence
    recent = evidence and inputs.now_ns - evidence.taken_ns < _EVIDENCE_LIFETIME_S * 1e9
    if evidence and recent and VerdictKind.MISMATCH not in kinds:
        warnings.append(early_warnings.divergence_warning(evidence.ranks, inputs.machines))
    return [warning for warning in warnings if warning is not None]


def _host_warnings(inputs: PreparedInput) -> list[Verdict]:
    """Return warnings about the memory of each machine."""
    hosts = {} if inputs.host is None else {0: inputs.host}
    names = {n.node: n.name for n in inputs.nodes} if inputs.machines else {}
    warnings = []
    for node, host in {**hosts, **inputs.hosts}.items():
        if node in inputs.lost:
            continue
        for rule in (early_warnings.memory_warning, early_warnings.shared_memory_warning):
            if (warning := rule(host, names.get(node))) is None:
                continue
            if names:
                # The history tells verdicts of one kind apart by when they began.
                began = None if inputs.now_s is None else inputs.now_s + 1e-6 * node
                warning = replace(warning, nodes=(node,), began=began)
            warnings.append(warning)
    return warnings


def _drift(
    inputs: PreparedInput, verdicts: Sequence[Verdict]
) -> tuple[list[Verdict], tuple[int, int] | None]:
    """Return the warning about a drift that lasts.

    Return also when the ranks began to drift and when they were last observed to drift, in ns.
    """
    active = [v for v in inputs.history.active.values() if v.kind == VerdictKind.DRIFT]
    drifting = early_warnings.find_drifting_ranks(inputs, [r for v in active for r in v.culprits])
    earlier_ns = inputs.history.drift_ns
    explained = any(v.kind in _EXPLAINS_DRIFT for v in verdicts)
    kept_ns = early_warnings.DRIFT_KEPT_S * 1e9
    if drifting is None and earlier_ns is not None and inputs.now_ns - earlier_ns[1] < kept_ns:
        return ([] if explained else active), earlier_ns
    if not drifting:
        return [], None
    since_ns = earlier_ns[0] if earlier_ns is not None else inputs.now_ns
    lasts = inputs.now_ns - since_ns > early_warnings.DRIFT_S * 1e9
    warnings = [early_warnings.drift_warning(inputs, drifting)] if lasts and not explained else []
    return warnings, (since_ns, inputs.now_ns)


def _with_machine(inputs: PreparedInput, verdict: Verdict) -> Verdict:
    """Add the machine to a verdict on several ranks if they are all that trains there."""
    nodes = {inputs.node_of.get(r) for r in verdict.culprits}
    progress = (VerdictLevel.STALLED, VerdictLevel.SLOW)
    if not inputs.machines or len(nodes) != 1 or verdict.nodes or verdict.level not in progress:
        return verdict
    (node,) = nodes
    culprits = {*verdict.culprits}
    training = {r for r, s in inputs.states.items() if s in _TRAINING_STATES}
    there = {r for r in training if inputs.node_of.get(r) == node}
    if node is None or len(culprits) < 2 or there - culprits or training <= culprits:
        return verdict
    return replace(verdict, nodes=(node,))


def _with_beginning(verdict: Verdict, history: HealthHistory, now_s: float | None) -> Verdict:
    """Set when a verdict began: as in the history, else by the pulse, else now."""
    earlier = history.active.get(verdict_key(verdict))
    if earlier is not None and earlier.began is not None:
        return replace(verdict, began=earlier.began)
    return verdict if verdict.began is not None else replace(verdict, began=now_s)


def _ended_verdicts(
    history: HealthHistory, active: Mapping[str, Verdict], now_s: float | None
) -> tuple[Verdict, ...]:
    """Return the verdicts of the last call that are not active any more.

    A warning whose kind is still active for other ranks does not count as ended, nor does a verdict
    about machines of which one still has the problem.
    """
    return tuple(
        replace(v, ended=now_s)
        for key, v in history.active.items()
        if key not in active and not any(_continues(v, other) for other in active.values())
    )


def _continues(earlier: Verdict, current: Verdict) -> bool:
    """Return True if two verdicts are about one problem of other ranks or more machines."""
    if earlier.kind != current.kind:
        return False
    if earlier.nodes or current.nodes:
        return bool({*earlier.nodes} & {*current.nodes})
    return earlier.level == VerdictLevel.WARNING


def _next_history(
    inputs: PreparedInput,
    active: dict[str, Verdict],
    drift_ns: tuple[int, int] | None,
    straggling_since_ns: int | None,
) -> HealthHistory:
    """Return the history for the next call: durations of phases and progress of evaluations too."""
    history = inputs.history
    longest_s = dict(history.longest_s)
    evaluated = dict(history.evaluated)
    places: dict[int, tuple[Phase, int]] = {}
    for rank, pulse in inputs.pulses.items():
        if pulse is None:
            continue
        places[rank] = (pulse.phase, pulse.changed_ns)
        phase, since_ns = history.places.get(rank, places[rank])
        if phase in (Phase.VALIDATION, Phase.TEST) and pulse.phase is phase:
            evaluated[rank] = pulse.batch + 1
        if pulse.changed_ns > since_ns and phase not in STEP_PHASES | BEFORE_TRAINING:
            took_s = (pulse.changed_ns - max(since_ns, history.forgiven_ns)) / 1e9
            longest_s[phase] = max(longest_s.get(phase, 0.0), took_s)
    return replace(
        history,
        judged_ns=inputs.now_ns,
        judged_s=inputs.now_s,
        lost=frozenset(inputs.lost),
        clock_skews_s={**history.clock_skews_s, **early_warnings.clock_skews_s(inputs.nodes)},
        active=active,
        places=places,
        longest_s=longest_s,
        evaluated=evaluated,
        drift_ns=drift_ns,
        straggling_since_ns=straggling_since_ns,
    )
