"""Values that a program logs: their step, and when they are sent."""

from __future__ import annotations

import math
import os
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ltui.training.rank.program import logged_values
from ltui.training.rank.program.logged_values import LoggedValues


class Rank:
    """Takes what is sent, at the step that it sets."""

    def __init__(self) -> None:
        self.values = LoggedValues()
        self.step = 0
        self.sent: list[tuple[int, dict[str, Any]]] = []
        self.threads: set[int] = set()

    def begin(self) -> None:
        """Begin after the first step."""
        self.values.begin(self.send, lambda: self.step)

    def send(self, values: Any, step: int, _t: float) -> None:
        self.sent.append((step, values))
        self.threads.add(threading.get_ident())

    def steps(self) -> list[int]:
        return [step for step, _ in self.sent]


@pytest.fixture
def rank() -> Rank:
    rank = Rank()
    rank.step = 1
    rank.begin()
    rank.step = 0
    return rank


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("before_the_step", [True, False])
def test_a_count_of_the_same_steps_is_kept(rank: Rank, first: int, before_the_step: bool) -> None:
    for number in range(first, first + 20):
        rank.step += not before_the_step
        rank.values.record({"loss": number}, number)
        rank.step += before_the_step
    assert rank.steps() == list(range(first, first + 20))


@pytest.mark.parametrize(
    "count",
    [
        lambda step: step // 10,  # epochs
        lambda step: 64 * step,  # samples
        lambda step: 5000 + step,  # continued from a checkpoint
        lambda step: -step,
        lambda _step: None,
        lambda _step: "first",
        lambda _step: math.nan,
        lambda _step: np.uint8(3),
    ],
)
def test_any_other_count_is_replaced_by_the_step(rank: Rank, count: Any) -> None:
    steps = list(range(100, 200, 10))
    for step in steps:
        rank.step = step
        rank.values.record({"loss": step}, count(step))
    assert rank.steps() == steps


def test_a_curve_does_not_go_back_where_another_count_passes_the_steps(rank: Rank) -> None:
    for micro_batch in range(60):
        rank.step = micro_batch // 4
        rank.values.record({"loss": micro_batch}, micro_batch)
    assert rank.steps() == sorted(rank.steps())
    assert rank.steps()[-1] == 14


def test_only_numbers_are_sent(rank: Rank) -> None:
    weight = torch.nn.Parameter(torch.tensor([3.0]))
    numbers = {"a": 1, "b": True, "c": np.float32(2), "d": weight, "e": np.array([4.0]), "f": 5.5}
    others = {"g": "6", "h": None, "i": torch.ones(2), "j": object(), "k": [7], "l": np.ones(3)}
    others |= {"m": torch.tensor(1 + 2j), "n": 2j}
    rank.values.record(numbers | others)
    assert rank.sent == [(0, {"a": 1.0, "b": 1.0, "c": 2.0, "d": 3.0, "e": 4.0, "f": 5.5})]
    rank.values.record({"nan": math.nan, "inf": -math.inf})
    assert math.isnan(rank.sent[1][1]["nan"])
    assert rank.sent[1][1]["inf"] == -math.inf
    rank.values.record(others)
    assert len(rank.sent) == 2


def test_a_tensor_of_another_class_or_device_is_not_read(rank: Rank) -> None:
    class Distributed(torch.Tensor):
        def __float__(self) -> float:
            raise AssertionError("this would be a collective")

    rank.values.record({"loss": torch.ones(1).as_subclass(Distributed)})
    rank.values.record({"loss": torch.ones(1, device="meta")}, torch.ones(1, device="meta"))
    assert rank.sent == []


