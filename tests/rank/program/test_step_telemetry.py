"""The rows of a program's steps: which calls of torch are a step, and what belongs to it."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ltui.training.rank import channel as channel_module
from ltui.training.rank.channel import Channel, open_channel
from ltui.training.rank.coordination.coordinator import RankCoordinator
from ltui.training.rank.program import step_telemetry
from ltui.training.rank.program.step_telemetry import StepTelemetry, batch_samples
from ltui.training.rank.resume.loop_state import BoundaryKind
from ltui.training.shared.record_types import StepField
from ltui.training.tensor_queue.control_block import Command
from tests.rank.runs import RunFolder

IMAGES = (torch.zeros(3, 9, 9),) * 4


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


# Made here, because the first optimizer of a process changes its environment.
FIRST, SECOND = optimizer(), optimizer()


@pytest.fixture
def channel(run: RunFolder) -> Iterator[Channel]:
    opened = open_channel(run.rank_environment(), 0)
    yield opened
    opened.close()
    channel_module._current = None


class Program:
    """A program in which ``FIRST`` has just made the first step."""

    def __init__(self, channel: Channel) -> None:
        self.errors: list[BaseException] = []
        self.telemetry = StepTelemetry(
            channel,
            FIRST,
            torch.device("cpu"),
            None,
            lambda _: False,
            lambda: None,
            self.errors.append,
        )
        self.fetch = self.telemetry.timed_fetch(next)
        self.backward = self.telemetry.marked_backward(lambda: None)

    def step(self, stepping: torch.optim.Optimizer) -> None:
        self.telemetry.before_step(stepping, (), {})
        self.telemetry.after_step(stepping, (), {})


@pytest.fixture
def program(channel: Channel) -> Iterator[Program]:
    program = Program(channel)
    yield program
    assert program.errors == []


def test_optimizers_that_step_together_make_one_step(run: RunFolder, program: Program) -> None:
    for _ in range(40):
        program.step(FIRST)
        program.step(SECOND)
    assert run.column(StepField.GLOBAL_STEP) == [*range(2, 42)]


def test_an_optimizer_that_steps_alone_takes_over_with_its_earlier_steps(
    run: RunFolder, program: Program
) -> None:
    for stepping, times in ((FIRST, 3), (SECOND, 20)):
        for _ in range(times):
            program.step(stepping)
    assert run.column(StepField.GLOBAL_STEP) == [2, 3, 4, 21, 22, 23, 24]


def test_batches_of_a_validation_are_no_part_of_a_step(run: RunFolder, program: Program) -> None:
    batches: Any = iter([torch.zeros(count) for count in (4, 4, 100, 100, 8)])
    program.fetch(batches)
    program.fetch(batches)  # its gradients are accumulated
    program.step(FIRST)
    with torch.no_grad():
        program.fetch(batches)
        program.fetch(batches)
    program.fetch(batches)
    program.step(FIRST)
    assert run.column(StepField.SAMPLES) == [8, 8]
    with pytest.raises(StopIteration):
        program.fetch(batches)


def test_a_step_around_a_validation_keeps_its_time_and_samples(
    run: RunFolder, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients are accumulated over batches before and after a validation of 50 s."""
    seconds = iter(range(0, 10_000, 10))
    monkeypatch.setattr(step_telemetry, "clock", lambda: next(seconds) * 10**9)
    program.telemetry.restart()  # at 0 s
    batches: Any = iter([torch.zeros(count) for count in (4, 4, 100, 100, 4, 4)])
    program.fetch(batches)
    program.fetch(batches)  # from 30 s to 40 s
    with torch.no_grad():
        program.fetch(batches)  # from 50 s
        program.fetch(batches)
    program.fetch(batches)  # from 90 s
    program.fetch(batches)
    program.step(FIRST)  # ends at 140 s
    assert run.column(StepField.SAMPLES) == [16]
    assert run.column(StepField.STEP_S) == [140 - (90 - 50)]
    assert run.column(StepField.FETCH_S) == [40]
    assert [event["seconds"] for event in run.events("phase")] == [90 - 50]


def batches(*lengths: int) -> Any:
    return iter([torch.zeros(length) for length in lengths])


def evaluate(program: Program, loader: Any) -> None:
    """Fetch all batches as the training fetches its own."""
    with contextlib.suppress(StopIteration):
        while True:
            program.fetch(loader)


