"""Rows of the rank table of a run on several machines: machines, and the ranks of some. Pure.

A healthy machine is one row. The machine with the worst rank stands first, and its ranks are
listed below it, the worst one first.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property

from msgspec import Struct, field
from msgspec.structs import replace

from ltui.app.live.frame import Frame
from ltui.app.presentation.machines import (
    NO_REPORT,
    NOT_REPORTING,
    QUIET_STATES,
    machine_names,
    machine_note,
    machine_utilisation,
    rank_range,
    ranks_by_machine,
    report_age_text,
)
from ltui.app.presentation.run_view import (
    RankVerdicts,
    rank_metrics,
    rank_row,
    rank_state,
    rank_verdicts,
)
from ltui.app.state_words import machine_state_word, open_verdicts
from ltui.training.config.run_spec import BLOCKING_LEVELS
from ltui.training.state.run_snapshot import LIVE, NodeSnapshot, NodeState, RankSnapshot, RankState
from ltui.widgets import formats
from ltui.widgets.columns import Column, LazyRows
from ltui.widgets.sanitise import clean_name
from ltui.widgets.tone import Tone
from ltui.widgets.view_models import Cell, RankMetric, RankRow

MACHINE_KEY, RANK_KEY = "n", "r"
"""First letters of the keys of rows."""
MAX_PROBLEM_ROWS = 16
"""Maximum number of ranks that are listed below a folded machine because they have a problem."""
FOLDED, UNFOLDED = "+", "-"
"""Signs before the name of a machine. Below a folded one only ranks with a problem are listed."""
SIMILAR_STEP_TIMES = 1.1
"""The slowest rank of a machine is named if its steps take at least this many times as long as
those of the fastest."""

_STEP_TIME = Column(key="step_s", title="slowest step", width=14, right=True, importance=3)
_GPU = Column(key="gpu", title="GPU", width=5, right=True, importance=3, optional=True)
_REPORT = Column(key="report", title="last report", width=11, right=True, importance=3)

_NO_REPORT = Cell(text=NO_REPORT, tone=Tone.DIM)
_RANK_SEVERITY = {"DEAD": 5, "STALLED": 4, "slow": 2, "waiting": 1}
"""Severity of a rank by the word for its state; other states are no problem of the rank itself."""
_MACHINE_SEVERITY = {
    NodeState.GONE: 5,
    NodeState.AGENT_DEAD: 5,
    NodeState.UNREACHABLE: 4,
    NodeState.FROZEN: 4,
    NodeState.SILENT: 3,
    NodeState.JOINING: 1,
}


class RowSelection(Struct, frozen=True, kw_only=True):
    """What the user wants to see of the machines and ranks of a run."""

    unfolded: Mapping[int, bool] = field(default_factory=dict)
    """Machines that the user unfolded (True) or folded (False)."""
    query: str = ""
    """Words that each listed rank matches; see ``matches``."""


_RANKS = re.compile(r"r?(\d+)(?:-r?(\d+))?$")


def matches(word: str, machine: str, rank: int, state: str) -> bool:
    """Return whether a word selects a rank. ``machine``: the lower-case words about its machine.

    ``12``, ``r12`` and ``0-15`` select ranks, ``gpu-b:12`` a rank of a machine. Any other word is a
    part of the name, the host, the address or the state of a machine, or of the state of a rank.
    """
    name, colon, number = word.rpartition(":")
    if colon and name in machine and number.isdigit():
        return int(number) == rank
    if (ranks := _RANKS.match(word)) is not None:
        first = int(ranks[1])
        if first <= rank <= (first if ranks[2] is None else int(ranks[2])):
            return True
        # A number can be a part of a name, but a plain number is meant as a rank.
        return word in machine.split()
    return word in machine or word in state.lower()


class _Entry(Struct, frozen=True):
    """A row that is not built yet: a machine, or one of its ranks."""

    node: NodeSnapshot
    ranks: Sequence[RankSnapshot]
    """All ranks of the machine."""
    unfolded: bool
    rank: RankSnapshot | None = None

    @property
    def key(self) -> str:
        if self.rank is None:
            return f"{MACHINE_KEY}{self.node.node}"
        return f"{RANK_KEY}{self.rank.rank}"


class MachineRows:
    """The rows for one frame and one selection."""

    def __init__(self, frame: Frame, selection: RowSelection) -> None:
        self._frame, self._selection = frame, selection
        run = frame.snapshot
        self._live = run.state in LIVE
        self._names = machine_names(run)
        self._verdicts: RankVerdicts = rank_verdicts(run)
        self._severities = _verdict_severities(frame)
        self._ranks = ranks_by_machine(run)
        self._nodes = {node.node: node for node in run.nodes}
        for number in self._ranks:
            self._nodes.setdefault(number, NodeSnapshot(node=number, name=str(number)))
        self.listed_ranks = 0
        """Number of ranks that match the filter; known once ``rows`` were built."""
        self._problem_rows = 0

    @cached_property
    def _utilisation(self) -> dict[int, float]:
        """The GPU utilisation of each rank, 0 to 1."""
        return {
            rank: gpu.utilisation_percent / 100
            for gpu in self._frame.snapshot.gpus
            if gpu.utilisation_percent is not None and gpu.error is None
            for rank in gpu.ranks
        }

    @cached_property
    def _machine_utilisation(self) -> dict[int, float]:
        return machine_utilisation(self._frame.snapshot)

    def rows(self) -> LazyRows[RankRow]:
        """Return the rows of machines, and below each unfolded machine those of its ranks."""
        words = self._selection.query.lower().split()
        machines = []
        self.listed_ranks = 0
        for number, node in self._nodes.items():
            ranks = self._ranks.get(number, [])
            shown = self._matching(words, node, ranks) if words else ranks
            if words and not shown:
                continue
            self.listed_ranks += len(shown)
            machines.append((self._machine_severity(node, ranks), node, ranks, shown))
        machines.sort(key=lambda entry: (-entry[0], entry[1].node))
        entries: list[_Entry] = []
        for _, node, ranks, shown in machines:
            by_user = self._selection.unfolded.get(node.node)
            unfolded = len(shown) < len(ranks) if by_user is None else by_user
            entries.append(_Entry(node, ranks, unfolded))
            listed: Sequence[RankSnapshot] = shown if unfolded else ()
            if by_user is None and not unfolded:
                listed = self._problem_ranks(shown)[: MAX_PROBLEM_ROWS - self._problem_rows]
                self._problem_rows += len(listed)
            worst_first = sorted(listed, key=lambda r: (-self._rank_severity(r), r.rank))
            entries += [_Entry(node, ranks, unfolded, rank) for rank in worst_first]
        keys = [entry.key for entry in entries]
        return LazyRows(keys, lambda index: self._row(entries[index]), self._widest(entries))

    def _row(self, entry: _Entry) -> RankRow:
        if entry.rank is not None:
            return self._rank_row(entry.node, entry.rank)
        return self._machine_row(entry.node, entry.ranks, unfolded=entry.unfolded)

    def _widest(self, entries: Sequence[_Entry]) -> list[int]:
        """Return the index of the machine with the longest label, and of a rank."""
        if not entries:
            return []
        lengths = [len(self._label(entry)) if entry.rank is None else 0 for entry in entries]
        ranks = (index for index, entry in enumerate(entries) if entry.rank is not None)
        rank = next(ranks, None)
        return [lengths.index(max(lengths)), *([] if rank is None else [rank])]

    def _label(self, entry: _Entry) -> str:
        numbers = [rank.rank for rank in entry.ranks] or list(entry.node.ranks)
        return f"{self._names.get(entry.node.node, entry.node.name)}  {rank_range(numbers)}"

    def _problem_ranks(self, ranks: Sequence[RankSnapshot]) -> list[RankSnapshot]:
        """Return the ranks with a problem, unless all of the machine's ranks have the same one."""
        severities = {self._rank_severity(rank) for rank in ranks}
        if len(severities) < 2:
            return []
        return [rank for rank in ranks if self._rank_severity(rank) >= _RANK_SEVERITY["slow"]]

    # -- severity ----------------------------------------------------------------------------------

    def _matching(
        self, words: Sequence[str], node: NodeSnapshot, ranks: Sequence[RankSnapshot]
    ) -> list[RankSnapshot]:
        parts = (self._names.get(node.node), node.name, node.host, node.address)
        machine = " ".join(part for part in parts if part).lower()
        if node.state is not NodeState.CONNECTED:
            machine += f" {machine_state_word(node.state)}"
        states = {rank.rank: self._rank_state(node, rank).text for rank in ranks}
        return [
            rank
            for rank in ranks
            if all(matches(word, machine, rank.rank, states[rank.rank]) for word in words)
        ]

    def _rank_state(self, node: NodeSnapshot, rank: RankSnapshot) -> Cell:
        state = rank_state(rank, self._verdicts)
        if self._live and node.state in NOT_REPORTING and rank.state is not RankState.DEAD:
            return _NO_REPORT
        return state

    def _rank_severity(self, rank: RankSnapshot) -> int:
        return _RANK_SEVERITY.get(rank_state(rank, self._verdicts).text, 0)

    def _machine_severity(self, node: NodeSnapshot, ranks: Sequence[RankSnapshot]) -> int:
        own = _MACHINE_SEVERITY.get(node.state, 0) if self._live else 0
        worst = max((self._rank_severity(rank) for rank in ranks), default=0)
        return max(own, worst, self._severities.get(node.node, 0))

    # -- one row -----------------------------------------------------------------------------------

    def _machine_row(
        self, node: NodeSnapshot, ranks: Sequence[RankSnapshot], *, unfolded: bool
    ) -> RankRow:
        sign = UNFOLDED if unfolded else FOLDED if ranks else " "
        steps = [rank.global_step for rank in ranks if rank.global_step is not None]
        slowest = max(ranks, key=lambda rank: rank.step_s or 0.0, default=None)
        state, note = self._machine_state(node, ranks)
        return RankRow(
            key=_Entry(node, ranks, unfolded).key,
            rank=f"{sign} {self._label(_Entry(node, ranks, unfolded))}",
            pid="",
            device="",
            phase="",
            age="",
            step=formats.step(min(steps, default=None)),
            strip=slowest.recent_step_s if slowest is not None else (),
            state=state,
            note=note,
            is_old=self._is_old(node),
            metrics=(
                _metric(_STEP_TIME, self._slowest_step(ranks, slowest)),
                *rank_metrics(_sum(ranks), None, live=self._live),
                _metric(_GPU, self._percent(self._machine_utilisation.get(node.node))),
                _metric(_REPORT, self._report(node)),
            ),
        )

    def _rank_row(self, node: NodeSnapshot, rank: RankSnapshot) -> RankRow:
        row = rank_row(self._frame, rank, self._verdicts)
        step_time = formats.duration(rank.step_s if self._live else None)
        return replace(
            row,
            key=f"{RANK_KEY}{rank.rank}",
            rank=f"    r{rank.rank}",
            state=self._rank_state(node, rank),
            is_old=self._is_old(node),
            metrics=(
                _metric(_STEP_TIME, step_time),
                *row.metrics,
                _metric(_GPU, self._percent(self._utilisation.get(rank.rank))),
                _metric(_REPORT, ""),
            ),
        )

    def _is_old(self, node: NodeSnapshot) -> bool:
        return self._live and node.state in NOT_REPORTING

    def _percent(self, share: float | None) -> str:
        return formats.percent(share) if self._live else formats.NA

    def _report(self, node: NodeSnapshot) -> str:
        waited = self._frame.now - self._frame.snapshot_at
        return report_age_text(node, since_snapshot_s=waited, live=self._live)

    def _slowest_step(self, ranks: Sequence[RankSnapshot], slowest: RankSnapshot | None) -> str:
        """Return ``122 ms r3``; without the rank if all are about equally fast."""
        if slowest is None or not slowest.step_s or not self._live:
            return formats.NA
        fastest = min(rank.step_s for rank in ranks if rank.step_s)
        text = formats.duration(slowest.step_s)
        return text if slowest.step_s < SIMILAR_STEP_TIMES * fastest else f"{text} r{slowest.rank}"

    def _machine_state(self, node: NodeSnapshot, ranks: Sequence[RankSnapshot]) -> tuple[Cell, str]:
        """Return the state of a machine, and the reason for it or the states of other ranks."""
        if self._live and node.state not in QUIET_STATES:
            tone = Tone.BAD if _MACHINE_SEVERITY[node.state] >= 4 else Tone.WARN
            note = machine_note(node)
            if not note and node.state in NOT_REPORTING:
                note = f"last report {self._report(node)} ago"
            return Cell(text=machine_state_word(node.state), tone=tone), note
        if not ranks:
            return Cell(text=machine_state_word(node.state), tone=Tone.DIM), machine_note(node)
        counts = Counter(rank_state(rank, self._verdicts) for rank in ranks)
        ordered = sorted(counts, key=lambda cell: (-_RANK_SEVERITY.get(cell.text, 0), cell.text))
        worst, *others = ordered
        rest = [f"{counts[cell]} {cell.text}" for cell in others]
        note = machine_note(node)
        parts = [*([note] if note else []), *rest]
        return Cell(text=f"{counts[worst]} {worst.text}", tone=worst.tone), ", ".join(parts)


def _verdict_severities(frame: Frame) -> dict[int, int]:
    """Return the severity of each machine that an active verdict names."""
    severities: dict[int, int] = {}
    for verdict in open_verdicts(frame.snapshot):
        severity = 4 if verdict.level in BLOCKING_LEVELS else 2
        for node in verdict.nodes:
            severities[node] = max(severity, severities.get(node, 0))
    return severities


def _sum(ranks: Sequence[RankSnapshot]) -> RankSnapshot:
    """Return one rank with the sums of the readings of several; unknown if all are unknown."""
    rates = [rank.samples_per_s for rank in ranks if rank.samples_per_s is not None]
    cpu = [rank.cpu_percent for rank in ranks if rank.cpu_percent is not None]
    sizes = [rank.rss_bytes for rank in ranks if rank.rss_bytes is not None]
    return RankSnapshot(
        rank=-1,
        samples_per_s=sum(rates) if rates else None,
        cpu_percent=sum(cpu) if cpu else None,
        rss_bytes=sum(sizes) if sizes else None,
    )


def _metric(column: Column, text: str) -> RankMetric:
    return RankMetric(column=column, cell=Cell(text=clean_name(text)))
