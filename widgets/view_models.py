"""The frozen values that widgets draw. Text is final, with units; numbers are only for drawing.

Pure: no clock, no process, no knowledge of runs. A ``None`` number is a gap or ``n/a``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import TypeAlias

    import numpy as np
    import numpy.typing as npt

# Not imported for itself: a screen without curves stands a tenth of a second earlier without NumPy.
FloatArray: TypeAlias = "npt.NDArray[np.float64]"


class Tone(str, Enum):
    """Why a text stands out; words or a sign say the same, for those who see no colour."""

    PLAIN = "plain"
    DIM = "dim"
    FAINT = "faint"
    """Decoration: the empty part of a bar, a separator."""
    GOOD = "good"
    WARN = "warn"
    BAD = "bad"
    ACCENT = "accent"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChartSeries:
    """One line of a chart. ``x`` ascends; NaN in ``y`` is a gap."""

    name: str
    x: FloatArray
    y: FloatArray
    colour: int = 0
    """Index into the palette, stable for a series over its life."""
    dim: bool = False
    low: FloatArray | None = None
    high: FloatArray | None = None
    """Extremes of a decimated window, drawn as a band where given."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChartViewModel:
    title: str
    subtitle: str = ""
    series: tuple[ChartSeries, ...] = ()
    x_label: str = "step"
    log_y: bool = False
    x_time: bool = False
    """``x`` is in seconds: ticks read ``5 m 00 s``."""
    x_whole: bool = False
    """``x`` counts something: ticks are whole numbers."""
    x_ends: tuple[float, float] | None = None
    """Least extent of the x axis, the same for charts that stand side by side."""
    cut_outliers: bool = False
    """Fit the y axis to nearly all values, where a few would flatten the rest; it says so."""
    note: str | None = None
    """Shown in the middle where there is nothing to draw: ``no validation yet``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    text: str
    tone: Tone = Tone.PLAIN


@dataclass(frozen=True, kw_only=True, slots=True)
class HeaderViewModel:
    name: str
    preset: str
    state: str
    state_sign: str
    """One character: ``●`` running, ``!`` stalled, ``‖`` paused, ``■`` stopped, ``✓``, ``✗``."""
    tone: Tone
    epoch: str
    """``epoch 3/30``"""
    step: str
    """``step 1 204/2 930``"""
    share: float | None
    """0 to 1; None where the end is not known."""
    eta: str
    elapsed: str
    attempt: str
    banner: str | None = None
    banner_tone: Tone = Tone.BAD
    notes: tuple[str, ...] = ()
    """Short lines that must be seen: ``supervisor lost``, ``history incomplete: disk full``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRow:
    rank: str
    pid: str
    device: str
    phase: str
    step: str
    age: str
    strip: tuple[float, ...]
    """Recent step times in seconds, oldest first."""
    rate: str
    cpu: str
    memory: str
    state: Cell
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuRow:
    index: str
    name: str
    ranks: str
    utilisation: float | None
    """0 to 1, for the bar."""
    utilisation_text: str
    memory: float | None
    memory_text: str
    power_text: str
    temperature: Cell
    clock_text: str
    strip: tuple[float, ...] = ()
    """Utilisation of the last minutes, 0 to 1, oldest first; NaN where none was read."""
    note: str = ""
    heat: tuple[float, ...] = ()
    """The same, finer, for the heat strip."""
    sm_text: str = ""
    """SM, tensor-core and DRAM activity where the GPU offers them: ``62 %``."""
    tensor_text: str = ""
    dram_text: str = ""
    throttle: str = ""
    """What lowers the clocks, in words."""
    tone: Tone = Tone.PLAIN
    """WARN or BAD where something is wrong with this GPU; a sign says the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogLine:
    rank: int | None
    text: str
    """Sanitised: no control characters, no markup."""
    tone: Tone = Tone.PLAIN
    count: int = 1
    """How many identical lines in a row this stands for."""
    in_traceback: bool = False
    """Part of a Python traceback."""
    seen_at: float | None = None
    """Unix seconds at which the line arrived; None if it was in the file before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerdictViewModel:
    """One verdict in words."""

    title: Cell
    """``STALLED for 12 s``"""
    sentence: str
    facts: tuple[tuple[str, str], ...] = ()
    """Who, where, what to do: a short word and a text."""
    evidence: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveCell:
    """What some ranks did at one number of a process group."""

    text: str
    site: str = ""
    """Where in the user's code: ``train.py:88 step``."""
    differs: bool = False
    """From what most ranks did there."""
    tone: Tone = Tone.PLAIN


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveRow:
    number: str
    """``#1 043``; ``…`` where rows are left out."""
    cells: tuple[CollectiveCell, ...]
    note: str = ""
    """``first difference``, ``not finished``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveTable:
    """Collectives of one process group around the first that not all ranks finished."""

    title: str
    columns: tuple[Cell, ...]
    """Ranks that did the same share one."""
    rows: tuple[CollectiveRow, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class StackViewModel:
    """The stack that some threads share, the innermost call first."""

    who: Cell
    lines: tuple[Cell, ...]
    """The user's own code in ACCENT with a sign, folded library calls DIM."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessRow:
    """A process, or processes that do the same."""

    who: str
    pid: str
    doing: Cell
    """``stopped``, ``sleeping``, ``running``."""
    cpu: str
    memory: str
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class DiagnosisViewModel:
    """Everything of a diagnosis, ready to draw."""

    headline: Cell
    about: str
    """Which run, when it was looked at."""
    verdicts: tuple[VerdictViewModel, ...] = ()
    earlier: tuple[str, ...] = ()
    """Verdicts that are over, a line each."""
    collectives: tuple[CollectiveTable, ...] = ()
    collectives_note: str = ""
    """Why there are none."""
    stacks: tuple[StackViewModel, ...] = ()
    stacks_note: str = ""
    processes: tuple[ProcessRow, ...] = ()
    machine: tuple[str, ...] = ()
    last_output: tuple[StackViewModel, ...] = ()
    """What ranks wrote last, exceptions first."""
    missing: tuple[str, ...] = ()
