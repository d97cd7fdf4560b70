"""The kills and link cuts of a chaos storm on two machines, all chosen from one seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

PHASES = ("start", "training", "checkpoint", "pause", "stop")
CUT_PHASES = ("start", "training", "pause", "stop")
VICTIMS = (
    *((role, node) for node in (0, 1)
      for role in ("supervisor", "shim", "engine", "rank", "worker", "everything")),
    ("command", 0),
)  # fmt: skip
"""Role of the process that is killed, and its machine. The supervisor of machine 1 is the agent."""
HARMLESS = frozenset({"supervisor", "command"})
"""Roles whose death must not affect the training."""
FATAL = frozenset({"shim", "engine", "rank", "everything"})
"""Roles without which an attempt cannot continue."""
LONGEST_CUT_S = 40.0


@dataclass(frozen=True, kw_only=True)
class Strike:
    """One kill, or one cut of the link."""

    number: int
    phase: str
    """When it strikes. ``start``: the first start of a run, or a resume."""
    role: str
    """Whom SIGKILL hits, or ``link``."""
    node: int = 0
    cut_s: float = 0.0
    delay: float = 0.0
    """Fraction of the phase after which it strikes."""

    @property
    def is_cut(self) -> bool:
        return self.role == "link"

    @property
    def victim(self) -> str:
        return f"link for {self.cut_s:.0f} s" if self.is_cut else f"{self.role} {self.node}"


def plan_strikes(seed: int, kills: int, cuts: int) -> list[Strike]:
    """Choose all strikes in advance, kills and cuts in random order.

    Every phase is combined with every victim once before any combination is repeated.
    """
    chance = random.Random(seed)
    planned: list[tuple[str, str, int, float]] = []
    while len(planned) < kills:
        deck = [(phase, role, node, 0.0) for phase in PHASES for role, node in VICTIMS
                if role != "command" or phase != "training"]  # fmt: skip
        chance.shuffle(deck)
        planned += deck[: kills - len(planned)]
    phases: list[str] = []
    for _ in range(cuts):
        phases = phases or chance.sample(CUT_PHASES, len(CUT_PHASES))
        planned.append((phases.pop(), "link", 1, chance.uniform(1.0, LONGEST_CUT_S)))
    chance.shuffle(planned)
    return [
        Strike(number=n, phase=phase, role=role, node=node, cut_s=cut_s, delay=chance.random())
        for n, (phase, role, node, cut_s) in enumerate(planned, 1)
    ]


def parse_strikes(text: str) -> list[Strike]:
    """Return the strikes in a text such as ``stop everything 0, training link 30``."""
    strikes = []
    for number, words in enumerate(text.split(","), 1):
        phase, role, value = words.split()
        is_cut = role == "link"
        assert phase in PHASES, phase
        assert is_cut or (role, int(value)) in VICTIMS, words
        strikes.append(
            Strike(
                number=number,
                phase=phase,
                role=role,
                node=1 if is_cut else int(value),
                cut_s=float(value) if is_cut else 0.0,
                delay=0.5,
            )
        )
    return strikes
