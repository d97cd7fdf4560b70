"""Stall rule: ranks wait while machines with other ranks cannot be observed. Pure.

Old pulses of a machine that does not answer say nothing about its ranks. So if no observed rank is
at fault, the ranks that make no progress wait for that machine.
"""

from __future__ import annotations

from collections.abc import Sequence

from ltui.training.config.run_spec import VerdictLevel
from ltui.training.diagnosis.judge_input import MAY_BE_LATE, PreparedInput, position_facts
from ltui.training.diagnosis.stalls.stall_case import StallCase
from ltui.training.diagnosis.verdict_words import collective_text, machines_text, verb
from ltui.training.state.run_snapshot import NodeSnapshot, NodeState, Verdict
from ltui.training.state.verdicts import VerdictKind

_UNREACHABLE_S = 7.0
"""Seconds without a report after which a machine is reported as unreachable. After a cut of five
seconds TCP sends again 6.2 s after the loss: it waits 0.2 s, then twice as long each time."""
_UNEXPLAINED_S = 8.0
"""Seconds after which it is reported that nothing is known about a silent machine's reason."""
_AGENT_LOST_S = 3.0
"""Seconds without a report after which a dead or frozen agent is reported. A dead one is normally
replaced within a second."""
_LOSSES = {
    VerdictKind.NODE_GONE: (
        ("is gone{}, and its ranks count as lost", "are gone{}, and their ranks count as lost"),
        "Resume the run from its last checkpoint, with that machine or without it.",
    ),
    VerdictKind.NODE_UNREACHABLE: (
        (
            "does not answer{}: the link is cut or it is down",
            "do not answer{}: the link is cut or they are down",
        ),
        "Check the link and whether {} runs (ping, ssh). The run continues by itself when the link"
        " is back, unless the ranks' own connections have failed.",
    ),
    VerdictKind.AGENT_KILLED: (
        ("answers, but its agent has ended{}", "answer, but their agents have ended{}"),
        "Its log says why it ended (logs/supervisor.log in its folder below $LTUI_HOME/nodes on"
        " {}); the machine can join again.",
    ),
    VerdictKind.AGENT_FROZEN: (
        (
            "answers, but its agent does not run, stopped or starved{}",
            "answer, but their agents do not run, stopped or starved{}",
        ),
        "Look for the agent on {} with `ps -o pid,stat,args -C ltui`; if it is stopped (state T),"
        " continue it with `kill -CONT PID`.",
    ),
}
"""kind -> what is wrong with one machine and with several, and the remedy."""


def unobserved_ranks(case: StallCase) -> list[Verdict] | None:
    """Blame the lost machines if observed ranks wait and none of them is at fault.

    Without evidence as well, because by pulses alone a rank that waits for a lost machine looks
    like one that is stuck.
    """
    inputs = case.inputs
    unfinished = any({*n.ranks} - {*inputs.ended} for n in inputs.lost.values())
    if not unfinished or (case.located and not case.waiting):
        return None
    waiting = tuple(sorted(case.overdue))
    if not waiting:
        return []
    where = None
    if case.unfinished is not None:
        entry = next(iter(case.unfinished.at.values()), None)
        where = collective_text(entry) if entry is not None else None
    return machine_verdicts(inputs, waiting, where)


def machine_verdicts(
    inputs: PreparedInput, waiting: tuple[int, ...] = (), where: str | None = None
) -> list[Verdict]:
    """Return one verdict for each reason why machines do not report.

    ``waiting`` are the ranks elsewhere that wait in ``where``. Without them it is a warning,
    because a run may do without the connection between its machines' agents.
    """
    by_kind: dict[VerdictKind, list[NodeSnapshot]] = {}
    for _, node in sorted(inputs.lost.items()):
        if (kind := _kind(node)) is not None:
            by_kind.setdefault(kind, []).append(node)
    return [_verdict(inputs, kind, nodes, waiting, where) for kind, nodes in by_kind.items()]


def _kind(node: NodeSnapshot) -> VerdictKind | None:
    """Return why the machine does not report; None if that is too short to say."""
    age_s = node.link_age_s
    kind, after_s = {
        NodeState.GONE: (VerdictKind.NODE_GONE, 0.0),
        NodeState.UNREACHABLE: (VerdictKind.NODE_UNREACHABLE, _UNREACHABLE_S),
        NodeState.AGENT_DEAD: (VerdictKind.AGENT_KILLED, _AGENT_LOST_S),
        NodeState.FROZEN: (VerdictKind.AGENT_FROZEN, _AGENT_LOST_S),
    }.get(node.state, (VerdictKind.NODE_UNREACHABLE, _UNEXPLAINED_S))
    return kind if age_s is None or age_s >= after_s else None


def _verdict(
    inputs: PreparedInput,
    kind: VerdictKind,
    nodes: Sequence[NodeSnapshot],
    waiting: tuple[int, ...],
    where: str | None,
) -> Verdict:
    names = [n.name for n in nodes]
    ages_s = [n.link_age_s for n in nodes if n.link_age_s is not None]
    lost = sorted(r for n in nodes for r in n.ranks if r not in inputs.ended)
    gone = kind is VerdictKind.NODE_GONE
    level = VerdictLevel.STALLED if waiting else VerdictLevel.WARNING
    predicates, remedy = _LOSSES[kind]
    age = f" (no report for {max(ages_s):.0f} s)" if ages_s else ""
    state = predicates[len(nodes) > 1].format(age)
    cause = f"{machines_text(names)} {state}"
    if waiting:
        wait, place = verb(waiting, "waits", "wait"), f" in {where}" if where else ""
        cause = (
            f"{inputs.ranks_text(waiting)} {wait}{place} for {machines_text(names)}, which {state}"
        )
    if lost and not gone:
        cause += f"; {inputs.ranks_text(lost)} cannot be observed"
    reason_known = all(n.state not in MAY_BE_LATE for n in nodes)
    earlier = inputs.history.active_of(kind)
    began = inputs.now_s - max(ages_s) if inputs.now_s is not None and ages_s else inputs.now_s
    if earlier is not None and {*earlier.nodes} & {n.node for n in nodes}:
        began = earlier.began
    return Verdict(
        kind=kind,
        level=VerdictLevel.DEAD if gone else level,
        nodes=tuple(n.node for n in nodes),
        culprits=tuple(lost) if gone else (),
        waiting=waiting,
        place=machines_text(names),
        cause=cause,
        remedy=remedy.format(machines_text(names)),
        confidence=0.9 if reason_known else 0.6,
        began=began,
        evidence={
            "link_age_s": {n.name: n.link_age_s for n in nodes},
            "notes": {n.name: n.note for n in nodes if n.note is not None},
            "still_s": inputs.still_facts(waiting),
            "ranks": position_facts(inputs.pulses_of(waiting)),
        },
    )
