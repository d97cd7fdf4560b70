"""What a sweep is: its space, its trials and what was told of them. Pure.

The record is the truth. What a sampler knows is built from it again for each suggestion.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

from msgspec import Struct, field

from ltui.training.config.device_selection import UNKNOWN_MACHINE, Machine
from ltui.training.config.preflight import preflight
from ltui.training.config.run_spec import RunSpec
from ltui.training.sweep.space import Dimension, Parameters, override, value_text


class State(str, Enum):
    """State of a trial. The values are stored and must not change."""

    PLANNED = "planned"
    """Its run is to be started, or resumed if there is one."""
    QUEUED = "queued"
    RUNNING = "running"
    STOPPING = "stopping"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"
    PRUNED = "pruned"
    OUT_OF_MEMORY = "out of memory"
    NAN = "nan"
    MISSING = "missing"
    """Its run was deleted."""

    __str__ = str.__str__


IN_FLIGHT = frozenset({State.PLANNED, State.QUEUED, State.RUNNING, State.STOPPING})
"""States of trials that take one of the places of ``Sweep.at_once``."""
SETTLED = frozenset(
    {
        State.FINISHED,
        State.FAILED,
        State.OUT_OF_MEMORY,
        State.NAN,
        State.PRUNED,
    }
)
"""States of trials of which the sampler learns."""
MOST = 1000
"""Maximum number of seeds, and of trials at once."""
SAMPLERS = ("grid", "random", "tpe")
FLAGS, HYDRA = "flags", "hydra"
"""How a command without placeholders gets its values: ``--KEY VALUE`` or ``KEY=VALUE``."""


class Trial(Struct, frozen=True, kw_only=True):
    """One run of the sweep: parameters and a seed."""

    number: int
    suggestion: int
    """Number of the parameters; trials that differ only in the seed share it."""
    parameters: Parameters
    cell: str
    """Hash of the parameters."""
    seed: int | None = None
    generation: int = 1
    """Number of its run; another one begins anew if the last one cannot be resumed."""
    state: State = State.PLANNED
    detail: str = ""
    after: int = 0
    """Attempt of its run that had ended when it was planned; the next one is its start."""
    attempt: int = 0
    """Last attempt of its run that was seen."""
    interrupted: int = 0
    """How often its run was killed from outside, for example by a reboot."""
    step: int | None = None
    last: float | None = None
    """Last value of the metric."""
    best: float | None = None
    scores: dict[int, float] = field(default_factory=dict)
    """Value of the metric at each rung, by the steps of the rung."""
    passed: int = 0
    """Steps of the last rung after which it was judged good enough."""
    pruned: bool = False
    """True if the sweep has stopped it at a rung."""


class Told(Struct, frozen=True, kw_only=True):
    """What the sampler learns of one suggestion. A promoted trial is told again at its end."""

    suggestion: int
    parameters: Parameters
    state: State
    """``finished``, ``pruned`` or ``failed``."""
    value: float | None = None
    """Mean of the last values over the seeds."""
    scores: dict[int, float] = field(default_factory=dict)


class Sweep(Struct, frozen=True, kw_only=True):
    """A sweep with all of its trials, as stored in ``sweep.json``."""

    name: str
    created_at: float
    host: str = ""
    """Name of the machine whose run queue has its trials."""
    space: tuple[Dimension, ...]
    metric: str
    mode: str = "min"
    fixed: tuple[str, ...] = ()
    """Other settings of each trial, ``KEY=VALUE``."""
    arguments: str = FLAGS
    seeds: int | None = None
    """Number of seeds of each suggestion; None: the seed of the program stays as it is."""
    trials: int | None = None
    """Number of suggestions; None for all combinations of a grid."""
    at_once: int = 1
    sampler: str = "grid"
    seed: int = 0
    """Seed of the sampler."""
    prune: str | None = None
    rung: int = 0
    """Steps of the first rung."""
    reduction: int = 3
    """How many times more steps each rung of ASHA has than the one before."""
    machine: Machine = UNKNOWN_MACHINE
    cpu_ranks: int = 1
    stopped: bool = False
    """True if a person has stopped the sweep."""
    exhausted: bool = False
    """True if the space has no combination left."""
    problem: str = ""
    """Why it does not go on."""
    tried: tuple[Trial, ...] = ()
    told: tuple[Told, ...] = ()

    def __post_init__(self) -> None:
        if self.prune is not None and (self.rung < 1 or self.reduction < 2):
            raise ValueError(f"rung {self.rung} and reduction {self.reduction} give no rungs")
        if not 1 <= self.at_once <= MOST or not 1 <= (self.seeds or 1) <= MOST:
            raise ValueError(f"it has {self.at_once} trials at once, with {self.seeds} seeds")

    def run_name(self, trial: Trial) -> str:
        """Return the name of a trial's run."""
        again = f".{trial.generation}" if trial.generation > 1 else ""
        return f"{self.name}-{trial.number:03d}{again}"

    def run_id(self, trial: Trial) -> str:
        """Return the id of a trial's run, which is decided before the run is created."""
        text = f"{self.created_at}:{trial.number}:{trial.generation}"
        return f"{self.run_name(trial)}-{hashlib.sha256(text.encode()).hexdigest()[:4]}"

    @property
    def lives(self) -> tuple[Trial, ...]:
        """The trials that take a place."""
        return tuple(trial for trial in self.tried if trial.state in IN_FLIGHT)

    def state(self) -> State:
        """Return ``running``, ``stopping``, ``stopped`` or ``finished``."""
        if self.stopped:
            return State.STOPPING if self.lives else State.STOPPED
        return State.RUNNING if self.lives or self.wants_more else State.FINISHED

    @property
    def wants_more(self) -> bool:
        """True if a suggestion may follow."""
        return not self.exhausted and (self.trials is None or self.suggested < self.trials)

    @property
    def suggested(self) -> int:
        """The number of suggestions so far."""
        return 1 + max((trial.suggestion for trial in self.tried), default=-1)


