"""Execute steps of a run again with an instrument, in a shadow run, as ``ltui rerun`` does.

The shadow begins at the nearest checkpoint before the first step, in a home of its own below that
of ltui (``reruns``), so its folder and its history are apart and no list of runs has it. Its ranks
end by themselves after the last step (``training/rank/step_rerun.py``). ``prepare_rerun`` checks
everything and starts nothing.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from itertools import chain, product
from pathlib import Path

from msgspec import Struct

from ltui.app.actions.rerun_code import code_text, find_effects, frozen_code, sources, with_copy
from ltui.app.actions.rerun_results import (
    STEP_LOSS,
    FirstNan,
    LossComparison,
    Losses,
    RankProfile,
    compare_losses,
    first_nans,
    rank_profiles,
)
from ltui.app.live.run_requests import require_live, send_request, wait_until
from ltui.training.config.run_spec import CheckpointPolicy, RunSpec, StallPolicy
from ltui.training.lifecycle.launch_run import (
    check_not_imported,
    check_start,
    create_run_directory,
    leaving_no_run,
    start_first_attempt,
)
from ltui.training.lifecycle.run_status import current_snapshot
from ltui.training.lifecycle.supervisor_client import AttemptPlan
from ltui.training.problem import ProblemError
from ltui.training.process.identity import lock_holder, start_ticks
from ltui.training.shared.defaults import RERUN_VARIABLE
from ltui.training.state.good_checkpoints import nan_since
from ltui.training.state.metric_name_patterns import is_evaluation, is_training_loss
from ltui.training.state.run_snapshot import LIVE, CheckpointInfo, RunSnapshot
from ltui.training.store.find_run import find_run
from ltui.training.store.frozen_code import FrozenCode, frozen_folder, frozen_list_path
from ltui.training.store.history_reader import RunStore
from ltui.training.store.recorded_environment import recall_environment
from ltui.training.store.run_checkpoints import import_checkpoint, list_checkpoints, verify
from ltui.training.store.run_directory import (
    RunDir,
    list_runs,
    ltui_home,
    make_private_folders,
    new_run_id,
    read_json,
)

FOLDER = "reruns"
"""Name of the home of shadow runs, in that of ltui."""
KEPT = 10
"""Number of shadow runs that are kept."""
MOST_STEPS = 10_000
"""Number of steps that are executed again with an instrument."""
MOST_PROFILED = 50
"""Number of steps that are profiled: a trace of many is too large."""
INSTRUMENTS = ("compare", "nan", "profile", "memory", "pdb")
_KILLED_S = 30.0
"""Seconds for a shadow run to end after it was killed."""
_POLL_S = 0.25


class RerunOptions(Struct, frozen=True, kw_only=True):
    """Which steps are executed again, and with what: the options of ``ltui rerun``."""

    run: str
    first: int
    last: int
    instrument: str = "compare"
    """One of ``INSTRUMENTS``."""
    rank: int = 0
    """The rank in which ``pdb`` stops."""
    debugger: str | None = None
    """Path of the socket at which the terminal of ``pdb`` listens."""


class RerunStart(Struct, frozen=True, kw_only=True):
    """Where and with what steps are executed again, as it is said before the start."""

    run: str
    instrument: str
    attempt: int
    """The attempt of the run whose steps these are."""
    first_step: int
    last_step: int
    started_after: int
    """Step of the checkpoint at which the shadow run begins; 0 for the beginning."""
    code: str
    """Sentences about the code that is used, and how it and the environment differ from those of
    then; before them, which checkpoint is damaged."""
    not_silenced: tuple[str, ...]
    """Lines of the program that may write or send something: ``train.py:41: open(path, "a")``."""


class RerunPlan(Struct, frozen=True, kw_only=True):
    """What will be executed again, after every check but those of the start itself."""

    start: RerunStart
    options: RerunOptions
    original: RunDir
    spec: RunSpec
    frozen: FrozenCode | None
    checkpoint: CheckpointInfo | None
    before: Losses
    """The losses in the history, if they are to be compared."""


class RerunResult(Struct, frozen=True, kw_only=True):
    """What came out of steps that were executed again."""

    start: RerunStart
    shadow: str
    """The id of the shadow run, in ``home``."""
    home: str
    """The ``LTUI_HOME`` of the shadow run."""
    is_complete: bool
    """False if the last step was not executed, or if no rank has sent its profile."""
    detail: str
    """How the shadow ended, or what is missing."""
    comparison: LossComparison | None = None
    nan: tuple[FirstNan, ...] = ()
    """The first NaN of each rank that had one, the earliest first."""
    nan_loss: tuple[int | None, int | None] = (None, None)
    """The steps since which the loss was NaN: in the run, and in the shadow."""
    profiles: tuple[RankProfile, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Return whether the steps were executed with equal losses, or without a NaN."""
        compared = self.comparison
        differs = compared is not None and (compared.first is not None or not compared.is_whole)
        has_nan = self.nan or (self.start.instrument == "nan" and self.nan_loss[1] is not None)
        return self.is_complete and not differs and not has_nan


