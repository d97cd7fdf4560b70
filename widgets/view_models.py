"""View models: the frozen values that widgets draw.

Texts are final and contain their units. Numbers are used for drawing only, and None means a gap or
``n/a``. This module is pure: it has no clock and no process, and it does not know what a run is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from ltui.widgets.tone import Tone

if TYPE_CHECKING:
    from typing import TypeAlias

    import numpy as np
    import numpy.typing as npt

    from ltui.widgets.columns import Column

# NumPy is imported for type checkers only: without it a screen without curves opens 0.1 s earlier.
FloatArray: TypeAlias = "npt.NDArray[np.float64]"


class ChartSeries(Struct, frozen=True, kw_only=True, eq=False):
    """One line of a chart. ``x`` is ascending, and NaN in ``y`` is a gap."""

    name: str
    x: FloatArray
    y: FloatArray
    colour: int = 0
    """Index into the palette. A series keeps it as long as it is shown."""
    suffix: str = ""
    """The end of the name that a legend without room omits, such as `` smoothed``."""
    dim: bool = False
    """Draw the line faintly, for example raw values behind a smoothed line."""
    low: FloatArray | None = None
    high: FloatArray | None = None
    """Minimum and maximum of each decimated window; drawn as a band if both are given."""
    is_logged: bool = False
    """NaN and infinities in ``y`` are values that were logged; otherwise values are missing."""


class ChartMark(Struct, frozen=True, kw_only=True):
    """An event at one place of the x axis, such as a checkpoint."""

    at: float
    sign: str
    """One character, drawn at the foot of the chart."""
    text: str
    """Such as ``checkpoint at step 1 200``."""
    kind: str = ""
    """Meaning of the sign in a legend of the signs, such as ``checkpoint``."""
    line: bool = False
    """Draw a vertical line over the whole height."""
    time: float | None = None
    """When it happened, in unix seconds."""


class ChartViewModel(Struct, frozen=True, kw_only=True, eq=False):
    """Everything that a chart draws: its series, its axes and its texts."""

    title: str
    subtitle: str = ""
    series: tuple[ChartSeries, ...] = ()
    x_label: str = "step"
    log_y: bool = False
    """Use a logarithmic y axis until the user chooses; the chart then shows that it is one."""
    x_time: bool = False
    """``x`` is in seconds, so tick labels are durations such as ``5 m 00 s``."""
    x_clock: bool = False
    """``x`` is in unix seconds, so tick labels are times of day such as ``14:30``."""
    x_whole: bool = False
    """``x`` is a count, so ticks are at whole numbers only."""
    x_ends: tuple[float, float] | None = None
    """Minimum extent of the x axis, so that charts side by side show the same part."""
    x_is_final: bool = False
    """No further points will come, so the x axis ends with the data."""
    is_rate: bool = False
    """The values are rates: they are written as such, and the y axis begins at zero while the
    whole x axis is shown."""
    shows_values: bool = True
    """Write the newest values into the legend and at the ends of the curves. Not if they are
    beside the chart; then a single series needs no legend either."""
    cut_outliers: bool = False
    """Fit the y axis to nearly all values if a few outliers would flatten the rest.

    The chart then shows that values are cut."""
    marks: tuple[ChartMark, ...] = ()
    """Events on the x axis in ascending order."""
    note: str | None = None
    """Text in the middle of an empty chart, such as ``no validation yet``."""


class Cell(Struct, frozen=True, kw_only=True):
    """A text and its tone."""

    text: str
    tone: Tone = Tone.PLAIN
    colour: int | None = None
    """Index of a series of a chart whose colour the text has in place of that of its tone."""


class HeaderViewModel(Struct, frozen=True, kw_only=True):
    """The first lines of a run screen."""

    name: str
    preset: str
    state: str
    state_sign: str
    """One character: ``●`` running, ``!`` stalled, ``‖`` paused, ``■`` stopped, ``✓`` finished,
    ``✗`` failed."""
    tone: Tone
    epoch: str
    """Such as ``epoch 3/30``."""
    step: str
    """Such as ``step 1204/2930``."""
    share: float | None
    """Finished fraction of the run, 0 to 1; None if its end is unknown."""
    eta: str
    elapsed: str
    attempt: str
    banner: str | None = None
    banner_tone: Tone = Tone.BAD
    notes: tuple[str, ...] = ()
    """Short lines that must not be overlooked, such as ``history incomplete: disk full``."""
    machines: str = ""
    """Such as ``2 machines, 16 ranks``; empty on one machine."""
    job: str = ""
    """Such as ``job ends in 3 h 10 m``; empty outside of a job of a cluster."""


class RankMetric(Struct, frozen=True, kw_only=True):
    """One metric of a rank, with the column of the rank table that shows it."""

    column: Column
    cell: Cell


class RankRow(Struct, frozen=True, kw_only=True):
    """One row of the rank table: a rank, or a machine above its ranks. Empty texts are blanks."""

    rank: str
    pid: str
    device: str
    phase: str
    step: str
    age: str
    strip: tuple[float, ...]
    """Recent step times in seconds, oldest first."""
    state: Cell
    metrics: tuple[RankMetric, ...] = ()
    """Further columns. All rows have the same metrics, in the same order."""
    note: str = ""
    key: str = ""
    """Identifies the row in a table with machines; empty in a table of ranks only."""
    is_old: bool = False
    """The values are those of the last report of a machine that does not report any more."""


class GpuRow(Struct, frozen=True, kw_only=True):
    """One row of the GPU table, and one strip of the heat strips."""

    index: str
    name: str
    ranks: str
    utilisation: float | None
    """Fraction for the bar, 0 to 1."""
    utilisation_text: str
    memory: float | None
    memory_text: str
    power_text: str
    temperature: Cell
    power: float | None = None
    """Fraction of the power limit. Likewise of the temperature at which the GPU slows down."""
    temperature_share: float | None = None
    clock_text: str
    strip: tuple[float, ...] = ()
    """Utilisation of the last minutes, 0 to 1, oldest first; NaN where it was not read."""
    note: str = ""
    heat: tuple[float, ...] = ()
    """Like ``strip`` with more values, for the heat strip."""
    sm_text: str = ""
    """SM activity such as ``62 %``; empty if the GPU does not report it. Likewise the next two."""
    tensor_text: str = ""
    dram_text: str = ""
    throttle: str = ""
    """The reason for reduced clocks, in words."""
    tone: Tone = Tone.PLAIN
    """WARN or BAD if something is wrong with this GPU; a sign says the same."""
    stale: bool = False
    """True if the readings are old."""
    in_block: bool = False
    """What is wrong with the GPU, and its processes, are in rows of their own below it."""
    line: tuple[Cell, ...] | None = None
    """A line over all columns below a GPU: a finding or a process."""


LAUNCHER = -2
"""``LogLine.source`` of the launcher of machine 0; the numbers below it are of other machines."""


class LogLine(Struct, frozen=True, kw_only=True):
    """One line of a log, or several identical consecutive lines."""

    rank: int | None
    """The rank that wrote the line; None for the launcher."""
    text: str
    """Sanitised text: no control characters, and never parsed as markup."""
    tone: Tone = Tone.PLAIN
    count: int = 1
    """Number of identical consecutive lines that this line represents."""
    in_traceback: bool = False
    """True if the line is part of a Python traceback."""
    seen_at: float | None = None
    """Unix seconds at which the line was read; None if it was already in the file at the start."""
    node: int = 0
    """Number of the machine of a launcher."""
    folded: tuple[str, ...] = ()
    """The lines of a framework that this line stands for, as they were written."""

    @property
    def source(self) -> int:
        """The rank that wrote the line, or a negative number for the launcher of a machine."""
        return LAUNCHER - self.node if self.rank is None else self.rank


class VerdictViewModel(Struct, frozen=True, kw_only=True):
    """One verdict of a diagnosis, in words."""

    title: Cell
    """Such as ``STALLED for 12 s``."""
    sentence: str
    facts: tuple[tuple[str, str], ...] = ()
    """Label and text of each fact: which rank, where, what to do."""
    evidence: tuple[tuple[str, str], ...] = ()
    """Label and text of each piece of evidence."""


class CollectiveCell(Struct, frozen=True, kw_only=True):
    """The collective that some ranks called at one sequence number of a process group."""

    text: str
    site: str = ""
    """Call site in the user's code, such as ``train.py:88 step``."""
    differs: bool = False
    """True if most ranks called another collective at this sequence number."""
    tone: Tone = Tone.PLAIN


