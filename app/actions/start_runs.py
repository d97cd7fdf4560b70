"""Start a run, as ``ltui run`` and ``exec`` do.

A start has two parts, because a command that shows the run catches signals between them:
``prepare`` checks everything and starts nothing, and the ``launch`` of its result starts the run.
People wait for the first training step, so each function imports only what it needs itself.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from msgspec import Meta, Struct, ValidationError, convert
from msgspec.structs import asdict, replace

from ltui.app.nodes.node_options import NodeOptions
from ltui.training.config.run_spec import STALL_ACTIONS, CheckpointPolicy, Nodes, RunSpec
from ltui.training.problem import Problem, ProblemError
from ltui.training.shared.defaults import MIRROR_PATTERN
from ltui.training.store.run_directory import RunDir, given_name, ltui_home, new_run_id

if TYPE_CHECKING:
    from ltui.training.config.device_selection import Machine
    from ltui.training.state.run_queue import QueueEntry
    from ltui.training.state.run_snapshot import CheckpointInfo


Count = Annotated[int, Meta(ge=0)]
_Slots = Annotated[int, Meta(ge=1)]
Mirror = Annotated[str, Meta(pattern=rf"^(?:{MIRROR_PATTERN})$")]


class StartOptions(NodeOptions, frozen=True, kw_only=True):
    """What a run and another attempt of one have in common."""

    restarts: Count | None = None
    """Maximum number of restarts after a crash."""
    mirror: Mirror | None = None
    """``tensorboard`` or ``tensorboard:FOLDER``."""
    queue: bool = False
    """Put it into the run queue, for which the next fields are."""
    priority: int | None = None
    after: tuple[str, ...] = ()
    """Runs that have to end before: ``RUN``, or ``RUN:ok`` if they have to finish."""
    not_before: str | None = None
    """``18:30`` or ``+2h``"""
    slots: _Slots | None = None
    """Slots of this machine that it uses."""


class LaunchOptions(StartOptions, frozen=True, kw_only=True):
    """What a run is started with: the options of ``ltui run`` and ``ltui exec``."""

    preset: str | None = None
    """The name of a preset, or a LightningCLI configuration file."""
    command: tuple[str, ...] = ()
    """A command in place of a preset."""
    overrides: tuple[str, ...] = ()
    """Keys of the configuration of a preset: ``trainer.max_epochs=3``."""
    name: str | None = None
    tags: tuple[str, ...] = ()
    group: str | None = None
    note: str | None = None
    python: str | None = None
    """The interpreter that trains; None for that of the active virtual environment."""
    freeze: bool | None = None
    """Train with a copy of the code; None for what the preset or the configuration file says."""
    start_from: str | None = None
    """``RUN`` or ``RUN:STEP``, for a preset."""
    on_stall: tuple[str, Count | None] | None = None
    """``("stop", None)`` or ``("restart", 3)``."""
    on_verdict: str | None = None
    """A command or the address of a webhook."""
    keep_best: str | None = None
    """``METRIC[:max][:N]``, for a command, as the next ones are."""
    stop_signal: str = "SIGTERM"
    metrics_pattern: str | None = None
    gpus: str | None = None
    """``free:N``"""


class StartedRun(Struct, frozen=True, kw_only=True):
    """A run that was started. It goes on without the program that started it."""

    id: str
    warnings: tuple[str, ...] = ()
    """Sentences about what may go wrong."""
    frozen: tuple[str, ...] = ()
    """Sentences about the code that was frozen for this attempt."""
    queued: bool = False
    """It waits in the run queue."""
    job: str | None = None
    """Number of the SLURM job in which it will run."""
    to_join: tuple[str, ...] = ()
    """Lines that say how the other machines join it."""


class PreparedRun(Struct, frozen=True, kw_only=True):
    """A run or an attempt that is checked and not started."""

    nodes: Nodes | None = None
    """The machines of the run, if there are several."""
    launch: Callable[[], StartedRun]


class OtherNodeError(ProblemError):
    """A launcher has started this process as another machine of a run than the first one."""

    def __init__(self, nodes: Nodes) -> None:
        what = f"a launcher has started this process as machine {nodes.rank} of the run."
        super().__init__(Problem("start", what, "Start it on machine 0 alone, or by `ltui run`."))
        self.nodes = nodes


def start(options: LaunchOptions) -> StartedRun:
    """Start a run, and return when its supervisor answers.

    Raises ``ProblemError`` with every problem found; then nothing was started.
    """
    return prepare(options).launch()


_Options = TypeVar("_Options", bound=Struct)


def checked_options(options: _Options) -> _Options:
    """Return the options with values of the right types. Raises ``ProblemError``."""
    try:
        return convert(asdict(options), type(options))
    except ValidationError as error:
        raise ProblemError.of(where=type(options).__name__, what=f"{error}.") from error


_FOR_PRESETS = ("overrides", "start_from")
_FOR_COMMANDS = ("command", "keep_best", "stop_signal", "metrics_pattern", "gpus", "num_nodes")


def _check_kind(options: LaunchOptions) -> None:
    """Raise ``ProblemError`` for a field of a preset without one, or of a command with a preset."""
    wrong, default = _FOR_PRESETS if options.preset is None else _FOR_COMMANDS, LaunchOptions()
    for name in wrong:
        if name == "gpus" and options.queue:
            continue
        if getattr(options, name) != getattr(default, name):
            what = f"it cannot be given {'without' if options.preset is None else 'with'} a preset."
            remedy = None
            if name == "gpus":
                remedy = "Add --queue, or give --set trainer.devices=free:N instead."
            raise ProblemError.of(where=name, what=what, remedy=remedy)


def prepare(options: LaunchOptions) -> PreparedRun:
    """Return the run that the options specify, after every check.

    Raises ``OtherNodeError`` if this process has to join a run that a launcher starts on another
    machine, and ``ProblemError`` with every problem found.
    """
    from ltui.app.nodes.node_options import (
        agent_nodes,
        check_fewer_nodes,
        launch_machine,
        listed_hosts,
        with_node_options,
    )

    options = checked_options(options)
    _check_kind(options)
    home = ltui_home()
    labels = label_files(options)
    entry = queue_entry(options, home)
    hosts = listed_hosts(options.nodes)
    machine = launch_machine(options, hosts)
    if (agent := agent_nodes(options, machine, options.overrides)) is not None:
        raise OtherNodeError(agent)
    spec_of = _command_spec if options.preset is None else _preset_spec
    spec = with_node_options(spec_of(options, home, machine, hosts), options, hosts)
    if spec.nodes is not None and spec.nodes.rank > 0:
        raise OtherNodeError(spec.nodes)
    spec = with_run_options(spec, options)
    start_from: CheckpointInfo | None = None
    if options.start_from is not None:
        from ltui.app.launch.build_spec import apply_start_from

        spec, start_from = apply_start_from(home, spec, options.start_from)
    spec = check_fewer_nodes(_with_stall_options(spec, options.on_stall, options.on_verdict))
    warnings: tuple[str, ...] = ()
    if spec.config is not None:
        from ltui.app.launch.local_machine import freeze_warnings

        warnings = tuple(str(warning) for warning in freeze_warnings(spec))

    if entry is not None:

        def enqueue_it() -> StartedRun:
            from ltui.training.lifecycle.run_queue import enqueue

            checked = spec.config is not None
            run_dir = enqueue(
                spec, home, entry, start_from, private_files=labels, interpreter_checked=checked
            )
            told = _frozen(run_dir, spec)
            return StartedRun(id=run_dir.id, warnings=warnings, frozen=told, queued=True)

        return PreparedRun(launch=enqueue_it)
    frozen: list[str] = []

    def launch_with(files: Mapping[str, str]) -> RunDir:
        from ltui.training.lifecycle.launch_run import launch

        run_dir = launch(
            spec,
            home,
            start_from,
            interpreter_checked=spec.config is not None,
            private_files={**labels, **files},
        )
        frozen.extend(_frozen(run_dir, spec))
        return run_dir

    return prepared_run(spec, options, home, launch_with, warnings, frozen)


def _frozen(run_dir: RunDir, spec: RunSpec) -> tuple[str, ...]:
    """Return the sentence about the frozen code of a new run; empty if it has none."""
    from ltui.training.store.frozen_code import read_frozen

    frozen = read_frozen(run_dir, 1) if spec.freeze else None
    return () if frozen is None else (f"{frozen.text()}.",)


def queue_entry(options: StartOptions, home: Path) -> QueueEntry | None:
    """Return what is asked of the run queue; None if the run starts at once.

    Raises ``ProblemError``.
    """
    if options.queue:
        # Imported here: most runs start at once.
        from ltui.app.launch.queue_changes import dependencies, start_time
        from ltui.training.state.run_queue import QueueEntry

        return QueueEntry(
            priority=options.priority or 0,
            after=dependencies(home, options.after),
            not_before=None if options.not_before is None else start_time(options.not_before),
        )
    for name in ("priority", "after", "not_before"):
        if getattr(options, name) not in (None, ()):
            raise ProblemError.of(
                where=f"--{name.replace('_', '-')}",
                what="only a queued run has it.",
                remedy="Add --queue.",
            )
    return None


def prepared_run(
    spec: RunSpec,
    options: NodeOptions,
    home: Path,
    start_with: Callable[[Mapping[str, str]], RunDir],
    warnings: tuple[str, ...],
    frozen: Sequence[str] = (),
) -> PreparedRun:
    """Return a run whose launch calls ``start_with`` with additional private files, and brings the
    other machines to it. ``start_with`` may add to ``frozen`` what it has frozen."""

    def launch() -> StartedRun:
        if spec.nodes is None:
            run_dir = start_with({})
            return StartedRun(id=run_dir.id, warnings=warnings, frozen=tuple(frozen))
        # Imported here, because most runs use one machine.
        from ltui.app.nodes.start_head import join_lines, start_head

        run_dir = start_head(spec, options, home, start_with)
        by_hand = spec.nodes.start == "by hand"
        lines = tuple(join_lines(run_dir, spec.nodes)) if by_hand else ()
        return StartedRun(id=run_dir.id, warnings=warnings, to_join=lines)

    return PreparedRun(nodes=spec.nodes, launch=launch)


def label_files(options: LaunchOptions) -> dict[str, str]:
    """Return the file with the labels of a run that is launched, by its name; empty if none is
    given. Raises ``ProblemError``."""
    # Imported here: a resume needs none of it.
    from ltui.training.state.run_labels import checked_name, new_labels
    from ltui.training.store.labels_file import files_at_launch

    where = ("--tag", "--group", "--note")
    labels = new_labels(options.tags, options.group or "", options.note or "", where)
    name = checked_name(given_name(options.name), "--name")
    return files_at_launch(replace(labels, name=name))


def _preset_spec(
    options: LaunchOptions, home: Path, machine: Machine, hosts: Sequence[str] | None
) -> RunSpec:
    from ltui.app.launch.build_spec import prepare_launch
    from ltui.app.nodes.node_options import node_overrides

    overrides = node_overrides(options.overrides, hosts)
    if options.gpus is not None:
        overrides = [
            *overrides,
            f"trainer.devices={_free_gpus(options.gpus, machine, queued=True)}",
        ]
    request = prepare_launch(options.preset or "", overrides, options.python, machine)
    run_id, name = new_run_id(home, options.name)
    return request.spec(run_id, name, time.time())


def _command_spec(
    options: LaunchOptions, home: Path, machine: Machine, hosts: Sequence[str] | None
) -> RunSpec:
    from ltui.app.nodes.node_options import command_nodes

    spec = command_spec(options, home, machine)
    return spec.with_changes(nodes=command_nodes(options, machine, hosts, spec.command or ()))


def command_spec(options: LaunchOptions, home: Path, machine: Machine) -> RunSpec:
    """Return the specification of a user's command for a machine. Raises ``ProblemError``."""
    from ltui.app.launch.launch_defaults import launch_defaults

    command = options.command
    if not command:
        raise ProblemError.of(
            where="ltui exec",
            what="the command is missing.",
            remedy="Put it after two dashes: ltui exec -- python train.py",
        )
    path = os.environ.get("PATH", os.defpath)
    python = sys.executable
    if options.python is not None:
        from ltui.app.launch.training_interpreter import choose_python

        python = choose_python(options.python, os.environ)
        path = f"{Path(python).parent}{os.pathsep}{path}"
    if shutil.which(command[0], path=path) is None:
        raise ProblemError.of(
            where=f"ltui exec -- {command[0]}",
            what="no executable program of that name was found.",
            remedy="Give its path, or activate the environment that contains it.",
        )
    if options.stop_signal not in signal.Signals.__members__:
        what = "there is no such signal."
        raise ProblemError.of(where=f"--stop-signal {options.stop_signal}", what=what)
    gpus = None if options.gpus is None else _free_gpus(options.gpus, machine, queued=options.queue)
    defaults = launch_defaults()
    run_id, name = new_run_id(home, options.name)
    return RunSpec(
        id=run_id,
        name=name,
        created_at=time.time(),
        cwd=str(Path.cwd()),
        python=python,
        command=command,
        nproc=0,
        # Kept, so that a resume from another shell finds the same program.
        env={"PATH": path},
        restarts=defaults.restarts,
        mirror=defaults.mirror,
        freeze=defaults.freeze,
        checkpoint=_checkpoint_policy(options.keep_best, defaults.checkpoint),
        stall=defaults.stall,
        stop_signal=options.stop_signal,
        metrics_pattern=_checked_pattern(options.metrics_pattern),
        gpus=gpus,
    )


