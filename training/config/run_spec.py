"""Specification of a run: everything that the supervisor needs to start and restart it.

Pure. ``training/store/spec_file.py`` reads and writes the file, ``presets.py`` builds a
specification from a preset. Field names are stored in ``spec.yaml`` and must not change.

The severity levels of verdicts are here because policies of runs name them. They compare equal to
the plain strings that runs store and send, so a level that was read from a file is used without
conversion. Levels of a later version stay plain strings.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from enum import Enum
from typing import Any

from msgspec import Struct, field
from msgspec.structs import asdict, force_setattr, replace

from ltui.training.json_codec import from_json
from ltui.training.problem import ProblemError
from ltui.training.shared.defaults import CHECKPOINTS_KEPT


class VerdictLevel(str, Enum):
    """Severity of a verdict, the most severe first. The values are stored and must not change."""

    DEAD = "dead"
    """A rank's process has ended although the run has not."""
    STALLED = "stalled"
    """The run makes no progress."""
    SLOW = "slow"
    """The run makes progress, but more slowly than it could."""
    WARNING = "warning"
    """Nothing is slow yet; something may fail or slow down later."""

    __str__ = str.__str__


LEVELS: tuple[str, ...] = tuple(level.value for level in VerdictLevel)
"""Names of all levels, the most severe first, as a configuration writes them."""

BLOCKING_LEVELS: frozenset[str] = frozenset({VerdictLevel.DEAD, VerdictLevel.STALLED})
"""Levels at which the run does not advance; only these trigger the policy's ``then``."""


def severity(level: str) -> int:
    """Return 0 for the most severe level and more for others; an unknown level comes last."""
    return LEVELS.index(level) if level in LEVELS else len(LEVELS)


SPEC_VERSION = 1
STALL_ACTIONS = ("nothing", "stop", "restart")
"""Values of ``StallPolicy.then``."""


class CheckpointPolicy(Struct, frozen=True, kw_only=True):
    """When checkpoints are saved and how many are kept."""

    every_s: float = 300.0
    """Seconds between periodic checkpoints; 0 disables them."""
    keep: int = CHECKPOINTS_KEPT
    """Number of periodic checkpoints kept; those of stops and requests are always kept."""
    best: str | None = None
    """Metric such as ``val/loss`` by which the best checkpoints are kept as well.

    It is read after each validation and epoch.
    """
    mode: str = "min"
    """``min`` if a lower value of the metric ``best`` is better, ``max`` if a higher one is."""
    keep_best: int = 1
    """Number of best checkpoints kept."""


class StallPolicy(Struct, frozen=True, kw_only=True):
    """When a rank counts as stalled, and what is done about it."""

    floor_s: float = 4.0
    """Seconds without progress before a rank can be called stalled."""
    cap_s: float = 120.0
    """Seconds after which a training step is always called stalled.

    It does not apply if steps usually take more than half of this time.
    """
    factor: float = 5.0
    """Time limit of a training step, as a multiple of the slowest recent step."""
    slow_phase_s: float = 600.0
    """Time limit in seconds of setup, validation, checkpointing and the first steps."""
    then: str = "nothing"
    """Action on a stall or a dead rank: one of ``STALL_ACTIONS``."""
    then_after_s: float = 30.0
    """Seconds that the verdict must last before ``then`` is done."""
    restarts: int = 3
    """Maximum number of restarts from the last good checkpoint by ``then: restart``."""
    on_verdict: tuple[str, ...] | str | None = None
    """Hook for every new verdict: a command and its arguments (no shell), or a webhook URL."""
    on_verdict_level: str = "warning"
    """Minimum level (one of ``LEVELS``) that triggers ``on_verdict``."""
    on_verdict_timeout_s: float = 20.0
    """Seconds after which the command or webhook call is aborted."""


class Nodes(Struct, frozen=True, kw_only=True):
    """Nodes of a run on several machines, and the position of this machine among them."""

    count: int
    """Number of nodes, 2 or more."""
    rank: int
    """Number of this node, from 0. Node 0 is the head; all others run an agent."""
    address: str
    """Address of node 0 for the others: of torch's rendezvous and of the head's link."""
    port: int
    """Port of torch's rendezvous at node 0."""
    control_port: int = -1
    """Port of the head's link. 0: chosen by the kernel. -1: the port after ``port``.

    It is never -1 after the construction.
    """
    join_timeout_s: float = 600.0
    """Seconds for which the head waits for the other nodes before it gives up."""
    start: str = "launcher"
    """How the other nodes are started.

    ``by hand``: a person runs ``ltui join`` on each. ``ssh``: the head runs ``ltui join`` there.
    ``srun`` and ``launcher``: the same command was started on every node, by SLURM or another
    launcher.
    """
    hosts: tuple[str, ...] = ()
    """Host names of the nodes 1, 2, ... if ``start`` is ``ssh``."""
    fewer_allowed: bool = False
    """True if a restart may continue with fewer nodes when one of them is gone."""
    left_out: tuple[int, ...] = ()
    """Nodes that are gone, without which the run has been restarted."""

    @property
    def present(self) -> tuple[int, ...]:
        """Return the numbers of the nodes that take part. Their order is that of torch."""
        return tuple(node for node in range(self.count) if node not in self.left_out)

    def __post_init__(self) -> None:
        if self.control_port < 0:
            force_setattr(self, "control_port", self.port + 1)


