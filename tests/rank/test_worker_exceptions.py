"""An exception of a DataLoader worker is reported with its original class and message."""

from __future__ import annotations

import pytest
from torch._utils import ExceptionWrapper

from ltui.training.rank.channel import unwrap_worker_exception


class TwoArgumentsError(Exception):
    """Can't be created from one text, so torch raises a RuntimeError in its place."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first}: {second}")


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
    except Exception as forwarded:
        return forwarded
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
        (TwoArgumentsError("a", "b"), "TwoArgumentsError", "a: b"),
    ],
)
def test_the_original_class_and_message_are_restored(
    error: Exception, kind: str, text: str
) -> None:
    raised = caught(error)
    assert "Caught" in str(raised)
    unwrapped = unwrap_worker_exception(type(raised).__name__, str(raised))
    assert unwrapped == (kind, f"{text} (in DataLoader worker process 0)".strip())


def test_other_exceptions_are_unchanged() -> None:
    assert unwrap_worker_exception("ValueError", "Caught nothing") == (
        "ValueError",
        "Caught nothing",
    )
