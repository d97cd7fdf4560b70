"""An unsupported version of Lightning, or one with other loops, is reported."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from ltui.training.rank.training_facts import is_too_old
from ltui.training.tensor_queue.control_block import Command
from tests.rank.models import Linear, loader
from tests.rank.runs import RunFolder


@pytest.mark.parametrize(
    ("version", "old"),
    [("2.0.9", True), ("2.4.0 (pytorch_lightning)", True), ("2.5.0", False), ("3.0", False),
     ("2.10.1", False), ("unknown", False)],
)  # fmt: skip
def test_versions(version: str, old: bool) -> None:
    assert is_too_old(version) is old


def test_loops_of_another_lightning_are_found_at_the_start(
    run: RunFolder, fit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ltui.training.rank.coordination import trainer_boundaries
    from ltui.training.rank.lightning_internals import check_validation_signature

    old = SimpleNamespace(epoch_loop=SimpleNamespace(_should_check_val_fx=lambda: True))
    monkeypatch.setattr(
        trainer_boundaries, "check_validation_signature", lambda _: check_validation_signature(old)
    )
    fit(Linear(), loader(2), max_epochs=1)
    (off,) = run.events("steering_off")
    assert "too many positional arguments" in off["error"]
    assert len(run.steps()) == 2, "training and its telemetry continue"


def test_loops_that_the_coordinator_does_not_support_are_reported(
    run: RunFolder, fit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning 2.0 calls ``_should_check_val_fx`` without an argument."""

    from ltui.training.rank import training_facts
    from ltui.training.rank.resume import loop_state

    def fails(trainer: Any) -> bool:
        raise TypeError("_should_check_val_fx() takes 1 positional argument but 2 were given")

    monkeypatch.setattr(loop_state, "validation_is_due", fails)
    monkeypatch.setattr(training_facts, "lightning_version", lambda trainer: "2.0.9")
    handlers: list[Any] = []

    def do(_: Any, index: int) -> None:
        if index == 1:
            run.request(Command.CHECKPOINT)
        handlers.append(signal.getsignal(signal.SIGTERM))

    fit(Linear(do), loader(6), max_epochs=1)
    (off,) = run.events("steering_off")
    assert "_should_check_val_fx" in off["error"]
    (warned,) = run.events("warning")
    assert warned["text"].startswith("Lightning 2.0.9 is older than 2.5")
    assert callable(handlers[0])
    assert handlers[-1] is signal.SIG_DFL, "a signal ends the process again"
