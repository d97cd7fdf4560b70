"""Values in what a program prints, by the pattern of the user."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest

from ltui.training.rank.program.metric_pattern import MAX_LINE, metric_pattern
from ltui.training.rank.program.printed_values import PrintedValues


@pytest.mark.parametrize(
    ("pattern", "line", "values"),
    [
        (
            "pairs",
            "iter 10: loss 4.16, time 12.5ms, mfu -100.00%",
            {"iter": 10, "loss": 4.16, "mfu": -100.0},
        ),
        (
            "pairs",
            "step=3 train/loss = 1e-3; lr: 5E-05",
            {"step": 3, "train/loss": 1e-3, "lr": 5e-5},
        ),
        ("pairs", "version 1.2.3, saved to a.pt", {}),
        (
            "pairs",
            "step 20: train loss 2.0020, val loss 3.0020",
            {"step": 20, "train/loss": 2.002, "val/loss": 3.002},
        ),
        (
            "pairs",
            "Epoch 0 | Train Loss 5.0 | Eval Loss 7.0",
            {"Epoch": 0, "train/loss": 5, "eval/loss": 7},
        ),
        (
            "pairs",
            "| end of epoch 1 | time: 5.5s | valid loss 37.20 | valid ppl 41.15",
            {"epoch": 1, "val/loss": 37.2, "val/ppl": 41.15},
        ),
        ("pairs", "iter 20: loss 1.0020", {"iter": 20, "loss": 1.002}),
        (
            "pairs",
            "Train: loss 2.0 acc .5 | Val: loss 3.0 acc .4",
            {"train/loss": 2, "train/acc": 0.5, "val/loss": 3, "val/acc": 0.4},
        ),
        ("pairs", "Train Epoch: 1 [0/60000 (0%)]\tLoss: 2.300039", {"Epoch": 1, "Loss": 2.300039}),
        ("pairs", "Test set: Average loss: 0.0478", {"test/loss": 0.0478}),
        ("pairs", "val/loss 1 val/loss=2", {"val/loss": 1, "val/loss 2": 2}),
        ("pairs", "raw loss 1.5 smoothed loss 2.5", {"raw loss": 1.5, "smoothed loss": 2.5}),
        (
            "pairs",
            "epoch 0: {'accuracy': 0.68, 'f1': .81}",
            {"epoch": 0, "accuracy": 0.68, "f1": 0.81},
        ),
        (
            "pairs",
            "{'loss': '2.302', 'learning_rate': '5e-05', 'epoch': '0.5'}",
            {"loss": 2.302, "learning_rate": 5e-05, "epoch": 0.5},
        ),
        ("json", ' {"loss": 0.5, "ok": true, "name": "a", "step": 7}', {"loss": 0.5, "step": 7}),
        ("json", '{"loss": 0.5', {}),
        ("json", "[0.5]", {}),
        (
            r"loss (?P<loss>\S+)( at (?P<step>\d+))?",
            "the loss 0.25 at 9",
            {"loss": 0.25, "step": 9},
        ),
        (r"loss (?P<loss>\S+)( at (?P<step>\d+))?", "loss 0.25", {"loss": 0.25}),
        (r"loss (?P<loss>\S+)", "loss unknown", {}),
    ],
)
def test_values_of_a_line(pattern: str, line: str, values: dict[str, float]) -> None:
    found = metric_pattern(pattern)(line)
    assert found == values


def test_a_loss_of_nan_is_a_value() -> None:
    assert math.isnan(metric_pattern("pairs")("loss: nan")["loss"])


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("loss (", "no regular expression"),
        ("loss ([0-9]+)", "no named group"),
        ("", "no named group"),
    ],
)
def test_a_pattern_that_cannot_be_used_is_refused(pattern: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        metric_pattern(pattern)


class Prints:
    """A program that prints to a stream whose values are recorded."""

    def __init__(self, pattern: str) -> None:
        self.output = io.StringIO()
        self.recorded: list[tuple[dict[str, float], Any]] = []
        self.stream = PrintedValues(
            self.output, metric_pattern(pattern), lambda *call: self.recorded.append(call)
        )

    def __call__(self, *words: object, end: str = "\n") -> None:
        print(*words, end=end, file=self.stream)


def test_whole_lines_are_read_and_everything_is_written() -> None:
    prints = Prints("pairs")
    prints("loss", end=" ")
    assert prints.recorded == []
    prints("0.5\nloss 0.4 step 2\nloss 0", end="")
    prints(".3")
    prints.stream.writelines(["x" * MAX_LINE, " loss 9\n", "done\n"])
    assert prints.recorded == [
        ({"loss": 0.5}, None),
        ({"loss": 0.4}, 2.0),
        ({"loss": 0.3}, None),
    ]
    assert prints.output.getvalue().count("\n") == 5
    assert prints.stream.complaint() is None
    assert prints.stream.isatty() is False


def test_a_pattern_that_finds_nothing_says_so() -> None:
    prints = Prints("loss (?P<loss>[0-9.]+)")
    prints("accuracy 0.5")
    assert "found no value" in str(prints.stream.complaint())


def test_a_pattern_that_takes_too_long_is_not_used_again() -> None:
    prints = Prints(r"(?P<loss>(0+)+1)$")
    prints("0" * 24 + "2")
    assert "took more than" in str(prints.stream.complaint())
    prints("01")
    assert prints.recorded == []
    assert prints.output.getvalue().endswith("2\n01\n")


def test_an_error_in_the_record_ends_no_program() -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no")

    stream = PrintedValues(io.StringIO(), metric_pattern("pairs"), fails)
    assert stream.write("loss 1\n") == 7
    assert "RuntimeError: no" in str(stream.complaint())