def _checked_pattern(text: str | None) -> str | None:
    """Return the value of ``--metrics-pattern`` if it can be used. Raises ``ProblemError``."""
    # Imported here, because most runs have no pattern.
    from ltui.training.rank.program.printed_values import metric_pattern

    if text is not None:
        try:
            metric_pattern(text)
        except ValueError as error:
            raise ProblemError.of(
                where=f"--metrics-pattern {text}",
                what=f"{error}.",
                remedy="Give `json`, `pairs` or a regular expression with named groups.",
            ) from error
    return text


def with_run_options(spec: RunSpec, options: StartOptions) -> RunSpec:
    """Return ``spec`` with ``--restarts``, ``--mirror`` and ``--freeze``, which override the
    preset, and ``--slots``."""
    given = {"restarts": options.restarts, "mirror": options.mirror, "slots": options.slots}
    if isinstance(options, LaunchOptions):
        # Much may be edited until a queued run starts.
        given["freeze"] = options.queue or None if options.freeze is None else options.freeze
    return spec.with_changes(**{name: v for name, v in given.items() if v is not None})


def _with_stall_options(
    spec: RunSpec, on_stall: tuple[str, int | None] | None, on_verdict: str | None
) -> RunSpec:
    """Return ``spec`` with ``--on-stall`` and ``--on-verdict``, which override the preset."""
    stall = spec.stall
    if on_stall is not None:
        action, count = on_stall
        if action not in STALL_ACTIONS:
            remedy = f"Choose from: {', '.join(STALL_ACTIONS)}."
            raise ProblemError.of(where=f"--on-stall {action}", what="unknown.", remedy=remedy)
        stall = replace(stall, then=action, restarts=stall.restarts if count is None else count)
    if on_verdict is not None:
        stall = replace(stall, on_verdict=_verdict_hook(on_verdict))
    return spec.with_changes(stall=stall)


