"""The public module ``ltui.api``: start, watch, wait for, stop and resume runs (docs/api.md).

These are the functions behind the commands. A run is named as on the command line, by its id, a
unique prefix of it, its name, or ``last``. What a person can correct is raised as ``ProblemError``.
"""

from ltui.app.actions.change_runs import (
    Effect,
    ScheduledStop,
    checkpoint,
    continue_run,
    pause,
    stop,
    stop_when,
)
from ltui.app.actions.resume_runs import ResumeOptions, resume
from ltui.app.actions.run_queries import ComparisonResult, compare, diagnose, metrics, runs, status
from ltui.app.actions.start_runs import LaunchOptions, StartedRun, start
from ltui.app.actions.wait_for_runs import WaitedRun, WaitResult, events, wait
from ltui.training.problem import Problem, ProblemError

__all__ = [
    "ComparisonResult", "Effect", "LaunchOptions", "Problem", "ProblemError", "ResumeOptions",
    "ScheduledStop", "StartedRun", "WaitResult", "WaitedRun", "checkpoint", "compare",
    "continue_run", "diagnose", "events", "metrics", "pause", "resume", "runs", "start", "status",
    "stop", "stop_when", "wait",
]  # fmt: skip