@pytest.mark.gpu
def test_a_gpu_is_not_waited_for(rank: Rank) -> None:
    value, number = torch.ones(1, device="cuda"), torch.ones((), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        rank.values.record({"loss": value}, number)
        value.fill_(2)
        rank.values.record({"loss": value}, number)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [values["loss"].item() for _, values in rank.sent] == [1.0, 2.0]


def test_a_value_that_is_logged_twice_is_sent_once(rank: Rank) -> None:
    rank.values.record({"loss": 1.0})
    rank.values.record({"loss": torch.tensor(1.0), "accuracy": 0.5})
    rank.step = 1
    rank.values.record({"loss": 1.0})
    assert rank.sent == [(0, {"loss": 1.0}), (0, {"accuracy": 0.5}), (1, {"loss": 1.0})]


def test_values_from_before_the_first_step_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank()
    for number in range(logged_values.MAX_WAITING + 5):
        rank.values.record({"loss": number}, 0)
    rank.step = 1
    rank.begin()
    assert rank.sent[0] == (0, {"loss": 5.0})
    assert len(rank.sent) == logged_values.MAX_WAITING
    assert set(rank.steps()) == {0}


def test_dropped_calls_are_reported_once_and_counted_at_the_end() -> None:
    rank, reports = Rank(), list[int]()
    channel: Any = SimpleNamespace(event=lambda _kind, _text, dropped: reports.append(dropped))
    for number in range(logged_values.MAX_WAITING + 2):
        rank.values.record({"loss": number}, 0)
        rank.values.report_dropped(channel)
    rank.values.report_dropped(channel, at_end=True)
    rank.values.report_dropped(channel, at_end=True)
    assert reports == [1, 2]


def test_a_value_that_cannot_be_sent_is_reported_and_keeps_no_other_from_being_sent() -> None:
    sent, events = list[int](), list[str]()

    def send(values: dict[str, float], step: int, _epoch: object, _t: float) -> None:
        if "large" in values:
            raise ValueError("too large")
        sent.append(step)

    channel: Any = SimpleNamespace(
        event=lambda _kind, text: events.append(text), pulse=SimpleNamespace(epoch=-1)
    )
    sender: Any = SimpleNamespace(send=send)
    send_value = logged_values.send_through(channel, sender)
    for step, name in enumerate(("loss", "large", "large", "loss")):
        send_value({name: 1.0}, step, 0.0)
    assert sent == [0, 3]
    assert events == ["Values that the program logged are missing (ValueError: too large)."]


def test_values_from_before_a_resume_begin_where_it_resumes() -> None:
    rank = Rank()
    rank.values.record({"loss": 2.0}, 500)
    rank.values.record({"loss": 1.0}, 501)
    rank.step = 501
    rank.begin()
    assert rank.sent == [(500, {"loss": 2.0}), (500, {"loss": 1.0})]


def test_values_of_another_thread_are_sent_by_the_training_thread(rank: Rank) -> None:
    thread = threading.Thread(target=rank.values.record, args=({"loss": 1.0}, 0))
    thread.start()
    thread.join()
    assert rank.sent == []
    rank.values.send_waiting()
    assert rank.sent == [(0, {"loss": 1.0})]
    assert rank.threads == {threading.get_ident()}


def test_a_forked_child_sends_nothing(rank: Rank) -> None:
    child = os.fork()
    if child == 0:
        rank.values.record({"loss": 1.0})
        rank.values.send_waiting()
        os._exit(len(rank.sent))
    assert os.waitpid(child, 0)[1] == 0


def test_nothing_is_kept_after_the_end(rank: Rank) -> None:
    rank.values.end()
    rank.values.record({"loss": 1.0})
    rank.begin()
    assert rank.sent == []


def test_a_program_without_steps_sends_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank()
    rank.values.stepless = lambda: rank.send
    rank.values.record({"loss": 4.0})
    assert rank.sent == []
    monkeypatch.setattr(logged_values, "STEPLESS_S", -1.0)
    rank.values.record({"loss": 3.0})
    rank.values.record({"loss": 2.0}, 40)
    assert rank.sent == [(1, {"loss": 4.0}), (2, {"loss": 3.0}), (40, {"loss": 2.0})]
    rank.step = 7
    rank.begin()
    rank.values.record({"loss": 1.0})
    assert rank.sent[-1] == (7, {"loss": 1.0})