def trial_spec(sweep: Sweep, template: RunSpec, trial: Trial, created_at: float) -> RunSpec:
    """Return the specification of a trial's run. Raise ``ProblemError`` with every problem.

    ``template`` has the configuration of the preset as written, or the command.
    """
    settings = dict(trial.parameters)
    seed = {} if trial.seed is None else {"seed_everything": trial.seed}
    named = template.with_changes(
        id=sweep.run_id(trial), name=sweep.run_name(trial), created_at=created_at
    )
    if template.command is not None:
        seed = {} if trial.seed is None else {"seed": trial.seed}
        words = trial_command(template.command, {**settings, **seed}, sweep.arguments)
        return named.with_changes(command=words)
    changed = tuple(override(key, value) for key, value in {**seed, **settings}.items())
    overrides = (*sweep.fixed, *changed)
    checked = preflight(
        dict(template.config or {}),
        overrides,
        template.preset or sweep.name,
        lines={},
        machine=sweep.machine,
        cpu_ranks=sweep.cpu_ranks,
    )
    return named.with_changes(
        config=checked.document,
        nproc=checked.nproc,
        nodes=checked.nodes,
        gpus=checked.gpus,
        overrides=overrides,
    )


def trial_command(
    command: tuple[str, ...], values: Mapping[str, Any], arguments: str
) -> tuple[str, ...]:
    """Return a command with values, of which no shell reads anything.

    ``{KEY}`` stands for a value wherever it is in a word. If the command has none of them, the
    values follow it as ``--KEY VALUE`` or ``KEY=VALUE``.
    """
    texts = {key: value_text(value) for key, value in values.items()}
    if not placeholders(command, texts):
        if arguments == HYDRA:
            return command + tuple(override(key, value) for key, value in values.items())
        return command + tuple(word for key, text in texts.items() for word in (f"--{key}", text))
    pattern = _placeholder(texts)
    return tuple(pattern.sub(lambda match: texts[match[1]], word) for word in command)


def placeholders(command: Iterable[str], keys: Iterable[str]) -> set[str]:
    """Return the keys that a command has as ``{KEY}``."""
    pattern = _placeholder(keys)
    return {match[1] for word in command for match in pattern.finditer(word)}


def _placeholder(keys: Iterable[str]) -> re.Pattern[str]:
    # Braces with anything else in them, such as JSON, are words of the command.
    return re.compile(r"\{(" + "|".join(map(re.escape, keys)) + r")\}")