class CollectiveRow(Struct, frozen=True, kw_only=True):
    """One sequence number of a process group."""

    number: str
    """Such as ``#1 043``; ``…`` if rows are omitted at this place."""
    cells: tuple[CollectiveCell, ...]
    note: str = ""
    """Such as ``first difference`` or ``not finished``."""


class CollectiveTable(Struct, frozen=True, kw_only=True):
    """Collectives of one process group, around the first one that not all ranks finished."""

    title: str
    columns: tuple[Cell, ...]
    """Headings. Ranks that called the same collectives share a column."""
    rows: tuple[CollectiveRow, ...] = ()
    notes: tuple[str, ...] = ()


class StackViewModel(Struct, frozen=True, kw_only=True):
    """A stack with its title, innermost call first; or the last output of a rank."""

    title: Cell
    """The threads that the stack belongs to, or the rank that wrote the lines."""
    lines: tuple[Cell, ...]
    """The user's code has the tone ACCENT and a sign; folded library calls have the tone DIM."""


class ProcessRow(Struct, frozen=True, kw_only=True):
    """A process, or several processes in the same state."""

    owner: str
    pid: str
    state: Cell
    """Such as ``stopped``, ``sleeping`` or ``running``."""
    cpu: str
    memory: str
    note: str = ""


