"""The values of a sweep, the command of a trial, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from ltui.training.config.preflight import split_override
from ltui.training.problem import ProblemError
from ltui.training.sweep.record import trial_command
from ltui.training.sweep.space import (
    cell_of,
    contains,
    grid,
    grid_size,
    narrowed,
    override,
    parse_dimension,
    widened,
)


@pytest.mark.parametrize(
    ("form", "values"),
    [
        ("choice(a, 'b,c', 1e-3, true, null)", ("a", "b,c", 1e-3, True, None)),
        ("choice([64, 32], [128])", ([64, 32], [128])),
        ("range(1,10,3)", (1, 4, 7, 10)),
        ("range(0.1, 0.5, 0.1)", (0.1, 0.2, 0.3, 0.4, 0.5)),
        ("range(1, 3)", (1, 2, 3)),
        ("interval(1e-4, 1e-1, log)", None),
    ],
)
def test_values_are_read_and_written(form: str, values: tuple[Any, ...] | None) -> None:
    read = parse_dimension(f"a.b={form}")
    assert read.listed == values
    assert parse_dimension(f"a.b={read}") == read
    assert all(read.contains(value) for value in values or (0.01,))
    assert not read.contains(0.7)


@pytest.mark.parametrize(
    "form",
    [
        *("choice()", "choice(1, 1)", "choice(a", "choice(.nan)", "range(1)", "range(2, 1)"),
        *("range(1, 4, 9)", "range(a, b)", "interval(0, 1, log)", "interval(1, 2, lin)", "3", ""),
    ],
)
def test_what_names_no_values_is_refused_in_one_sentence(form: str) -> None:
    with pytest.raises(ProblemError) as caught:
        parse_dimension(f"lr={form}")
    assert caught.value.problems[0].where == f"--set lr={form}"


@pytest.mark.parametrize("value", ["a", "1e-3", "yes", "a, b", "[x", "", 1e-05, 3, True, None, [1]])
def test_a_value_is_the_same_as_an_override(value: Any) -> None:
    assert split_override(override("model.x", value)) == ("model.x", value)


def test_a_cell_is_found_again_in_a_wider_space() -> None:
    small = [parse_dimension("a=choice(1, 2)"), parse_dimension("b=range(1, 2)")]
    wide = [widened(small[0], parse_dimension("a=choice(2, 3)")), parse_dimension("b=range(1, 3)")]
    cells = [cell_of(cell) for cell in grid(small)]
    assert grid_size(small) == len(set(cells)) == 4
    assert set(cells) < {cell_of(cell) for cell in grid(wide)}
    assert cell_of({"b": 1, "a": 0.1 + 0.2}) == cell_of({"a": 0.3, "b": 1})
    assert contains(wide, {"a": 3, "b": 3})
    assert not contains(wide, {"a": 3})


def test_a_space_is_narrowed_only_within_itself() -> None:
    old = parse_dimension("lr=interval(1e-4, 1e-1, log)")
    new = parse_dimension("lr=interval(1e-3, 1e-2, log)")
    assert narrowed(old, new) == new
    assert widened(new, old) == old
    for verb, wrong in ((narrowed, "interval(1e-5, 1e-2, log)"), (widened, "choice(1, 2)")):
        with pytest.raises(ProblemError):
            verb(old, parse_dimension(f"lr={wrong}"))


@pytest.mark.parametrize(
    ("command", "arguments", "expected"),
    [
        ("python t.py", "flags", "python t.py --lr 0.1 --name a;b"),
        ("python t.py", "hydra", 'python t.py lr=0.1 name="a;b"'),
        ("python t.py -x{lr} {name} {other}", "flags", "python t.py -x0.1 a;b {other}"),
    ],
)
def test_a_command_gets_its_values_without_a_shell(
    command: str, arguments: str, expected: str
) -> None:
    words = trial_command(tuple(command.split()), {"lr": 0.1, "name": "a;b"}, arguments)
    assert list(words) == expected.split()


def test_a_value_in_braces_is_not_replaced_again() -> None:
    assert trial_command(("x", "{a}{b}"), {"a": "{b}", "b": 1}, "flags") == ("x", "{b}1")