def test_batches_without_a_backward_pass_are_a_validation(
    run: RunFolder, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients are accumulated over two batches, around a validation."""
    seconds = iter(range(0, 10_000, 10))
    monkeypatch.setattr(step_telemetry, "clock", lambda: next(seconds) * 10**9)
    program.telemetry.restart()  # at 0 s
    training = batches(4, 4, 4, 4)
    for _ in range(2):
        program.fetch(training)
        program.backward()
        evaluate(program, batches(100, 100))  # from 30 s; the last question takes two readings
        program.fetch(training)
        program.backward()
        program.step(FIRST)
    assert run.column(StepField.SAMPLES) == [8, 8]
    assert run.column(StepField.STEP_S) == pytest.approx([130 - (100 - 30)] * 2)


@pytest.mark.parametrize("grads", [True, False])
def test_a_validation_after_the_last_step_is_reported_when_the_program_ends(
    run: RunFolder, program: Program, monkeypatch: pytest.MonkeyPatch, grads: bool
) -> None:
    seconds = iter(range(0, 10_000, 10))
    monkeypatch.setattr(step_telemetry, "clock", lambda: next(seconds) * 10**9)
    program.telemetry.restart()  # at 0 s
    training, validation = batches(4, 4), batches(100, 100)
    program.fetch(training)
    program.backward()
    program.step(FIRST)
    program.fetch(training)  # one batch that the program does not train with
    with torch.set_grad_enabled(grads):
        evaluate(program, validation)
    program.telemetry.program_ends()
    program.telemetry.program_ends()
    assert [event["seconds"] for event in run.events("phase")] == [40]


def test_the_end_of_the_training_data_is_no_validation(run: RunFolder, program: Program) -> None:
    program.fetch(training := batches(4, 4))
    program.backward()
    program.step(FIRST)
    program.fetch(training)
    evaluate(program, training)
    program.telemetry.program_ends()
    assert run.events("phase") == []


def test_the_first_batch_of_a_validation_may_be_fetched_in_training_mode(
    run: RunFolder, program: Program
) -> None:
    """ignite does so, and does not ask for a batch after the last."""
    validation = batches(100, 100)
    program.fetch(validation)
    with torch.no_grad():
        program.fetch(validation)
    program.fetch(batches(4))
    program.backward()
    program.step(FIRST)
    assert run.column(StepField.SAMPLES) == [4]


def test_batches_may_be_fetched_ahead_of_their_backward_passes(
    run: RunFolder, program: Program
) -> None:
    """Some Trainers fetch all batches of a step, and one ahead, before they train with them."""
    training = batches(4, 4, 4, 4)
    for count in (3, 2):
        with contextlib.suppress(StopIteration):
            for _ in range(count):
                program.fetch(training)
        program.backward()
        program.backward()
        program.step(FIRST)
    assert run.column(StepField.SAMPLES) == [12, 4]


def test_two_loaders_of_a_step_both_count(run: RunFolder, program: Program) -> None:
    for loaders in ((batches(4), batches(5)), (batches(4), batches(5))):
        for loader in loaders:
            program.fetch(loader)
        program.backward()
        program.step(FIRST)
    assert run.column(StepField.SAMPLES) == [9, 9]


def test_a_program_whose_backward_passes_are_not_seen(run: RunFolder, program: Program) -> None:
    evaluate(program, batches(4, 4))
    program.fetch(batches(4))
    program.step(FIRST)
    assert run.column(StepField.SAMPLES) == [12]


@pytest.mark.parametrize(
    ("batch", "size", "samples"),
    [
        ({"boxes": torch.zeros(12, 4), "images": torch.zeros(4, 3)}, 4, 4),
        ({"boxes": torch.zeros(5, 4), "images": torch.zeros(2, 3)}, 4, 2),  # the last batch
        ({"boxes": torch.zeros(12, 4), "names": ["a", "b"]}, 4, 4),
        ({"boxes": torch.zeros(12, 4), "images": torch.zeros(4, 3)}, None, math.nan),
        ({"ids": torch.zeros(8, 16), "mask": torch.zeros(8, 16)}, None, 8),
        ({"ids": torch.zeros(64, 16)}, 1, 64),  # a data set of whole batches
        ((torch.zeros(8, 3), torch.zeros(8)), 8, 8),
        ((torch.zeros(2, 3, 9, 9), torch.zeros(2)), 4, 2),
        ((torch.zeros(4, 3, 9), torch.zeros(4, 3, 9)), 4, 4),
        ((IMAGES[:4], ({},) * 4), 4, 4),  # tuple(zip(*samples))
        ((IMAGES[:2], ({},) * 2), 3, 2),
        ((IMAGES[:4], IMAGES[:4]), 4, 4),
        ([{"image": image} for image in IMAGES[:4]], 4, 4),
        ([(image, 0) for image in IMAGES[:4]], 4, 4),
        (IMAGES[:4], 4, 4),
        (IMAGES[:2], 4, math.nan),
        (IMAGES[:4], None, math.nan),
        ((torch.zeros(30, 3), torch.zeros(8)), 8, 8),  # a batch of graphs
        (torch.zeros(8, 3), 4, 8),
    ],
)
def test_samples_of_a_batch(batch: Any, size: int | None, samples: float) -> None:
    iterator = SimpleNamespace(_index_sampler=SimpleNamespace(batch_size=size))
    assert batch_samples(batch, iterator) == pytest.approx(samples, nan_ok=True)


def test_other_threads_and_a_telemetry_that_is_off_send_nothing(
    run: RunFolder, program: Program
) -> None:
    thread = threading.Thread(target=program.step, args=(FIRST,))
    thread.start()
    thread.join()
    program.telemetry.switch_off()
    program.step(FIRST)
    assert len(run.steps()) == 0


def test_a_rank_does_not_wait_for_ever_for_others(run: RunFolder, channel: Channel) -> None:
    coordinator = RankCoordinator(channel, 0, 2, patience_s=0.1)
    assert not coordinator.pass_boundary(object(), BoundaryKind.EVALUATION, 1, 2)
    run.request(Command.PAUSE)
    with pytest.raises(TimeoutError, match="not all ranks were here within 0 s"):
        coordinator.pass_boundary(object(), BoundaryKind.EVALUATION, 1, 3)
    coordinator.leave()
