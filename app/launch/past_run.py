"""Resume a past run or start a new one with its settings: the choices, their checks and the
start."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from ltui.app.launch.build_spec import apply_start_from, changed_spec
from ltui.app.launch.launch_text import launch_summary
from ltui.app.presentation.run_configuration import value_text
from ltui.training.config.device_selection import Machine
from ltui.training.config.ltui_section import Knob
from ltui.training.config.preflight import apply_overrides
from ltui.training.config.presets import Preset, apply_form, load_preset
from ltui.training.config.run_spec import RunSpec
from ltui.training.config.yaml_document import Document, value_at, with_value
from ltui.training.lifecycle.run_status import resolve_snapshot
from ltui.training.problem import Problem, ProblemError
from ltui.training.state.good_checkpoints import badness, nan_since
from ltui.training.state.run_labels import RunLabels
from ltui.training.state.run_snapshot import LIVE, CheckpointInfo, RunState
from ltui.training.store.frozen_code import changed_files, differs_text, frozen_code_of, listed
from ltui.training.store.labels_file import files_at_launch, read_labels
from ltui.training.store.run_checkpoints import furthest_checkpoint, list_checkpoints
from ltui.training.store.run_directory import RunDir, new_run_id
from ltui.widgets import formats

RESUME, FROM_CHECKPOINT, FROM_START = "resume", "from checkpoint", "from start"
"""Modes: another attempt of the run, a new run from its checkpoint, a new run from the
beginning."""
OTHER_CHANGES = "other changes"
"""Name of the form field for changes of keys that have no field of their own."""
NEWEST = "newest"
"""Value of the checkpoint field that means the checkpoint of a resume."""
_END_KNOBS = (
    Knob(key="trainer.max_epochs", label="epochs", type="int", min=-1),
    Knob(key="trainer.max_steps", label="steps", type="int", min=-1),
)
"""Form fields for the end of a run, which are added if its preset has none."""
_DEVICES = Knob(key="trainer.devices", label="devices", type="devices")
"""Form field for the devices of a run whose preset is not available."""


class PastRun(Struct, frozen=True, kw_only=True):
    """A run as the base of another attempt or of a new run."""

    run_dir: RunDir
    spec: RunSpec
    preset: Preset
    """The configuration of the run, with the form fields of its preset."""
    checkpoints: tuple[CheckpointInfo, ...]
    """Checkpoints that are not known to be damaged. The first one is that of a resume, if there
    is a good one."""
    nan_since: int | None = None
    """Step since which the loss is NaN."""
    replaced: Mapping[str, str] = field(default_factory=dict)
    """Path of a checkpoint -> sentence about the steps that a resume from it replaces."""
    state: RunState
    attempt: int
    changed: tuple[str, ...] = ()
    """What later attempts changed: ``learning_rate 0.02 (attempt 2; attempt 1: 0.002)``."""
    code: str = ""
    """How the code of now differs from the frozen code of the run; empty if it does not."""
    environment: str = ""
    """How the environment of now differs from that of the last attempt; empty if it does not."""

    @property
    def modes(self) -> tuple[str, ...]:
        """Return the modes that this run allows."""
        resume = (RESUME,) if self.checkpoints and self.state not in LIVE else ()
        # A user's command cannot be given a checkpoint of another run.
        from_it = (FROM_CHECKPOINT,) if self.checkpoints and self.spec.config is not None else ()
        # Without a good checkpoint the beginning is proposed.
        is_good = bool(self.checkpoints) and self.badness(self.checkpoints[0]) is None
        return (*resume, *from_it, FROM_START) if is_good else (FROM_START, *resume, *from_it)

    def badness(self, checkpoint: CheckpointInfo) -> str | None:
        """Return why a run should not continue from a checkpoint, or None if it should."""
        return badness(checkpoint, self.nan_since)

    def checkpoint_of(self, name: str) -> CheckpointInfo | None:
        """Return the checkpoint with this file name, or None for ``NEWEST``."""
        return next((c for c in self.checkpoints if Path(c.path).name == name), None)


class Choice(Struct, frozen=True, kw_only=True):
    """Selections and texts in the form of a past run."""

    mode: str
    checkpoint: str = NEWEST
    texts: Mapping[str, str]
    other: str = ""


class CheckedChoice(Struct, frozen=True, kw_only=True):
    """A choice as overrides, with its configuration errors and a summary."""

    overrides: tuple[str, ...]
    problems: tuple[Problem, ...]
    words: str


def read_past_run(run_dir: RunDir) -> PastRun:
    """Read a run's specification and checkpoints. Raises ``ProblemError``. Call it in a thread."""
    # Imported here: the screens import this module when ltui starts.
    from ltui.training.lifecycle.launch_run import check_not_imported
    from ltui.training.lifecycle.resume_run import replaced_steps
    from ltui.training.store.recorded_environment import recall_environment

    spec = run_dir.read_spec()
    check_not_imported(spec)
    snapshot = resolve_snapshot(run_dir)
    good = [c for c in reversed(list_checkpoints(run_dir.checkpoints_dir)) if c.ok is not False]
    since = nan_since(snapshot.verdicts)
    first = furthest_checkpoint(run_dir.checkpoints_dir, since)
    ordered = sorted(good, key=lambda c: first is None or c.path != first.path)
    return PastRun(
        run_dir=run_dir,
        spec=spec,
        preset=_as_preset(spec),
        checkpoints=tuple(ordered),
        nan_since=since,
        replaced=replaced_steps(run_dir, ordered),
        state=snapshot.state,
        attempt=snapshot.attempt,
        changed=_changed_settings(run_dir) if snapshot.attempt > 1 else (),
        code=_changed_code(run_dir) if spec.freeze else "",
        environment=recall_environment(run_dir, snapshot.attempt).text,
    )


