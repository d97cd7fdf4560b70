"""Start another attempt of a run that has ended, as ``ltui resume`` does.

It has two parts like the start of a new run; see ``start_runs.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from ltui.app.actions.start_runs import (
    OtherNodeError,
    PreparedRun,
    StartedRun,
    StartOptions,
    checked_options,
    prepared_run,
    queue_entry,
    with_run_options,
)
from ltui.training.config.run_spec import RunSpec
from ltui.training.problem import ProblemError
from ltui.training.state.run_queue import QueueEntry
from ltui.training.store.find_run import find_run
from ltui.training.store.run_directory import RunDir, ltui_home


class ResumeOptions(StartOptions, frozen=True, kw_only=True):
    """What another attempt of a run is started with: the options of ``ltui resume``."""

    run: str
    from_step: int | None = None
    """Step of the checkpoint; None for the last good one."""
    overrides: tuple[str, ...] = ()
    code: Literal["now", "then"] | None = None
    """Of frozen code: freeze that of now, or go on with the copy that the run has (default)."""


def resume(options: ResumeOptions) -> StartedRun:
    """Start another attempt of a run that has ended, from its checkpoint.

    Raises ``ProblemError`` as ``start``; then the run is as before.
    """
    return prepare_resume(options).launch()


def prepare_resume(options: ResumeOptions) -> PreparedRun:
    """Return the next attempt of a run, after every check but those of the start itself.

    Raises as ``prepare``.
    """
    from ltui.app.launch.build_spec import changed_spec
    from ltui.app.nodes.node_options import (
        launch_machine,
        listed_hosts,
        resumed_spec,
        resuming_agent,
    )
    from ltui.app.slurm.job_submission import is_submitted, resubmit_run
    from ltui.training.lifecycle.resume_run import resume as resume_run
    from ltui.training.lifecycle.run_processes import latest_attempt
    from ltui.training.nodes.link_key import KEY_FILE_NAME
    from ltui.training.store.recorded_environment import recall_environment

    options = checked_options(options)
    home = ltui_home()
    hosts = listed_hosts(options.nodes)
    agent = None if hosts is not None else resuming_agent(options, launch_machine(options, None))
    if agent is not None:
        raise OtherNodeError(agent)
    entry = queue_entry(options, home)
    run_dir = find_run(home, options.run)
    before = run_dir.read_spec()
    spec: RunSpec | None = None
    if options.overrides:
        spec = changed_spec(before, options.overrides, None if options.code == "now" else run_dir)
    if (options.restarts, options.mirror, options.slots) != (None, None, None):
        spec = with_run_options(spec or before, options)

    submitted = is_submitted(run_dir)
    _check_options(before, options, submitted=submitted)
    if submitted:
        return PreparedRun(
            launch=lambda: StartedRun(id=run_dir.id, job=resubmit_run(run_dir, spec))
        )
    checkpoint: Path | None = None
    warnings: tuple[str, ...] = ()
    if options.from_step is not None:
        checkpoint, warnings = _checkpoint_to_resume(run_dir, options.from_step)
    if differs := recall_environment(run_dir, latest_attempt(run_dir) or 1).text:
        warnings += (differs,)
    if entry is not None:
        return _queued(run_dir, entry, spec, checkpoint, warnings)
    new_spec = spec
    if (spec or before).nodes is not None:
        # Imported here, because most runs use one machine.
        from ltui.app.nodes.start_head import prepare_next_attempt

        new_spec = resumed_spec(spec or before, options, hosts)
        assert new_spec.nodes is not None
        key_file = run_dir.path / KEY_FILE_NAME
        if new_spec.nodes.start in ("by hand", "ssh") and key_file.exists():
            # Copies of it stay valid.
            options = replace(options, key_file=options.key_file or str(key_file))

    code_of_now = options.code == "now"
    frozen: list[str] = []

    def start_with(files: Mapping[str, str]) -> RunDir:
        if (new_spec or before).nodes is not None:
            prepare_next_attempt(run_dir, files)
        told = resume_run(run_dir, spec=new_spec, checkpoint=checkpoint, code_of_now=code_of_now)
        frozen.extend(() if told is None else (told,))
        return run_dir

    return prepared_run(new_spec or before, options, home, start_with, warnings, frozen)


def _queued(
    run_dir: RunDir,
    entry: QueueEntry,
    spec: RunSpec | None,
    checkpoint: Path | None,
    warnings: tuple[str, ...],
) -> PreparedRun:
    """Return an attempt whose launch puts it into the run queue."""

    def launch() -> StartedRun:
        # Imported here: most runs start at once.
        from ltui.training.lifecycle.run_queue import enqueue_resume

        enqueue_resume(run_dir, entry, spec=spec, checkpoint=checkpoint)
        return StartedRun(id=run_dir.id, warnings=warnings, queued=True)

    return PreparedRun(launch=launch)


def _check_options(spec: RunSpec, options: ResumeOptions, *, submitted: bool) -> None:
    """Raise ``ProblemError`` for options that the run cannot have; SLURM starts it if it is
    ``submitted``."""
    if submitted and options.from_step is not None:
        raise ProblemError.of(
            where=f"--from {options.from_step}",
            what="a run of `ltui submit` continues from its last good checkpoint.",
            remedy=f"Start a new run from it: --from {options.run}:{options.from_step}",
        )
    if submitted and options.queue:
        raise ProblemError.of(
            where="--queue",
            what="a run of `ltui submit` waits in the queue of SLURM.",
            remedy="Leave out --queue.",
        )
    if options.queue and options.code == "now":
        raise ProblemError.of(
            where="--code now",
            what="an attempt in the run queue goes on with the code that the run has.",
            remedy="Leave out --queue or --code now.",
        )
    if options.code == "then" and not spec.freeze:
        raise ProblemError.of(
            where="--code then",
            what="the code of this run is not frozen, so it resumes with the code of now.",
            remedy="Freeze the code of a new run with --freeze, or that of now with --code now.",
        )
    if options.code == "now" and submitted:
        raise ProblemError.of(
            where="--code now",
            what="a run of `ltui submit` continues with the code with which it was submitted.",
            remedy="Submit it again as a new run.",
        )


def _checkpoint_to_resume(run_dir: RunDir, step: int) -> tuple[Path, tuple[str, ...]]:
    """Return the checkpoint of a step, and sentences that say if its weights are not good and which
    steps it replaces."""
    from ltui.training.lifecycle.resume_run import checkpoint_of_step, replaced_steps
    from ltui.training.lifecycle.run_status import nan_step
    from ltui.training.state.good_checkpoints import badness

    checkpoint = checkpoint_of_step(run_dir, step, f"--from {step}")
    reason = badness(checkpoint, nan_step(run_dir))
    bad = () if reason is None else (f"The checkpoint of step {step} {reason}.",)
    return Path(checkpoint.path), (*bad, *replaced_steps(run_dir, [checkpoint]).values())