class SamplesViewModel(Struct, frozen=True, kw_only=True):
    """Where a slow and a normal rank spent their time, as a list with two sides."""

    about: str
    """How long the samples took, and when they were taken."""
    sentence: str
    slow: str
    """Heading of the slow side: ``rank 3``."""
    normal: str = ""
    """Heading of the normal side; empty if there is none."""
    rows: tuple[tuple[str, str, str], ...] = ()
    """Seconds of either side, and the place."""
    workers: tuple[tuple[str, str, str], ...] = ()
    """The same of their DataLoader workers."""


class DiagnosisViewModel(Struct, frozen=True, kw_only=True):
    """A complete diagnosis, ready to draw."""

    headline: Cell
    about: str
    """The run, and the time of the diagnosis."""
    verdicts: tuple[VerdictViewModel, ...] = ()
    verdicts_note: str = ""
    """What to know if there are no verdicts; empty if nothing is wrong."""
    limit: str = ""
    """A sentence about what limits the speed of the run; empty if too little was measured."""
    earlier: tuple[str, ...] = ()
    """Verdicts that have ended, one line each."""
    collectives: tuple[CollectiveTable, ...] = ()
    collectives_note: str = ""
    """The reason if there are no collectives."""
    stacks: tuple[StackViewModel, ...] = ()
    stacks_note: str = ""
    """The reason if there are no stacks."""
    samples: SamplesViewModel | None = None
    processes: tuple[ProcessRow, ...] = ()
    machine: tuple[str, ...] = ()
    last_output: tuple[StackViewModel, ...] = ()
    """The last log lines of ranks, exceptions first."""
    missing: tuple[str, ...] = ()
    """Evidence that could not be collected, and how to get it."""
