"""Start a sweep, as ``ltui sweep`` does: from options, or from a file with a section ``sweep:``.

Everything is checked before anything is created.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, ValidationError, convert
from msgspec.structs import asdict, replace

from ltui.app.actions.start_runs import LaunchOptions, checked_options, command_spec
from ltui.training.config.preset_discovery import SUFFIXES
from ltui.training.config.run_spec import RunSpec
from ltui.training.config.yaml_document import read_document
from ltui.training.lifecycle.dispatcher_process import wake_dispatcher
from ltui.training.lifecycle.freeze_code import freeze_code
from ltui.training.problem import Problem, ProblemError
from ltui.training.shared.regular_files import read_regular
from ltui.training.store.run_directory import RunDir, ltui_home, new_run_id
from ltui.training.sweep.pruning import RULES
from ltui.training.sweep.record import FLAGS, HYDRA, MOST, SAMPLERS, Sweep, placeholders
from ltui.training.sweep.space import (
    Dimension,
    check_grid,
    grid_size,
    is_dimension,
    override,
    parse_dimension,
)
from ltui.training.sweep.suggest import check_sampler
from ltui.training.sweep.sweep_files import SweepDir, check_name, create_sweep

_MOST_BYTES = 1 << 20
EXAMPLE = "For example: --set 'model.lr=choice(0.1, 0.01)'"


class SweepOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a sweep is started with: the options of ``ltui sweep``, and the keys of a file."""

    preset: str | None = None
    """A preset, a LightningCLI configuration file, or a file with a section ``sweep:``."""
    command: tuple[str, ...] = ()
    """A command in place of a preset."""
    set: tuple[str, ...] = ()
    """``KEY=choice(...)``, and ``KEY=VALUE`` for a value that all trials have."""
    metric: str | None = None
    mode: str | None = None
    """``min`` (default) or ``max``"""
    seeds: int | None = None
    trials: int | None = None
    at_once: int | None = None
    sampler: str | None = None
    """``grid``, ``random`` or ``tpe``"""
    prune: str | None = None
    """``asha`` or ``median``"""
    rung: int | None = None
    reduction: int | None = None
    arguments: str | None = None
    """``flags`` or ``hydra``, for a command"""
    seed: int | None = None
    name: str | None = None
    python: str | None = None
    gpus: str | None = None
    """``free:N``, for a command, as the next one is."""
    metrics_pattern: str | None = None
    freeze: bool | None = None
    """Train with the code as it is now (the default), or as it is when a trial starts."""


def start_sweep(options: SweepOptions) -> Sweep:
    """Start a sweep. Its trials are started by the dispatcher of the run queue.

    Raises ``ProblemError`` with every problem found; then there is no sweep.
    """
    home = ltui_home()
    options = with_file(checked_options(options))
    name = options.name or new_run_id(home, None)[1]
    check_name(home, name)
    sweep = sweep_of(options, name, time.time())
    if options.command:
        launched = {key: getattr(options, key) for key in ("command", "python", "metrics_pattern")}
        # Imported here: a machine is only looked at for a new sweep.
        from ltui.app.launch.local_machine import detect_machine

        launch = LaunchOptions(gpus=options.gpus, queue=True, **launched)
        template = command_spec(launch, home, detect_machine(os.environ))
    else:
        sweep, template = _preset_template(options, sweep)
    template = template.with_changes(freeze=options.freeze is not False)

    def freeze(made: SweepDir) -> None:
        if template.freeze:
            freeze_code(RunDir(made.path), template)

    create_sweep(home, sweep, template, os.environ, freeze)
    wake_dispatcher(home)
    return sweep


def with_file(options: SweepOptions) -> SweepOptions:
    """Return the options with those of the file that they name, if it has a section ``sweep:``;
    what is given overrides the file. Raises ``ProblemError``."""
    path = options.preset or ""
    if not path.endswith(tuple(SUFFIXES)) or not Path(path).is_file():
        return options
    values = read_document(_read(path), path).values
    if "sweep" not in values:
        return options
    section = values["sweep"] if isinstance(values["sweep"], dict) else {}
    settings = section.get("set")
    if isinstance(settings, dict):
        section = {**section, "set": [_setting(key, value) for key, value in settings.items()]}
    try:
        of_file = convert(section, SweepOptions)
    except ValidationError as error:
        raise ProblemError.of(
            where=f"{path} sweep",
            what=f"{error}.",
            remedy=f"Its keys are {', '.join(SweepOptions.__struct_fields__)}.",
        ) from error
    given = {k: v for k, v in asdict(options).items() if k != "preset" and v not in (None, ())}
    return replace(of_file, **{**given, "set": of_file.set + options.set})


