"""Profile some steps of a live run, as ``ltui profile`` does, and read profiles."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from msgspec.structs import replace

from ltui.app.actions.check_arguments import check
from ltui.app.live.run_requests import ANSWER_TIMEOUT_S, require_live, send_request
from ltui.training.diagnosis.profile_summary import Profile, ProfileState
from ltui.training.lifecycle.run_status import current_snapshot
from ltui.training.problem import ProblemError
from ltui.training.shared.profile_request import DEFAULT_RANKS, DEFAULT_STEPS
from ltui.training.state.run_snapshot import LIVE
from ltui.training.store.find_run import find_run
from ltui.training.store.profile_files import read_profile
from ltui.training.store.run_directory import RunDir, ltui_home

_POLL_S, _LIVE_S = 0.2, 2.0
"""Seconds between reads of a profile, and of the state of its run."""
_ENDING_S = 30.0
"""Seconds that a supervisor may take to complete a profile after its run has ended."""


def profile(
    run: str, *, ranks: str = DEFAULT_RANKS, steps: int = DEFAULT_STEPS, memory: bool = False
) -> Profile:
    """Profile ``steps`` steps of a live run and return the result, which takes some seconds.

    ``ranks``: numbers, ``slowest`` and ``median``, with commas. Its ``state`` is ``failed``, with a
    ``reason``, if there is no result. Raises ``ProblemError`` if the run refuses.
    """
    check("ranks", ranks, str)
    check("steps", steps, int)
    run_dir = find_run(ltui_home(), run)
    return follow(run_dir, begin(run_dir, ranks=ranks, steps=steps, memory=memory))


def last_profile(run: str) -> Profile:
    """Return the last profile of a run. Raises ``ProblemError`` if there is none."""
    run_dir = find_run(ltui_home(to_write=False), run)
    found = read_profile(run_dir)
    if found is None:
        raise ProblemError.of(
            where=run_dir.id,
            what="there is no profile of this run.",
            remedy=f"Make one while it trains: ltui profile {run_dir.id}",
        )
    return _checked(run_dir, found)


def begin(
    run_dir: RunDir,
    *,
    ranks: str = DEFAULT_RANKS,
    steps: int = DEFAULT_STEPS,
    memory: bool = False,
) -> int:
    """Request a profile and return its number. Raises ``ProblemError`` if the run refuses."""
    require_live(run_dir)
    request = {"cmd": "profile", "ranks": ranks, "steps": steps, "memory": memory}
    request["request_id"] = os.urandom(8).hex()
    try:
        number = send_request(run_dir, request, ANSWER_TIMEOUT_S).get("number")
    except ProblemError:
        # A supervisor that was killed may have begun it without an answer; the next one refuses.
        begun = read_profile(run_dir)
        if begun is None or begun.request_id != request["request_id"]:
            raise
        number = begun.number
    return number if isinstance(number, int) else 0


def follow(run_dir: RunDir, number: int, show: Callable[[Profile], None] | None = None) -> Profile:
    """Wait until a profile is over and return it. ``show`` is called for each new state."""
    shown: ProfileState | None = None
    live_at = ended_at = time.monotonic()
    while True:
        found = read_profile(run_dir, number)
        now_s = time.monotonic()
        if found is not None and show is not None and found.state is not shown:
            shown = found.state
            show(found)
        if found is not None and found.is_over:
            return found
        if now_s - live_at >= _LIVE_S:
            live_at = now_s
            if current_snapshot(run_dir).state in LIVE:
                ended_at = now_s
            elif found is None or now_s - ended_at >= _ENDING_S:
                return _checked(run_dir, found or _missing(number))
        time.sleep(_POLL_S)


def _missing(number: int) -> Profile:
    return Profile(number=number, attempt=0, state=ProfileState.WAITING, ranks=(), first=0, last=0)


def _checked(run_dir: RunDir, found: Profile) -> Profile:
    """Return a profile, as failed if it is incomplete and its run is not live any more."""
    if found.is_over or current_snapshot(run_dir).state in LIVE:
        return found
    reason = "the run ended before it was complete"
    return replace(found, state=ProfileState.FAILED, reason=reason)