def rerun(options: RerunOptions) -> RerunResult:
    """Execute steps of a run again, and return what came out. Raises ``ProblemError``."""
    return execute(prepare_rerun(options))


def prepare_rerun(options: RerunOptions) -> RerunPlan:
    """Return what will be executed. Raises ``ProblemError`` with what keeps it from being done."""
    run_dir = find_run(ltui_home(), options.run)
    spec = run_dir.read_spec()
    check_not_imported(spec)
    if spec.nodes is not None:
        what = "the steps of a run on several machines cannot be executed again."
        raise ProblemError.of(where=run_dir.id, what=what)
    with RunStore(run_dir) as store:
        last_step, ranks = store.last_step(), store.attempt_ranks()
        spans = [span for span in store.spans() if options.first <= span.last_step]
    attempt = spans[0].attempt if spans else 1
    _check_options(options, last_step, ranks.get(attempt, ()))
    before: Losses = {}
    if options.instrument == "compare" and not (before := _read_losses(run_dir, options)):
        raise ProblemError.of(
            where=f"--from {options.first} --to {options.last}",
            what="the history has no values of these steps, one by one, to compare with.",
            remedy="Choose steps at which the program has logged its loss (ltui export RUN).",
        )
    frozen = frozen_code(run_dir, spec, attempt)
    recalled = recall_environment(run_dir, attempt)
    spec = _silent_spec(run_dir, spec, attempt, len(ranks.get(attempt, ())), frozen)
    check_start(with_copy(run_dir, spec, frozen))
    checkpoint, damaged = _checkpoint_before(run_dir, spec, options.first)
    code = f"{damaged} {code_text(run_dir, spec, attempt, frozen)} {recalled.text}".strip()
    start = RerunStart(
        run=run_dir.id,
        instrument=options.instrument,
        attempt=attempt,
        first_step=options.first,
        last_step=options.last,
        started_after=0 if checkpoint is None else checkpoint.global_step,
        code=code,
        not_silenced=tuple(find_effects(sources(run_dir, spec, frozen))),
    )
    spec = spec.with_changes(env={**recalled.variables, **spec.env})
    return RerunPlan(
        start=start,
        options=options,
        original=run_dir,
        spec=spec,
        frozen=frozen,
        checkpoint=checkpoint,
        before=before,
    )


def _check_options(options: RerunOptions, last_step: int, ranks: Collection[int]) -> None:
    first, last, instrument = options.first, options.last, options.instrument
    where, remedy = f"--from {first} --to {last}", None
    most = MOST_PROFILED if instrument in ("profile", "memory") else MOST_STEPS
    if instrument not in INSTRUMENTS or (instrument == "pdb" and options.debugger is None):
        where = f"--with {instrument}"
        what = "it needs the terminal of the command `ltui rerun` without --json."
        if instrument != "pdb":
            what = f"there is no such instrument. Choose from: {', '.join(INSTRUMENTS)}."
    elif instrument == "pdb" and ranks and options.rank not in ranks:
        where, what = f"--rank {options.rank}", f"the run has ranks 0 to {max(ranks)}."
    elif not 1 <= first <= last:
        what = "the first step must be 1 or more, and the last one not before it."
    elif last - first >= most:
        what, remedy = f"at most {most:,} steps have {instrument}.", "Choose fewer steps."
    elif (last if instrument == "compare" else first - 1) > last_step:
        what = f"the run has made steps 1 to {last_step}." if last_step else "it has made no step."
    else:
        return
    raise ProblemError.of(where=where, what=what, remedy=remedy)


