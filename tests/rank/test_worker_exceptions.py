"""An exception of a DataLoader worker is reported with its original class and message."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any

import pytest
from torch._utils import ExceptionWrapper
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from ltui.training.rank.channel import dead_worker_text, report_exception, unwrap_worker_exception


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


def fetched_from(worker: BaseProcess, error: Exception) -> Exception:
    """Return what torch raises if a batch cannot be taken, and it sees ``worker`` alive."""

    def get(**_: object) -> None:
        raise error

    seen = SimpleNamespace(is_alive=lambda: True)
    iterator: Any = SimpleNamespace(
        _workers=[seen], _workers_status=[True], _data_queue=SimpleNamespace(get=get)
    )
    try:
        _MultiProcessingDataLoaderIter._try_get_data(iterator)
    except Exception as raised:
        iterator._workers = [worker]
        return raised
    raise AssertionError


def test_a_closed_connection_of_a_dead_worker_is_the_death_of_the_worker() -> None:
    worker = multiprocessing.get_context("fork").Process(target=signal.pause)
    worker.start()
    try:
        wrong = fetched_from(worker, ValueError("wrong"))
        assert dead_worker_text(wrong) is None
        reset = fetched_from(worker, ConnectionResetError("reset"))
        assert dead_worker_text(ConnectionResetError("of another kind")) is None
        os.kill(worker.pid or 0, signal.SIGKILL)
        text = f"DataLoader worker (pid(s) {worker.pid}) exited unexpectedly"
        assert dead_worker_text(reset) == text
        assert dead_worker_text(wrong) is None
    finally:
        worker.kill()
        worker.join()


@pytest.mark.parametrize("text", ["DataLoader worker (pid 7) is killed by signal: Killed.", "else"])
def test_the_death_of_a_worker_that_interrupts_a_report_is_reported(text: str) -> None:
    first, second = ConnectionResetError("reset"), RuntimeError(text)
    sent: list[BaseException] = []

    def send(exception: BaseException) -> None:
        sent.append(exception)
        if len(sent) == 1:
            raise second

    report_exception(send, first)
    assert sent == [first, second if text != "else" else first]