def _read(path: str) -> str:
    try:
        return read_regular(Path(path), _MOST_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ProblemError.of(where=path, what=f"it cannot be read ({error}).") from error


def _setting(key: Any, value: Any) -> str:
    """Return a setting of a file as ``--set`` takes it: a list is a choice."""
    if isinstance(value, list):
        return f"{key}=choice({json.dumps(value, default=str)[1:-1]})"
    return f"{key}={value if isinstance(value, str) else json.dumps(value, default=str)}"


def sweep_of(options: SweepOptions, name: str, now: float) -> Sweep:
    """Return the sweep without trials. Raise ``ProblemError`` with every problem."""
    space, fixed = split_settings(options.set)
    size = grid_size(space)
    sampler = options.sampler or ("tpe" if size is None else "grid")
    problems = [
        Problem(where=where, what=what, remedy=remedy)
        for where, what, remedy, wrong in _rules(options, sampler, space)
        if wrong
    ]
    problems += _command_problems(options, space, fixed)
    if problems:
        raise ProblemError(*problems)
    check_sampler(sampler)
    if sampler == "grid":
        check_grid(space)
    given = {
        key: value
        for key in ("at_once", "reduction", "arguments", "seed", "mode", "rung", "prune", "seeds")
        if (value := getattr(options, key)) is not None
    }
    return Sweep(
        name=name,
        created_at=now,
        host=os.uname().nodename,
        space=space,
        fixed=fixed,
        metric=options.metric or "",
        trials=options.trials,
        sampler=sampler,
        **given,
    )


def split_settings(texts: Sequence[str]) -> tuple[tuple[Dimension, ...], tuple[str, ...]]:
    """Return the space, and the settings with one value. Raise ``ProblemError``."""
    space = {one.key: one for one in map(parse_dimension, filter(is_dimension, texts))}
    return tuple(space.values()), tuple(text for text in texts if not is_dimension(text))


_Rule = tuple[str, str, str | None, bool]


def _rules(options: SweepOptions, sampler: str, space: Sequence[Dimension]) -> list[_Rule]:
    """Return place, sentence and remedy of each mistake that can be made, and whether it was."""
    counts = {
        "trials": options.trials,
        "seeds": options.seeds,
        "at-once": options.at_once,
        "rung": options.rung,
    }
    choices = {
        "sampler": (options.sampler, SAMPLERS),
        "prune": (options.prune, RULES),
        "mode": (options.mode, ("min", "max")),
        "arguments": (options.arguments, (FLAGS, HYDRA)),
    }
    return [
        ("ltui sweep", "the program is missing." if not options.command else "it has two programs.",
         "Name a preset or a file, or a command after two dashes.",
         bool(options.command) == (options.preset is not None)),
        ("--set", "no key has several values.", EXAMPLE, not space),
        ("--metric", "it is missing.", "Name what is to be optimised, such as val/loss.",
         not options.metric),
        *((f"--{name}", "it must be 1 or more.", None, value is not None and value < 1)
          for name, value in counts.items()),
        *((f"--{name}", f"it must be {MOST} or less.", None, (counts[name] or 0) > MOST)
          for name in ("seeds", "at-once")),
        ("--seed", "it must be 0 or more.", None, (options.seed or 0) < 0),
        *((f"--{name}", f"`{value}` is none of {', '.join(known)}.", None,
           value is not None and value not in known) for name, (value, known) in choices.items()),
        ("--trials", f"it is missing for the sampler {sampler}.", "Give a number: --trials 20",
         sampler != "grid" and options.trials is None),
        ("--rung", "it is missing for --prune.",
         "Give the steps after which trials are compared first, such as --rung 500.",
         options.prune is not None and options.rung is None),
        ("--rung", "it is for --prune.", "Add --prune asha or --prune median.",
         options.prune is None and (options.rung, options.reduction) != (None, None)),
        ("--reduction", "it must be 2 or more.", None,
         options.reduction is not None and options.reduction < 2),
    ]  # fmt: skip


def _command_problems(
    options: SweepOptions, space: Sequence[Dimension], fixed: Sequence[str]
) -> list[Problem]:
    if not options.command:
        return []
    keys = [dimension.key for dimension in space] + (["seed"] if options.seeds else [])
    named = placeholders(options.command, keys)
    missing = [key for key in keys if key not in named] if named else []
    problems = [
        Problem(
            where="COMMAND",
            what=f"it has no {{{key}}}, but {{{min(named)}}}.",
            remedy="Name every key in braces, or none.",
        )
        for key in missing
    ]
    return problems + [
        Problem(
            where=f"--set {text}",
            what="it has one value.",
            remedy="Write it into the command, or give several: choice(a,b).",
        )
        for text in fixed
    ]


def _preset_template(options: SweepOptions, sweep: Sweep) -> tuple[Sweep, RunSpec]:
    """Return the sweep of a preset, and the specification that its trials have in common.

    The first and the last combination are checked like runs. Raise ``ProblemError``.
    """
    # Imported here: a sweep of a command needs no preset.
    from ltui.app.launch.build_spec import prepare_launch
    from ltui.app.launch.local_machine import detect_machine

    ends = [{one.key: _end(one, place) for one in sweep.space} for place in (0, -1)]
    launch, _ = (
        prepare_launch(
            options.preset or "",
            (*sweep.fixed, *(override(key, value) for key, value in values.items())),
            options.python,
        )
        for values in ends
    )
    spec = launch.spec(sweep.name, sweep.name, sweep.created_at)
    if spec.nodes is not None:
        raise ProblemError.of(
            where="trainer.num_nodes", what="the trials of a sweep train on one machine."
        )
    template = spec.with_changes(config=dict(launch.preset.document), overrides=())
    sweep = replace(sweep, machine=detect_machine(os.environ), cpu_ranks=launch.preset.cpu_ranks)
    return sweep, template


def _end(dimension: Dimension, place: int) -> Any:
    listed = dimension.listed
    return listed[place] if listed else (dimension.low, dimension.high)[place]
