"""The text of a user's error."""

from __future__ import annotations

from ltui.training.problem import Problem


def test_a_problem_is_one_line() -> None:
    problem = Problem(where="a\nb", what="unexpected key\r\n'x\u2028y'.", remedy="Remove it.")
    assert str(problem) == "a b: unexpected key 'x y'. Remove it."
