"""What a run is: everything that the supervisor needs to start it, and to start it again.

Pure: reading and writing the file is ``training/store``'s business, finding presets that of
``run/presets.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from ltui.training.config.defaults import CHECKPOINTS_KEPT
from ltui.training.problem import Problem, ProblemError

SPEC_VERSION = 1
STALL_ACTIONS = ("nothing", "stop", "restart")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointPolicy:
    every_s: float = 300.0
    """Seconds between periodic checkpoints; 0 for none."""
    keep: int = CHECKPOINTS_KEPT
    """Periodic checkpoints kept; those of stops and requests are always kept."""
    best: str | None = None
    """A metric, ``val/loss``: the best checkpoints by it are kept too, looked at after each
    validation and epoch."""
    mode: str = "min"
    """Whether a lower value of ``best`` is better (``min``) or a higher one (``max``)."""
    keep_best: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class StallPolicy:
    floor_s: float = 4.0
    """A rank that moved less than this long ago is never called stalled."""
    cap_s: float = 120.0
    """A training step is called stalled after this long whatever the history says, unless steps
    take more than half of it."""
    factor: float = 5.0
    """Budget of a training step: this many times the slowest recent one."""
    slow_phase_s: float = 600.0
    """Budget of setup, validation, checkpointing and the first steps."""
    then: str = "nothing"
    """What is done about a stall or a dead rank: one of ``STALL_ACTIONS``."""
    then_after_s: float = 30.0
    """How long the verdict must have stood before ``then`` is done."""
    restarts: int = 3
    """So often at most ``then: restart`` goes back to the last good checkpoint."""
    on_verdict: tuple[str, ...] | str | None = None
    """Run on every new verdict: a command and its arguments (no shell), or a webhook's URL."""
    on_verdict_level: str = "warning"
    """Of ``LEVELS``: what is less grave calls nobody."""
    on_verdict_timeout_s: float = 20.0
    """A command or a webhook that takes longer is cut off."""

    def __post_init__(self) -> None:
        # YAML knows no tuples; a specification is compared with the one it was written from.
        if isinstance(self.on_verdict, list):
            object.__setattr__(self, "on_verdict", tuple(self.on_verdict))


@dataclass(frozen=True, kw_only=True, slots=True)
class Nodes:
    """Where a run of several machines meets, and which of them this is."""

    count: int
    rank: int
    """Of this machine, from 0."""
    address: str
    """Of machine 0, as the others reach it."""
    port: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """A run as launched: either ``config`` (a preset) or ``command`` (``ltui exec``) is given."""

    id: str
    name: str
    created_at: float
    cwd: str
    """Directory that ranks start in: where the user was."""
    python: str
    """Interpreter of the ranks."""
    preset: str | None = None
    """Preset name or path of the configuration file, for people."""
    config: Mapping[str, Any] | None = None
    """What LightningCLI is given: ``seed_everything``, ``trainer``, ``model``, ``data``, ..."""
    after_fit: tuple[str, ...] = ()
    """Trainer methods run after ``fit``: ``("test",)``."""
    python_path: tuple[str, ...] = ()
    """Folders put before ``sys.path`` of the ranks: that of the preset's file."""
    command: tuple[str, ...] | None = None
    nproc: int = 1
    """Ranks started on this machine; for a command, 0: the command decides."""
    nodes: Nodes | None = None
    """Of a preset's run on several machines; None where this one is alone."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of the engine."""
    overrides: tuple[str, ...] = ()
    """``--set`` as given, for people."""
    checkpoint: CheckpointPolicy = CheckpointPolicy()
    stall: StallPolicy = StallPolicy()
    start_from: str | None = None
    """The run and step whose checkpoint it began from, for people: ``brave-owl-3f2a:1204``."""
    restarts: int = 0
    """So often at most the run goes back to its last good checkpoint after a crash."""
    gpus: str | None = None
    """``free:2``: the run waits until so many GPUs are free, and gets these alone."""
    tags: tuple[str, ...] = ()
    about: str | None = None

    def to_document(self) -> dict[str, Any]:
        """Plain values fit for YAML."""
        document = asdict(self)
        for key, value in document.items():
            if isinstance(value, tuple):
                document[key] = list(value)
        return {"version": SPEC_VERSION, **document}

    @classmethod
    def from_document(cls, document: Mapping[str, Any], where: str = "spec.yaml") -> RunSpec:
        """The inverse of ``to_document``. Raises ``ProblemError`` naming ``where``."""
        version = document.get("version")
        if not isinstance(version, int):
            raise ProblemError(Problem(where=where, what="not the specification of a run."))
        if version > SPEC_VERSION:
            raise ProblemError(
                Problem(
                    where=where,
                    what=(
                        f"the file was written by a newer ltui (layout {version}, "
                        f"this one reads {SPEC_VERSION})."
                    ),
                    remedy="Upgrade ltui to open this run.",
                )
            )
        known = {f.name for f in fields(cls)}
        values = {k: v for k, v in document.items() if k in known}
        try:
            for key in ("after_fit", "python_path", "overrides", "tags"):
                values[key] = tuple(values.get(key) or ())
            if values.get("command") is not None:
                values["command"] = tuple(values["command"])
            values["checkpoint"] = CheckpointPolicy(**(values.get("checkpoint") or {}))
            values["stall"] = StallPolicy(**(values.get("stall") or {}))
            if values.get("nodes") is not None:
                values["nodes"] = Nodes(**values["nodes"])
            return cls(**values)
        except (TypeError, ValueError) as error:
            raise ProblemError(
                Problem(
                    where=where,
                    what=f"the file is damaged ({error}).",
                    remedy="Restore it or delete the run.",
                )
            ) from error

    def with_changes(self, **changes: Any) -> RunSpec:
        return replace(self, **changes)