def _read_losses(run_dir: RunDir, options: RerunOptions) -> Losses:
    """Return the losses of the steps; all metrics of the training if no loss was logged."""
    losses: dict[tuple[str, int], dict[int, tuple[float, ...]]] = {}
    with RunStore(run_dir) as store:
        names = [name for name in store.metric_names() if not is_evaluation(name)]
        wanted = [name for name in names if is_training_loss(name)] or names
        every_rank = {rank for ranks in store.attempt_ranks().values() for rank in ranks}
        limits = {"first_step": options.first, "last_step": options.last, "max_rows": MOST_STEPS}
        for name, rank in product((*wanted, STEP_LOSS), every_rank):
            curve = store.curve(name, rank=rank, max_points=1 << 30, **limits)
            series: dict[int, tuple[float, ...]] = {}
            for step, value, count in zip(curve.steps, curve.mean, curve.count, strict=True):
                if count <= 1 and step.is_integer():  # else it is a window of several steps
                    series[int(step)] = (*series.get(int(step), ()), float(value))
            if any(map(math.isfinite, chain(*series.values()))) or (series and name != STEP_LOSS):
                losses[name, rank] = series
    return losses


def _silent_spec(
    run_dir: RunDir, spec: RunSpec, attempt: int, ranks: int, frozen: FrozenCode | None
) -> RunSpec:
    """Return a specification whose run calls nobody, saves nothing and does not start again.

    Its configuration is that of the attempt, which a later one may have changed.
    """
    if spec.config is not None:
        config = (read_json(run_dir.config_path(attempt)) or {}).get("config")
        config = config if isinstance(config, dict) else spec.config
        spec = spec.with_changes(config=config, nproc=ranks or spec.nproc, after_fit=())
    return spec.with_changes(
        checkpoint=CheckpointPolicy(every_s=0.0),
        stall=StallPolicy(floor_s=spec.stall.floor_s, slow_phase_s=spec.stall.slow_phase_s),
        restarts=0,
        mirror=None,
        freeze=frozen is not None,
        code_copy=1 if frozen is None else frozen.number,
    )


def _checkpoint_before(
    run_dir: RunDir, spec: RunSpec, first: int
) -> tuple[CheckpointInfo | None, str]:
    """Return the nearest undamaged checkpoint after which ``first`` is still to be executed, and a
    sentence that names damaged ones after it."""
    saved = list_checkpoints(run_dir.checkpoints_dir)
    usable = [c for c in saved if c.global_step < first and c.ok is not False and not c.superseded]
    damaged = ""
    for checkpoint in reversed(usable):
        if verify(checkpoint).ok:
            return checkpoint, damaged
        damaged = f"{damaged} The checkpoint of step {checkpoint.global_step} is damaged.".lstrip()
    if spec.start_from is not None:
        what = f"it began with {spec.start_from}, and has no checkpoint before step {first}."
        raise ProblemError.of(where=run_dir.id, what=what)
    return None, damaged


def execute(plan: RerunPlan, on_step: Callable[[int], None] = lambda _: None) -> RerunResult:
    """Run the shadow to its end, and return what came out.

    ``on_step`` is called with the step that it has reached. If the wait is interrupted, the shadow
    is killed; if this process is, the supervisor of the shadow does so. Raises ``ProblemError`` if
    it could not be started.
    """
    shadow = _start(plan)
    try:
        snapshot = current_snapshot(shadow)
        while snapshot.state in LIVE:
            on_step(snapshot.global_step or plan.start.started_after)
            time.sleep(_POLL_S)
            snapshot = current_snapshot(shadow)
    except BaseException:
        _kill(shadow)
        raise
    finally:
        # They are those of the original, and may be large.
        shutil.rmtree(shadow.checkpoints_dir, ignore_errors=True)
    return _result(plan, shadow, snapshot)