def _changed_code(run_dir: RunDir) -> str:
    frozen = frozen_code_of(run_dir)
    changed = [] if frozen is None else changed_files(run_dir, frozen)
    if frozen is None or not changed:
        return ""
    text = f"{differs_text(frozen.number, len(changed))} ({listed(changed, len(changed))})"
    return f"The {text}. A resume goes on with the frozen code, a new run freezes that of now."


def _changed_settings(run_dir: RunDir) -> tuple[str, ...]:
    """Return the settings that later attempts changed, with their first values if known."""
    # Imported here: the screens import this module when ltui starts.
    from ltui.training.store.history_reader import RunStore

    changed: dict[str, tuple[str, int]] = {}
    first: dict[str, Any] = {}
    with suppress(ProblemError), RunStore(run_dir) as store:
        for attempt in store.attempts():
            for change in attempt.changes:
                key, _, value = change.partition("=")
                changed[key] = value, attempt.number
        reported = [e for e in store.events() if e.kind == "hyperparameters" and e.attempt == 1]
        first = dict(reported[0].data.get("values") or {}) if reported else {}
    texts = []
    for key, (value, number) in changed.items():
        name = key.rpartition(".")[2]
        before = f"; attempt 1: {value_text(first[name])}" if name in first else ""
        texts.append(f"{name} {value} (attempt {number}{before})")
    return tuple(texts)


def _as_preset(spec: RunSpec) -> Preset:
    document: Document = dict(spec.config or {})
    if spec.gpus is not None and spec.config is not None:
        # The configuration of the run contains the number of GPUs that `free:2` resulted in.
        document = with_value(document, _DEVICES.key, spec.gpus)
    knobs = _form_knobs(spec, document) if spec.config is not None else ()
    return Preset(
        name=spec.id,
        title=spec.name,
        knobs=tuple(knob.with_default(value_at(document, knob.key)) for knob in knobs),
        document=document,
        cpu_ranks=spec.nproc,
    )


def _form_knobs(spec: RunSpec, document: Document) -> tuple[Knob, ...]:
    try:
        knobs = load_preset(spec.preset or "", Path(spec.cwd)).knobs
    except ProblemError:
        # The file is gone or damaged by now; the run's own configuration is complete.
        knobs = ()
    knobs = knobs or (_DEVICES,)
    keys = {knob.key for knob in knobs}
    ends = [k for k in _END_KNOBS if k.key not in keys and value_at(document, k.key) is not None]
    if not ends and not keys & {knob.key for knob in _END_KNOBS}:
        ends = [_END_KNOBS[0]]
    return (*knobs, *ends)


