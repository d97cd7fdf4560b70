"""A moment of a run's past, as a person writes it. Pure."""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import datetime, timedelta

from msgspec import Struct

from ltui.training.problem import ProblemError
from ltui.training.state.stop_conditions import UNIT_S, strip_digit_grouping

FORMS = "Write a time such as 03:12 or 2026-11-26T03:12, -12m (before now), or step 4000."
_AGO = re.compile(r"-\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>s|m|min|h|d)")
_STEP = re.compile(r"\d{1,15}")


class AskedMoment(Struct, frozen=True):
    """A time in unix seconds, a step, or, without both, the first moment that was recorded."""

    at: float | None = None
    step: int | None = None


def parse_moment(text: str, newest: float, where: str = "") -> AskedMoment:
    """Return the moment that ``text`` names. Raise ``ProblemError`` if it names none.

    ``newest``, in unix seconds, is the present, or the end of a run that has ended: ``-12m`` is
    twelve minutes before it, and ``03:12`` the last such time until then.
    """
    text = text.strip()
    ago = _AGO.fullmatch(text)
    if ago is not None:
        return AskedMoment(at=max(0.0, newest - float(ago["number"]) * UNIT_S[ago["unit"]]))
    step = _STEP.fullmatch(strip_digit_grouping(text.removeprefix("step")))
    if step is not None:
        return AskedMoment(step=int(step[0]))
    at = clock_time(text, newest)
    if at is None:
        raise ProblemError.of(where=where or text, what="this is no moment.", remedy=FORMS)
    if at > newest:
        raise ProblemError.of(where=where or text, what="it is after the newest moment of the run.")
    return AskedMoment(at=at)


def clock_time(text: str, now: float) -> float | None:
    """Return the unix time of ``03:12``, the last one, or of a date and a time; None for anything
    else."""
    with suppress(ValueError, OverflowError):
        if "-" in text:
            return datetime.fromisoformat(text).timestamp()
        clock = datetime.strptime(text, "%H:%M:%S" if text.count(":") == 2 else "%H:%M")
        at = datetime.fromtimestamp(now).replace(
            hour=clock.hour, minute=clock.minute, second=clock.second, microsecond=0
        )
        return (at if at.timestamp() <= now else at - timedelta(days=1)).timestamp()
    return None
