"""Waiting for what a test has begun, as long as it takes and no longer."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def wait_for(
    read: Callable[[], T],
    process: subprocess.Popen[Any] | None = None,
    *,
    wanted: Callable[[T], object] = bool,
    seconds: float = 120,
    period_s: float = 0.03,
) -> T:
    """Return the first value of ``read`` that is ``wanted``; by default, that is true.

    Fail after ``seconds``, and at once when ``process`` has ended without it.
    """
    deadline = time.monotonic() + seconds
    while True:
        # Asked first, because what is waited for may be the last thing that the process does.
        code = None if process is None else process.poll()
        value = read()
        if wanted(value):
            return value
        assert code is None, f"the process ended with {code}; last: {value}"
        assert time.monotonic() < deadline, f"it did not come within {seconds:g} s; last: {value}"
        time.sleep(period_s)
