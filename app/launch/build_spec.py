"""Build the specification of a run from user input, check it, and launch the run.

The preset is loaded, overrides are applied, and both are checked on the machine and in the
interpreter that would train.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct

from ltui.app.launch.launch_defaults import with_launch_defaults
from ltui.app.launch.local_machine import detect_machine
from ltui.app.launch.training_interpreter import (
    REQUIRED_PACKAGES,
    choose_python,
    class_faults,
    class_uses,
    malicious_packages,
    missing_class_imports,
    missing_packages,
    probe_interpreter,
)
from ltui.training.config.device_selection import Machine
from ltui.training.config.preflight import CheckedConfiguration, overridden_paths, preflight
from ltui.training.config.presets import (
    START_FROM,
    Preset,
    build_spec,
    load_preset,
    required_modules,
)
from ltui.training.config.run_spec import RunSpec
from ltui.training.config.structure_check import locate_fault
from ltui.training.config.yaml_document import Fault
from ltui.training.lifecycle.launch_run import launch
from ltui.training.lifecycle.resume_run import find_start_checkpoint
from ltui.training.lifecycle.run_queue import enqueue
from ltui.training.nodes.link_key import KEY_FILE_NAME, LinkKey
from ltui.training.problem import Problem, ProblemError
from ltui.training.state.run_labels import RunLabels
from ltui.training.state.run_queue import QueueEntry
from ltui.training.state.run_snapshot import CheckpointInfo
from ltui.training.store.frozen_code import code_to_run, copied_path
from ltui.training.store.labels_file import files_at_launch
from ltui.training.store.run_directory import RunDir, new_run_id


class LaunchRequest(Struct, frozen=True, kw_only=True):
    """A preset with overrides and an interpreter, after the checks that take a tenth of a
    second."""

    preset: Preset
    overrides: tuple[str, ...]
    python: str
    machine: Machine | None = None
    """The machine that will train, if it is another one."""

    def spec(self, run_id: str, name: str, created_at: float) -> RunSpec:
        """Return the specification of a run with this id and name."""
        return build_spec(
            self.preset,
            self.overrides,
            id=run_id,
            name=name,
            cwd=Path.cwd(),
            python=self.python,
            created_at=created_at,
            machine=self.machine or detect_machine(os.environ),
        )


def prepare_launch(
    name: str,
    overrides: Sequence[str],
    named_python: str | None,
    machine: Machine | None = None,
) -> LaunchRequest:
    """Load and check a preset for ``machine``; None means this one.

    Raises ``ProblemError`` with every problem found.
    """
    return prepare_preset_launch(load_preset(name, Path.cwd()), overrides, named_python, machine)


def prepare_preset_launch(
    preset: Preset,
    overrides: Sequence[str],
    named_python: str | None = None,
    machine: Machine | None = None,
) -> LaunchRequest:
    """Check a preset that is loaded already, perhaps after a person edited it.

    What it does not set is as the user's configuration file says. Raises ``ProblemError`` with
    every problem found.
    """
    preset = with_launch_defaults(preset)
    python = choose_python(named_python, os.environ)
    requires = {module: r for r, module in required_modules(preset.requires).items()}
    folders = import_folders(preset)
    _check(preset, overrides, python, requires, folders, machine)
    return LaunchRequest(preset=preset, overrides=tuple(overrides), python=python, machine=machine)


def _check(
    preset: Preset,
    overrides: Sequence[str],
    python: str,
    requires: Mapping[str, str],
    folders: Sequence[str],
    machine: Machine | None = None,
) -> CheckedConfiguration:
    """Return the checked configuration of a preset. Raises ``ProblemError`` with every problem."""
    keys = overridden_paths(overrides)
    _reject_ltui_section(keys)
    configuration = preflight(
        preset.document,
        overrides,
        preset.where,
        lines=preset.lines,
        machine=machine or detect_machine(os.environ),
        cpu_ranks=preset.cpu_ranks,
    )
    problems = _interpreter_problems(
        python,
        configuration.document,
        requires,
        folders,
        lambda fault: locate_fault(fault, preset.where, preset.lines, keys),
    )
    if problems:
        raise ProblemError(*problems)
    return configuration


def _interpreter_problems(
    python: str,
    document: Mapping[str, Any],
    requires: Mapping[str, str],
    folders: Sequence[str],
    place: Callable[[Fault], Problem],
) -> list[Problem]:
    """Return the packages that are missing in ``python`` for the configuration, or the problems
    of its classes."""
    uses = class_uses(document)
    needed = {**REQUIRED_PACKAGES, **requires}
    report = probe_interpreter(
        python, list(needed), {use.place: use.class_path for use in uses}, folders
    )
    if malicious := malicious_packages(report):
        return malicious
    # Without torch nearly every class is missing, and those problems would hide the reason.
    return missing_packages(report, {**needed, **missing_class_imports(report), **needed}) or [
        place(fault) for fault in class_faults(uses, report)
    ]


def _reject_ltui_section(keys: Sequence[str]) -> None:
    """Raise ``ProblemError`` for an override of the section ``ltui``.

    The section is read with the file, so an override would have no effect.
    """
    for key in keys:
        if key.split(".")[0] == "ltui":
            raise ProblemError.of(
                where=f"--set {key}",
                what="keys of the section `ltui` cannot be set on the command line.",
                remedy="Change them in the file, or in a copy of it.",
            )


def import_folders(preset: Preset) -> list[str]:
    """Return the folders in which ranks find the user's classes: that of the file and the
    working directory."""
    beside = [] if preset.shipped or preset.path is None else [str(preset.path.parent)]
    return [*beside, str(Path.cwd())]


def changed_spec(spec: RunSpec, overrides: Sequence[str], run_dir: RunDir | None = None) -> RunSpec:
    """Return the specification of a run's next attempt. Raises ``ProblemError`` with every
    problem found.

    ``run_dir`` has the frozen code with which the attempt trains; None means the code of now.
    """
    if spec.config is None:
        raise ProblemError.of(
            where="--set",
            what="this run was started with `ltui exec`, so it has no configuration to change.",
            remedy="Leave --set out, or start the changed command with `ltui exec`.",
        )
    configured = Preset(
        name=spec.preset or spec.id, document=dict(spec.config), cpu_ranks=spec.nproc
    )
    folders = [*spec.python_path, spec.cwd]
    if run_dir is not None and (frozen := code_to_run(run_dir, spec)) is not None:
        folders = [copied_path(run_dir, frozen, folder) for folder in folders]
    checked = _check(configured, overrides, spec.python, {}, folders)
    return spec.with_changes(
        config=checked.document,
        nproc=checked.nproc,
        nodes=checked.nodes,
        # Kept when other keys change, because the configuration contains only the count.
        gpus=checked.gpus if "trainer.devices" in overridden_paths(overrides) else spec.gpus,
        overrides=(*spec.overrides, *overrides),
    )


def start_run(
    home: Path,
    preset: Preset,
    overrides: Sequence[str],
    start_from: str,
    labels: RunLabels,
    name: str = "",
    on_start: Callable[[], None] = lambda: None,
    entry: QueueEntry | None = None,
) -> RunDir:
    """Launch the run of the home screen's form and return once its supervisor answers; with
    ``entry``, put it into the run queue.

    ``start_from`` is ``RUN`` or ``RUN:STEP``, or empty. ``on_start`` is called once everything is
    checked. Raises ``ProblemError`` if there is no run. Blocks; for threads.
    """
    request = prepare_preset_launch(preset, overrides)
    run_id, in_id = new_run_id(home, name or None, "name")
    spec, checkpoint = request.spec(run_id, in_id, time.time()), None
    if start_from:
        try:
            spec, checkpoint = apply_start_from(home, spec, start_from)
        except ProblemError as error:
            raise _at_form_field(error) from error
    on_start()
    # The other machines join with this key; the run's screen shows the command.
    files = {} if spec.nodes is None else {KEY_FILE_NAME: f"{LinkKey.generate().text}\n"}
    files |= files_at_launch(labels)
    start: Callable[..., RunDir] = launch
    if entry is not None:
        # Much may be edited until it starts.
        spec, start = spec.with_changes(freeze=True), partial(enqueue, entry=entry)
    return start(spec, home, start_from=checkpoint, interpreter_checked=True, private_files=files)


def apply_start_from(home: Path, spec: RunSpec, text: str) -> tuple[RunSpec, CheckpointInfo]:
    """Return ``spec`` with the start checkpoint that ``RUN`` or ``RUN:STEP`` names, and the
    checkpoint.

    The checkpoint is read and verified. Raises ``ProblemError`` if there is none.
    """
    source, checkpoint = find_start_checkpoint(home, text)
    named = f"{source.id}:{checkpoint.global_step}"
    return spec.with_changes(start_from=named), checkpoint


def describe_start(home: Path, text: str) -> str:
    """Return the step and run that a new run would start from, for the form, without verifying it.

    Raises ``ProblemError`` if there is no such checkpoint.
    """
    try:
        source, checkpoint = find_start_checkpoint(home, text, verified=False)
    except ProblemError as error:
        raise _at_form_field(error) from error
    return f"step {checkpoint.global_step} of {source.id}"


def _at_form_field(error: ProblemError) -> ProblemError:
    return ProblemError(*(problem._replace(where=START_FROM) for problem in error.problems))
