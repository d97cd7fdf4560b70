"""An exception of a DataLoader's worker is told by its own words."""

from __future__ import annotations

import pytest
from torch._utils import ExceptionWrapper

from ltui.training.rank.worker_exceptions import unwrap_worker_exception


class TwoWordsError(Exception):
    """Can't be made of one text, so torch raises a RuntimeError in its place."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one}: {other}")


def caught(error: Exception) -> Exception:
    """Return an exception as torch forwards it."""
    try:
        try:
            raise OSError("no such: disk")
        except OSError as cause:
            raise error from cause
    except Exception:
        wrapped = ExceptionWrapper(where="in DataLoader worker process 0")
    try:
        wrapped.reraise()
    except Exception as again:
        return again
    raise AssertionError


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (
            ValueError("a.beton: sample 3: it is torn"),
            "ValueError",
            "a.beton: sample 3: it is torn",
        ),
        (ValueError("two\nlines: of it"), "ValueError", "two\nlines: of it"),
        (KeyError("label"), "KeyError", "'label'"),
        (ValueError(), "ValueError", ""),
        (TwoWordsError("a", "b"), "TwoWordsError", "a: b"),
    ],
)
def test_own_words(error: Exception, kind: str, text: str) -> None:
    raised = caught(error)
    assert "Caught" in str(raised)
    found = unwrap_worker_exception(type(raised).__name__, str(raised))
    assert found == (kind, f"{text} (in DataLoader worker process 0)".strip())


def test_any_other_stays_as_it_is() -> None:
    assert unwrap_worker_exception("ValueError", "Caught nothing") == (
        "ValueError",
        "Caught nothing",
    )
