"""Check a launch request on the machine and interpreter that would train, then launch the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ltui.app.launch.build_spec import prepare_preset_launch
from ltui.training.config.preset_form import START_FROM
from ltui.training.config.presets import Preset
from ltui.training.config.run_spec import RunSpec
from ltui.training.lifecycle.launch_run import launch
from ltui.training.lifecycle.resume_run import find_start_checkpoint
from ltui.training.nodes.link_key import KEY_FILE_NAME, LinkKey
from ltui.training.problem import ProblemError
from ltui.training.state.run_labels import RunLabels
from ltui.training.state.run_snapshot import CheckpointInfo
from ltui.training.store.labels_file import files_at_launch
from ltui.training.store.run_directory import RunDir, new_run_id


def start_run(
    home: Path,
    preset: Preset,
    overrides: Sequence[str],
    start_from: str,
    labels: RunLabels,
    name: str = "",
    on_start: Callable[[], None] = lambda: None,
) -> RunDir:
    """Launch the run of the home screen's form and return once its supervisor answers.

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
    return launch(spec, home, checkpoint, interpreter_checked=True, private_files=files)


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