def check_choice(past: PastRun, choice: Choice, machine: Machine) -> CheckedChoice:
    """Check a choice by the checks that take no time."""
    overrides: list[str] = []
    problems: list[Problem] = []
    document: Document = {}
    if past.spec.config is not None:
        result = apply_form(past.preset, choice.texts, machine)
        overrides, problems = list(result.overrides), list(result.problems)
        document = result.document
    try:
        others = _other_overrides(past, choice.other)
        document = apply_overrides(document, others)
        overrides += others
    except ProblemError as error:
        problems += [problem._replace(where=OTHER_CHANGES) for problem in error.problems]
    finished = past.state is RunState.FINISHED and choice.mode == RESUME
    if finished and not overrides and choice.checkpoint == NEWEST:
        problems.append(_finished_problem(past))
    summary = "" if problems else _summary(past, choice, document, machine)
    return CheckedChoice(overrides=tuple(overrides), problems=tuple(problems), words=summary)


def _other_overrides(past: PastRun, text: str) -> list[str]:
    if not text.strip():
        return []
    if past.spec.config is None:
        message = "a command has no configuration to change."
        raise ProblemError.of(where=OTHER_CHANGES, what=message)
    try:
        overrides = shlex.split(text)
    except ValueError as error:
        raise ProblemError.of(
            where=OTHER_CHANGES, what=f"the text cannot be split into words: {error}."
        ) from error
    return overrides


def _finished_problem(past: PastRun) -> Problem:
    fields = {knob.key for knob in past.preset.knobs}
    ends = [knob.key for knob in _END_KNOBS if knob.key in fields]
    where = ends[0] if ends else OTHER_CHANGES
    remedy = "Raise this to train longer, or start a new run."
    if past.spec.config is None:
        where, remedy = past.run_dir.id, "Choose an earlier checkpoint, or start a new run."
    return Problem(where=where, what="the run has finished.", remedy=remedy)


def _summary(past: PastRun, choice: Choice, document: Document, machine: Machine) -> str:
    checkpoint = past.checkpoint_of(choice.checkpoint)
    if checkpoint is None and past.checkpoints:
        checkpoint = past.checkpoints[0]
    step = ""
    if checkpoint is not None:
        step = f"from step {formats.count(checkpoint.global_step)}"
        bad = past.badness(checkpoint)
        step += f" (its checkpoint {bad})" if bad and choice.mode != FROM_START else ""
    start = {
        RESUME: f"attempt {past.attempt + 1} of {past.spec.name} {step}",
        FROM_CHECKPOINT: f"a new run {step} of {past.spec.name}",
        FROM_START: "a new run from the beginning",
    }[choice.mode]
    if past.spec.config is not None:
        start = f"{start}: {launch_summary(document, machine, past.spec.nproc)}"
    if choice.mode == RESUME and choice.checkpoint != NEWEST and checkpoint is not None:
        return ". ".join(t for t in (start, past.replaced.get(checkpoint.path)) if t)
    return start


def start_choice(home: Path, past: PastRun, choice: Choice, overrides: tuple[str, ...]) -> RunDir:
    """Start the chosen attempt or run, and return when its supervisor answers.

    Raises ``ProblemError`` if nothing was started. Call it in a thread.
    """
    # Imported here: these modules are not needed while the form is filled in.
    from ltui.training.lifecycle.launch_run import launch
    from ltui.training.lifecycle.resume_run import resume
    from ltui.training.lifecycle.supervisor_client import attempt_environment

    checkpoint = past.checkpoint_of(choice.checkpoint)
    try:
        with_code = past.run_dir if choice.mode == RESUME else None
        spec = changed_spec(past.spec, overrides, with_code) if overrides else None
    except ProblemError as error:
        raise ProblemError(*(_beside_field(problem) for problem in error.problems)) from error
    if choice.mode == RESUME:
        path = None if checkpoint is None else Path(checkpoint.path)
        resume(past.run_dir, spec=spec, checkpoint=path)
        return past.run_dir
    run_id, name = new_run_id(home, None)
    new = (spec or past.spec).with_changes(
        id=run_id, name=name, created_at=time.time(), start_from=None
    )
    # It belongs where the run belongs; a note, a star and a name are of that run alone.
    of_past = read_labels(past.run_dir)
    labels = files_at_launch(RunLabels(tags=of_past.tags, group=of_past.group))
    start = None
    if choice.mode == FROM_CHECKPOINT:
        source = past.run_dir.id
        new, start = apply_start_from(
            home, new, source if checkpoint is None else f"{source}:{checkpoint.global_step}"
        )
    environment = attempt_environment(past.run_dir)
    return launch(new, home, start, private_files=labels, environment=environment)


def _beside_field(problem: Problem) -> Problem:
    """Return a problem of ``--set KEY`` as a problem of the form field of that key."""
    return problem._replace(where=problem.where.removeprefix("--set ").partition("=")[0])
