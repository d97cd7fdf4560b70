"""The public module ``ltui.api``: start, watch, wait for, stop and resume runs (docs/api.md).

These are the functions behind the commands. A run is named as on the command line, by its id, a
unique prefix of it, its name, or ``last``. What a person can correct is raised as ``ProblemError``.
"""

from ltui.app.actions.change_queue import (
    QueueChange,
    edit_queued,
    hold_queued,
    move_queued,
    queue,
    release_queued,
    remove_queued,
    retry_queued,
)
from ltui.app.actions.change_runs import (
    Effect,
    ScheduledStop,
    checkpoint,
    continue_run,
    pause,
    stop,
    stop_when,
)
from ltui.app.actions.profile_run import last_profile, profile
from ltui.app.actions.rerun_steps import RerunOptions, RerunResult, rerun
from ltui.app.actions.resume_runs import ResumeOptions, resume
from ltui.app.actions.run_queries import ComparisonResult, compare, diagnose, metrics, runs, status
from ltui.app.actions.start_runs import LaunchOptions, StartedRun, start
from ltui.app.actions.start_sweep import SweepOptions, start_sweep
from ltui.app.actions.wait_for_runs import WaitedRun, WaitResult, events, wait
from ltui.app.launch.sweep_changes import (
    append_to_sweep,
    narrow_sweep,
    resume_sweep,
    retry_trials,
    stop_sweep,
    sweep,
    sweeps,
)
from ltui.training.problem import Problem, ProblemError

__all__ = [
    "ComparisonResult", "Effect", "LaunchOptions", "Problem", "ProblemError", "QueueChange",
    "RerunOptions", "RerunResult", "ResumeOptions", "ScheduledStop", "StartedRun",
    "SweepOptions", "WaitResult", "WaitedRun", "append_to_sweep", "checkpoint", "compare",
    "continue_run", "diagnose", "edit_queued", "events", "hold_queued", "last_profile",
    "metrics", "move_queued", "narrow_sweep", "pause", "profile", "queue", "release_queued",
    "remove_queued", "rerun", "resume", "resume_sweep", "retry_queued", "retry_trials", "runs",
    "start", "start_sweep", "status", "stop", "stop_sweep", "stop_when", "sweep", "sweeps", "wait",
]  # fmt: skip
