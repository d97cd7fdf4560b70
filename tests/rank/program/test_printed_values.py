"""Values in what a program prints, by the pattern of the user."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest

from ltui.training.rank.program.printed_values import MAX_LINE, PrintedValues, metric_pattern

TRAIN_AND_VAL: dict[str, float] = {"train/loss": 1, "train/acc": 2, "val/loss": 3, "val/acc": 4}

PAIRS: dict[str, dict[str, float]] = {
    "iter 10: loss 4.16, time 12.5ms, mfu -100.00%": {"iter": 10, "loss": 4.16, "mfu": -100.0},
    "step=3 train/loss = 1e-3; lr: 5E-05": {"step": 3, "train/loss": 1e-3, "lr": 5e-5},
    "version 1.2.3, saved to a.pt": {},
    "step 2: train loss 2.002, val loss 3.002": {"step": 2, "train/loss": 2.002, "val/loss": 3.002},
    "Epoch 0 | Train Loss 5.0 | Eval Loss 7.0": {"Epoch": 0, "train/loss": 5, "eval/loss": 7},
    "| end of epoch 1 | time: 5.5s | valid loss 37.20 | valid ppl 41.15":
        {"epoch": 1, "val/loss": 37.2, "val/ppl": 41.15},
    "iter 20: loss 1.0020": {"iter": 20, "loss": 1.002},
    "Train: loss 2.0 acc .5 | Val: loss 3.0 acc .4":
        {"train/loss": 2, "train/acc": 0.5, "val/loss": 3, "val/acc": 0.4},
    "Train Epoch: 1 [0/60000 (0%)]\tLoss: 2.300039": {"Epoch": 1, "train/loss": 2.300039},
    "Test set: Average loss: 0.0478, Accuracy: 9000/10000 (90%)":
        {"test/average_loss": 0.0478, "test/accuracy": 0.9},
    "train loss 1 acc 2 val loss 3 acc 4": TRAIN_AND_VAL,
    "train Loss: 1 Acc: 2 | (val) Loss: 3 Acc: 4": TRAIN_AND_VAL,
    "loss (train): 1, loss (val): 2": {"train/loss": 1, "val/loss": 2},
    "LOSS train 1 valid 2": {"train/loss": 1, "val/loss": 2},
    "Epoch(val) [1][10/10]  loss: 1 accuracy/top1: 2 lr: 0.1 eta: 0:01:00":
        {"val/loss": 1, "val/accuracy/top1": 2, "lr": 0.1},
    "Validation Results - Epoch: 1 Avg accuracy: 0.33 Avg loss: 1.10":
        {"Epoch": 1, "val/avg_accuracy": 0.33, "val/avg_loss": 1.1},
    "VALID epoch 1 loss 2": {"epoch": 1, "val/loss": 2},
    "train_loss=1, val_loss=2": {"train_loss": 1, "val_loss": 2},
    "Train Epoch: 1 time 00:01:23 eta 0:00:30": {"Epoch": 1},
    "best val loss so far: 1.5; train 3, valid 4; set 5; 0G 2.1": {},
    "val_loss improved from 2.5 to 2.1": {},
    "loss = tensor(7.5, device='cuda:0') f1: np.float64(0.5) Acc@1 0.39":
        {"loss": 7.5, "f1": 0.5, "Acc@1": 0.39},
    "val/loss 1 val/loss=2": {"val/loss": 1, "val/loss 2": 2},
    "raw loss 1.5 smoothed loss 2.5": {"raw loss": 1.5, "smoothed loss": 2.5},
    "epoch 0: {'accuracy': 0.68, 'f1': .81}": {"epoch": 0, "accuracy": 0.68, "f1": 0.81},
    "{'loss': '2.302', 'learning_rate': '5e-05', 'epoch': '0.5'}":
        {"loss": 2.302, "learning_rate": 5e-05, "epoch": 0.5},
}  # fmt: skip
LOSS_AND_STEP = r"loss (?P<loss>\S+)( at (?P<step>\d+))?"


@pytest.mark.parametrize(
    ("pattern", "line", "values"),
    [
        *(("pairs", line, values) for line, values in PAIRS.items()),
        ("json", ' {"loss": 0.5, "ok": true, "name": "a", "step": 7}', {"loss": 0.5, "step": 7}),
        ("json", '{"loss": 0.5', {}),
        ("json", "[0.5]", {}),
        (LOSS_AND_STEP, "the loss 0.25 at 9", {"loss": 0.25, "step": 9}),
        (LOSS_AND_STEP, "loss 0.25", {"loss": 0.25}),
        (r"loss (?P<loss>\S+)", "loss unknown", {}),
    ],
)
def test_values_of_a_line(pattern: str, line: str, values: dict[str, float]) -> None:
    assert metric_pattern(pattern)(line) == values


def test_a_loss_of_nan_is_a_value() -> None:
    assert math.isnan(metric_pattern("pairs")("loss: nan")["loss"])


@pytest.mark.parametrize(
    ("lines", "names"),
    [
        (
            "Test Error: \n Accuracy: 95%, Avg loss: 2\n\nloss: 3",
            "test/accuracy test/avg_loss loss",
        ),
        ("***** Eval results *****\n  loss = 1\n  acc = 2\nloss: 3", "eval/loss eval/acc loss"),
        ("Validating...\nloss: 1\nacc: 2\nloss: 3", "val/loss val/acc loss"),
        ("Running validation\nstep 3 loss: 1", "step loss"),
        ("Validation:\nloss: 1\nTraining:\n  loss: 2\nloss: 3", "val/loss train/loss loss"),
        ("Test: [1/2] Loss 1\n *   Acc 2\n  100 Loss 3", "test/loss test/acc Loss"),
        ("Loading the test data\nloss 1", "loss"),
        ("Testing...\nThe weights were saved.\nloss 1", "loss"),
        ("val loss 1\nloss 2", "val/loss loss"),
    ],
)
def test_a_heading_holds_for_the_lines_below_it(lines: str, names: str) -> None:
    read = metric_pattern("pairs")
    assert [name for line in lines.split("\n") for name in read(line)] == names.split()


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


def test_a_progress_bar_is_read_in_its_last_state_without_colours() -> None:
    prints = Prints("pairs")
    for loss in range(200):
        prints(f"\r\x1b[1m{loss}/200\x1b[0m \x1b[32m━━\x1b[0m - loss: {loss}", end="\b" * 40)
    prints("\r\x1b[36mloss:\x1b[0m \x1b[32m0.5\x1b[0m - val_loss: 0.25\r")
    assert prints.recorded == [({"loss": 0.5, "val_loss": 0.25}, None)]
    prints("x" * (MAX_LINE + 1))
    assert prints.stream.lines_skipped == 1


@pytest.mark.parametrize("line", ["STEP: 5, loss 0.5", "Step 5 | loss 0.5"])
def test_the_step_of_the_program_may_have_capitals(line: str) -> None:
    prints = Prints("pairs")
    prints(line)
    assert prints.recorded == [({"loss": 0.5}, 5.0)]


def test_a_pattern_that_finds_nothing_says_so() -> None:
    prints = Prints("loss (?P<loss>[0-9.]+)")
    prints("accuracy 0.5")
    assert "found no value" in str(prints.stream.complaint())


def test_a_pattern_that_takes_too_long_is_not_used_again() -> None:
    prints = Prints(r"(?P<loss>(0+)+1)$")
    for slow in range(3):
        # A single slow line may be a garbage collection.
        assert "found no value" in str(prints.stream.complaint()), slow
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
