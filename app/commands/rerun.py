"""``ltui rerun``: execute steps of a run again, and say what came out."""

from __future__ import annotations

import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from ltui.app.actions.rerun_code import SILENCED
from ltui.app.actions.rerun_results import RankProfile
from ltui.app.actions.rerun_steps import (
    RerunOptions,
    RerunResult,
    RerunStart,
    execute,
    prepare_rerun,
)
from ltui.app.command_output import EXIT_DONE, EXIT_FAILED, print_envelope
from ltui.widgets import formats
from ltui.widgets.sanitise import clean_line

DATA = {"rerun": RerunResult}
_WIDTH = 300
"""Characters of a line about the program."""
_LINES = 20
"""Lines of the program that are printed."""
_SHOWN_EVERY_S = 5.0
"""Seconds between two lines about the step that is reached."""


def rerun(options: Namespace) -> int:
    """Run ``ltui rerun RUN --from STEP --to STEP``."""
    with ExitStack() as terminals:
        path: str | None = None
        if options.instrument == "pdb" and not options.json:
            # Imported here: the other instruments need no terminal.
            from ltui.app.foreground.debugger_terminal import debugger_terminal

            path = terminals.enter_context(debugger_terminal())
        plan = prepare_rerun(
            RerunOptions(
                run=options.run,
                first=options.from_step,
                last=options.to,
                instrument=options.instrument,
                rank=options.rank,
                debugger=path,
            )
        )
        # What cannot be stopped is named before it happens, also to programs.
        stream = sys.stderr if options.json else sys.stdout
        for line in _before_start(plan.start):
            print(clean_line(line, _WIDTH), file=stream, flush=True)
        shows_steps = sys.stderr.isatty() and not options.json and path is None
        result = execute(plan, _step_printer() if shows_steps else lambda _: None)
    following = f"LTUI_HOME={shlex.quote(result.home)} ltui show {result.shadow}"
    if options.json:
        print_envelope(result, [following])
    else:
        lines = [*result_lines(result), f"The shadow run: {following}"]
        print("\n".join(clean_line(line, _WIDTH) for line in lines))
    return EXIT_DONE if result.is_equal else EXIT_FAILED


def _step_printer() -> Callable[[int], None]:
    """Return what prints the step that is reached, every few seconds."""
    shown, shown_at = -1, time.monotonic()

    def show(step: int) -> None:
        nonlocal shown, shown_at
        if step != shown and time.monotonic() - shown_at >= _SHOWN_EVERY_S:
            shown, shown_at = step, time.monotonic()
            print(f"at step {step}", file=sys.stderr, flush=True)

    return show


def _before_start(start: RerunStart) -> Iterator[str]:
    after = start.started_after
    place = (
        f"the checkpoint of step {after}" if after else "the beginning, for want of a checkpoint"
    )
    yield (
        f"Steps {start.first_step} to {start.last_step} of {start.run} (attempt {start.attempt}) "
        f"are executed again from {place}, with {start.instrument}."
    )
    yield start.code
    yield f"Silenced: {', '.join(SILENCED)}."
    lines = start.not_silenced
    if not lines:
        yield "No line of the program was found that writes or sends something else."
        return
    yield "Not silenced, so it happens again if these lines are reached:"
    yield from (f"  {line}" for line in lines[:_LINES])
    if len(lines) > _LINES:
        yield f"  and {len(lines) - _LINES} more (--json names all)"


def result_lines(result: RerunResult) -> Iterator[str]:
    """Yield what came out."""
    start, comparison = result.start, result.comparison
    if comparison is not None and (first := comparison.first) is not None:
        yield (
            f"Step {first.step} is the first that differs: {first.metric} of rank {first.rank} was "
            f"{first.before!r} and is {first.again!r}."
        )
        share = f"by {comparison.largest:.3g} of the value at most"
        yield f"{comparison.different_steps} of {comparison.steps} steps differ, {share}."
    elif comparison is not None:
        yield f"Equal bit for bit: the losses of {comparison.steps} steps."
    if comparison is not None and not comparison.is_whole:
        yield f"{comparison.missing_steps} steps of the history have no loss this time."
    yield from (found.text() for found in result.nan)
    if start.instrument == "nan" and not result.nan and result.is_complete:
        before, again = result.nan_loss
        if again is not None:
            yield f"The loss is NaN or infinite since step {again}, but no module had a NaN."
        else:
            yield f"No NaN in steps {start.first_step} to {start.last_step}."
            if before is not None and before <= start.last_step:
                yield f"The run had one at step {before}: its code or its environment was another."
    for profile in result.profiles:
        yield from _profile_lines(profile, start.instrument)
    if not result.is_complete:
        yield f"Incomplete: {result.detail}."


def _profile_lines(profile: RankProfile, instrument: str) -> Iterator[str]:
    place = "tensors on the GPU" if profile.device else "the process"
    yield f"Rank {profile.rank}: at most {formats.size(profile.peak_bytes)} of memory in {place}."
    for operator in profile.operators:
        amount = operator.amount
        text = formats.size(amount) if instrument == "memory" else f"{amount * 1000:.3f} ms"
        yield f"  {text:>12}  {operator.calls:>6} calls  {operator.name}"
    if profile.path is not None:
        yield f"  The trace, for https://ui.perfetto.dev: {profile.path}"