def _start(plan: RerunPlan) -> RunDir:
    home = plan.original.home / FOLDER
    make_private_folders(home / "runs")
    for number, old in enumerate(list_runs(home), 1):
        if lock_holder(old.lock_path) is not None:
            continue
        if number >= KEPT:
            shutil.rmtree(old.path, ignore_errors=True)
        elif old.engine_start_path(1).exists():
            # It has ended. If its command was killed, the checkpoints are still there.
            shutil.rmtree(old.checkpoints_dir, ignore_errors=True)
    run_id, _ = new_run_id(home, plan.original.id[:-5])
    shadow = RunDir(home / "runs" / run_id)
    options, outputs = plan.options, shadow.path / "silenced"
    steps = {"first": options.first, "last": options.last, "after": plan.start.started_after}
    how = {"instrument": options.instrument, "rank": options.rank, "debugger": options.debugger}
    owner = os.getpid(), start_ticks(os.getpid())
    env = {
        **plan.spec.env,
        RERUN_VARIABLE: json.dumps(steps | how | {"owner": owner}),
        "WANDB_MODE": "disabled",
        "NEPTUNE_MODE": "debug",
        "MLFLOW_TRACKING_URI": outputs.as_uri(),
        "TRACKIO_DIR": str(outputs),
    }
    spec = plan.spec.with_changes(id=run_id, created_at=time.time(), env=env)

    def fill(temporary: RunDir) -> None:
        if plan.frozen is not None:
            number = plan.frozen.number
            make_private_folders(temporary.code_dir)
            copy, names = frozen_folder(temporary, number), frozen_list_path(temporary, number)
            shutil.copytree(frozen_folder(plan.original, number), copy, symlinks=True)
            shutil.copy2(frozen_list_path(plan.original, number), names)
            temporary.write_spec(spec)

    try:
        with leaving_no_run(shadow):
            create_run_directory(shadow, spec.with_changes(freeze=False), fill=fill)
            start = AttemptPlan()
            if plan.checkpoint is not None:
                path = Path(import_checkpoint(plan.checkpoint, shadow.checkpoints_dir).path)
                start = AttemptPlan(resume_from=path, resume_step=plan.start.started_after)
        start_first_attempt(shadow, start)
    except BaseException:
        _kill(shadow)
        shutil.rmtree(shadow.path, ignore_errors=True)
        raise
    return shadow


def _kill(shadow: RunDir) -> None:
    """End a shadow run that is live."""
    with suppress(ProblemError):
        if lock_holder(shadow.lock_path) is not None:
            require_live(shadow)
            send_request(shadow, {"cmd": "kill"})
            wait_until(shadow, lambda snapshot: snapshot.state not in LIVE, _KILLED_S)


def _result(plan: RerunPlan, shadow: RunDir, snapshot: RunSnapshot) -> RerunResult:
    comparison: LossComparison | None = None
    if plan.before:
        comparison = compare_losses(plan.before, _read_losses(shadow, plan.options))
    with RunStore(shadow) as store:
        events = store.events()
    options, detail = plan.options, snapshot.detail or snapshot.state.value
    profiles = rank_profiles((e.rank, e.data) for e in events if e.kind == "rerun_profile")
    is_complete = (snapshot.global_step or 0) >= options.last
    if not is_complete:
        detail = f"it ended before step {options.last}: {detail}"
    elif options.instrument in ("profile", "memory") and not profiles:
        is_complete, detail = False, "no rank has sent a profile"
    before, again = (nan_since(s.verdicts) for s in (current_snapshot(plan.original), snapshot))
    return RerunResult(
        start=plan.start,
        shadow=shadow.id,
        home=str(shadow.home),
        is_complete=is_complete,
        detail=detail,
        nan_loss=(before, again),
        comparison=comparison,
        nan=first_nans((e.rank, e.data) for e in events if e.kind == "rerun_nan"),
        profiles=profiles,
    )