class RunSpec(Struct, frozen=True, kw_only=True):
    """A run as launched. Either ``config`` (a preset) or ``command`` (``ltui exec``) is given."""

    id: str
    name: str
    created_at: float
    cwd: str
    """Working directory of the ranks: that of the user at launch."""
    python: str
    """Python interpreter of the ranks."""
    preset: str | None = None
    """Preset name or path of the configuration file, for display."""
    config: Mapping[str, Any] | None = None
    """Configuration for LightningCLI: ``seed_everything``, ``trainer``, ``model``, ``data``, ..."""
    after_fit: tuple[str, ...] = ()
    """Trainer methods that run after ``fit``: ``("test",)``."""
    python_path: tuple[str, ...] = ()
    """Folders added at the beginning of the ranks' ``sys.path``: that of the preset's file."""
    command: tuple[str, ...] | None = None
    nproc: int = 1
    """Number of ranks started on this machine; 0 for a command, which decides itself."""
    nodes: Nodes | None = None
    """Set if the run uses several machines; None for one machine."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables added to the environment of the engine."""
    overrides: tuple[str, ...] = ()
    """Values of ``--set`` as given, for display."""
    checkpoint: CheckpointPolicy = CheckpointPolicy()
    stall: StallPolicy = StallPolicy()
    start_from: str | None = None
    """Run and step of the checkpoint it started from, for display: ``brave-owl-3f2a:1204``."""
    restarts: int = 0
    """Maximum number of automatic restarts from the last good checkpoint after a crash."""
    mirror: str | None = None
    """Where the values are also written while the run goes on: ``tensorboard[:FOLDER]``."""
    metrics_pattern: str | None = None
    """How values are found in what a command prints (``--metrics-pattern``); None: not at all."""
    stop_signal: str = "SIGTERM"
    """The signal that stops a command of which ltui saves no checkpoint."""
    gpus: str | None = None
    """``free:2`` if the run waits until two GPUs are free and then uses only these."""
    freeze: bool = False
    """True if the ranks train with a copy of the code, made when the run was created."""
    code_copy: int = 1
    """The copy that ``freeze`` uses, by the attempt for which it was made."""
    slots: int = 1
    """Slots of its machine that it uses while it runs, unless it has GPUs by ``gpus``."""
    imported_from: str | None = None
    """Folder of the metrics if the run was imported (``ltui import``), so nothing can start it."""
    tags: tuple[str, ...] = ()
    about: str | None = None

    def to_document(self) -> dict[str, Any]:
        """Return plain values, with tuples for lists."""
        parts = {"checkpoint": self.checkpoint, "stall": self.stall, "nodes": self.nodes}
        # The values of ``config`` remain what YAML made of them: bytes and sets, for example.
        return {
            "version": SPEC_VERSION,
            **asdict(self),
            **{name: asdict(part) for name, part in parts.items() if part is not None},
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any], where: str = "spec.yaml") -> RunSpec:
        """Return the specification that ``to_document`` wrote. Raise ``ProblemError``."""
        version = document.get("version")
        if not isinstance(version, int):
            raise ProblemError.of(where=where, what="not the specification of a run.")
        if version > SPEC_VERSION:
            raise ProblemError.of(
                where=where,
                what=(
                    f"the file was written by a newer ltui (layout {version}, "
                    f"this one reads {SPEC_VERSION})."
                ),
                remedy="Upgrade ltui to open this run.",
            )
        try:
            spec = from_json(cls, document)
            signal.Signals[spec.stop_signal]
            return spec
        except (ValueError, KeyError) as error:
            raise ProblemError.of(
                where=where,
                what=f"the file is damaged ({error}).",
                remedy="Restore it or delete the run.",
            ) from error

    def with_changes(self, **changes: Any) -> RunSpec:
        """Return a copy with some fields replaced."""
        return replace(self, **changes)