def _verdict_hook(text: str) -> tuple[str, ...] | str:
    """Return the URL of a webhook unchanged, or a command split into words as by a shell."""
    from ltui.training.config.ltui_section import on_verdict_fault

    where = f"--on-verdict {text}"
    if "://" in text.split(" ", 1)[0]:
        if (fault := on_verdict_fault(text)) is not None:
            raise ProblemError.of(where=where, what=fault)
        return text
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        message = f"the command cannot be split into words ({error})."
        raise ProblemError.of(where=where, what=message) from error
    if not words:
        raise ProblemError.of(where="--on-verdict", what="the command is empty.")
    return words


def _checkpoint_policy(text: str | None, default: CheckpointPolicy) -> CheckpointPolicy:
    """Return ``default`` with ``METRIC[:max][:N]``, such as ``val/acc:max:3``, if it is given."""
    if text is None:
        return default
    metric, *options = text.split(":")
    mode = options.pop(0) if options and options[0] in ("min", "max") else "min"
    number = options.pop(0) if options else "1"
    if not metric or options or not number.isdecimal() or int(number) < 1:
        raise ProblemError.of(
            where=f"--keep-best {text}",
            what="invalid value.",
            remedy="Use METRIC[:max][:N], such as val/acc:max:3",
        )
    return replace(default, best=metric, mode=mode, keep_best=int(number))


def _free_gpus(text: str, machine: Machine, *, queued: bool) -> str:
    """Return ``free:2`` as a specification holds it. A queued run may give the number alone.

    Raises ``ProblemError`` if the machine does not have as many.
    """
    from ltui.training.config.device_selection import choose_devices, free_count

    count = free_count(f"free:{text}" if queued and text.isdecimal() else text)
    if count is None:
        raise ProblemError.of(
            where=f"--gpus {text}",
            what=f"the value must be {'N or ' if queued else ''}free:N of 1 or more, as free:2.",
            remedy="To choose GPUs by number, set CUDA_VISIBLE_DEVICES.",
        )
    free = f"free:{count}"
    _, faults = choose_devices({"devices": free}, machine, 1)
    if faults:
        raise ProblemError.of(
            where=f"--gpus {text}",
            what=faults[0].what,
            remedy="Start it where there are enough, or without --gpus.",
        )
    return free
