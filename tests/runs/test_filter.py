"""The filter language: text to tree and back, what matches, and errors with their place."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from ltui.app.runs.filter_runs import run_filter, unknown_names
from ltui.app.runs.filter_syntax import (
    COMPARISONS,
    AllOf,
    AnyOf,
    Compare,
    Filter,
    FilterError,
    Has,
    Match,
    Not,
    Word,
    parse_filter,
)
from ltui.app.runs.run_entry import MetricValues, RunEntry, summarise
from ltui.app.runs.run_rows import (
    first_order,
    next_order,
    order_text,
    reversed_order,
    sort_key,
    sorted_runs,
)
from ltui.training.state.run_labels import RunLabels
from ltui.training.state.run_snapshot import MetricValue, RunState
from ltui.training.store.run_directory import RunDir
from tests.app.frames import NOW, snapshot
from tests.runs.filter_text import filter_text

TEXTS = st.text(min_size=1, max_size=8)
TERMS = st.one_of(
    st.builds(Word, TEXTS),
    st.builds(Has, TEXTS),
    st.builds(Match, TEXTS, TEXTS),
    st.builds(Compare, TEXTS, st.sampled_from(COMPARISONS), TEXTS),
    st.builds(Compare, TEXTS, st.sampled_from(COMPARISONS), st.sampled_from(["3d ago", "2h"])),
)


def _joined(parts: st.SearchStrategy[Filter]) -> st.SearchStrategy[Filter]:
    several = st.lists(parts, min_size=2, max_size=3).map(tuple)
    return st.one_of(st.builds(Not, parts), st.builds(AllOf, several), st.builds(AnyOf, several))


@given(st.recursive(TERMS, _joined, max_leaves=8))
@example(Compare("!", "=", "0"))
@example(Compare("x!", "=", "3"))
def test_what_is_printed_is_read_as_the_same_filter(tree: Filter) -> None:
    assert parse_filter(filter_text(tree)) == tree


@given(st.text(alphabet='ab"\\/:=<>!() \tandornothas.*[', max_size=20))
def test_any_text_is_a_filter_or_an_error_with_a_place(text: str) -> None:
    try:
        tree = parse_filter(text)
    except FilterError as error:
        assert 0 <= error.column <= len(text)  # noqa: PT017 - most texts are filters
    else:
        assert parse_filter(filter_text(tree)) == tree


def test_a_regular_expression_is_printed_as_it_was_given() -> None:
    tree = parse_filter(r"name:/^a\/b\d+$/ x")
    assert tree == AllOf((Match("name", r"^a\/b\d+$", True), Word("x")))
    assert parse_filter(filter_text(tree)) == tree


def test_and_binds_more_strongly_than_or_and_not_most_of_all() -> None:
    tree = parse_filter("not a b or c and (d or e)")
    assert tree == AnyOf(
        (
            AllOf((Not(Word("a")), Word("b"))),
            AllOf((Word("c"), AnyOf((Word("d"), Word("e"))))),
        )
    )


def entry(name: str = "calm-fox", labels: RunLabels | None = None, **changes: Any) -> RunEntry:
    logged = changes.pop("metrics", {"val/loss": 0.25})
    metrics = {
        key: MetricValue(last=value, step=9, best_min=0.125, best_max=4.0)
        for key, value in logged.items()
    }
    values = {"state": RunState.FAILED, "preset": "quickstart", "created_at": NOW - 7200.0}
    run = snapshot(id=f"{name}-1a2b", name=name, metrics=metrics, **{**values, **changes})
    return RunEntry(
        run_dir=RunDir(Path("/runs") / run.id),
        summary=summarise(run),
        labels=labels or RunLabels(tags=("base", "v2"), note="The first one"),
        metrics=MetricValues.of(metrics),
        size_bytes=2.5e9,
        settings={"model.lr": "1e-3", "model.optimizer": "AdamW", "a.seed": "1", "b.seed": "2"},
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fox",
        "QUICK fox",
        "first",
        "tag:ba*",
        "tag:v?",
        "name:fox",
        "name:/^calm.*x$/",
        "state=failed",
        "state!=finished",
        "tag=V2",
        "val/loss<0.3",
        "val/loss = 0.25",
        "val/loss.min<=0.125 val/loss.max>3",
        "created<1h ago created>3h ago",
        "created > 2020-01-01",
        "size>2.4GB size<2.4GiB",
        "has:note not has:group not has:star",
        "star=no",
        "nothing or fox",
        "has:val/loss not has:val/acc",
        'note:"first one"',
        "live=no",
        "config.lr=0.001 config.model.lr<0.01",
        "config.optimizer:adam* config.optimizer!=SGD config.optimizer=adamw",
        "config.seed=2 has:config.seed not has:config.momentum",
    ],
)
def test_it_matches(text: str) -> None:
    assert run_filter(text, NOW)(entry())


@pytest.mark.parametrize(
    "text",
    [
        "wolf",
        "fox wolf",
        "tag:b?",
        "name:/^fox/",
        "val/loss<0.25",
        "val/acc<1",
        "created>1h ago",
        "not fox",
        "fox and (wolf or bear)",
        "has:star",
        "config.lr>0.01",
        "config.optimizer<3",
        "config.momentum=0.9",
    ],
)
def test_it_does_not_match(text: str) -> None:
    assert not run_filter(text, NOW)(entry())


@pytest.mark.parametrize(
    ("text", "column", "said"),
    [
        ("fox and", 7, "something is missing"),
        ("(fox or owl", 0, "not closed"),
        ("fox) owl", 3, "closes nothing"),
        ("state==", 6, "`==` is no comparison"),
        ("val/loss<", 9, "a value is missing after `val/loss<`"),
        ("fox val/loss<low", 13, "Use a number such as 0.25"),
        ("started>3x ago", 8, "Use a time such as `3d ago`"),
        ("size>big", 5, "Use a size such as 500MB"),
        ("name:/(/", 5, "the regular expression is wrong"),
        ('fox "owl', 4, "this quote is not closed"),
        ("fox nmae:a", 4, "Did you mean `name`?"),
        ("step:3", 0, "`step` is a number"),
        ("name<3", 0, "`name` is a text"),
        ("config.lr<low", 10, "Use a number"),
        ("or fox", 0, "needs a term before and after"),
        ("has:", 4, "missing after `has:`"),
        ("(" * 50, 41, "nested too deeply"),
    ],
)
def test_an_error_names_its_column(text: str, column: int, said: str) -> None:
    with pytest.raises(FilterError) as caught:
        run_filter(text, NOW)
    (problem,) = caught.value.problems
    assert said in str(problem)
    assert str(problem).startswith(f"filter, column {column + 1}: ")
    assert problem.excerpt == f"  {text}\n  {' ' * column}^"


def test_nan_is_not_less_than_anything_and_is_a_value() -> None:
    run = entry(metrics={"loss": math.nan})
    assert not run_filter("loss<1", NOW)(run)
    assert not run_filter("loss>=1", NOW)(run)
    assert run_filter("has:loss", NOW)(run)


def test_a_value_of_zero_is_a_value_and_a_flag_that_is_not_set_is_none() -> None:
    run = replace(entry(metrics={"loss": 0.0}), settings={"model.dropout": "0"})
    assert run_filter("has:loss has:config.dropout not has:star not has:live", NOW)(run)


def test_runs_without_a_value_come_last_in_both_directions() -> None:
    runs = [entry("a", metrics={"x": 2.0}), entry("b", metrics={}), entry("c", metrics={"x": 1.0})]
    name, reverse = sort_key("x")
    assert [run.name for run in sorted_runs(runs, name, reverse=reverse)] == ["c", "a", "b"]
    name, reverse = sort_key("-x")
    assert [run.name for run in sorted_runs(runs, name, reverse=reverse)] == ["a", "c", "b"]


def test_an_unknown_metric_is_named_with_the_nearest_one() -> None:
    assert unknown_names({"val/los", "step", "val/loss.min"}, [entry()]) == [
        "no run has a field or a metric `val/los`. Did you mean `val/loss`?"
    ]
    assert unknown_names({"config.lr", "config.modl.lr"}, [entry()]) == [
        "no run has a setting `config.modl.lr`. Did you mean `config.model.lr`?"
    ]


def test_numbers_among_the_values_of_a_setting_come_before_texts() -> None:
    runs = [
        replace(entry(name), settings={"lr": text})
        for name, text in (("a", "auto"), ("b", "10"), ("c", "9e-1"))
    ]
    ordered = sorted_runs([*runs, replace(entry("d"), settings={})], "config.lr", reverse=False)
    assert [run.name for run in ordered] == ["c", "b", "a", "d"]


def _mark(text: str) -> tuple[str, str]:
    """Return the part of a text before the place of its error, and the place's character."""
    with pytest.raises(FilterError) as caught:
        parse_filter(text)
    excerpt = caught.value.problems[0].excerpt or ""
    column = excerpt.splitlines()[1].index("^") - 2
    return text[:column], text[column : column + 1]


@given(
    st.sampled_from(["", "fox ", "val/loss<1 and (not has:note) ", "tag:a "]),
    st.text(alphabet="ab^$()[]{}*+?|.-,0123\\w", max_size=16),
)
def test_a_regular_expression_matches_as_python_does_or_the_place_is_marked(
    before: str, pattern: str
) -> None:
    text = f"{before}name:/{pattern}/"
    if re.fullmatch(r"(?:[^/\\]|\\.)*", pattern) is None:
        return  # Its last character escapes the closing slash.
    try:
        expression = re.compile(pattern, re.IGNORECASE)
    except (re.error, OverflowError):
        assert _mark(text) == (f"{before}name:", "/")
    else:
        matches = run_filter(f"name:/{pattern}/", NOW)
        for name in ("a", "b.a", "aab", "w0-1"):
            assert matches(entry(name)) == (expression.search(name) is not None)


def test_the_orders_go_through_the_columns_and_back_to_the_order_of_the_list() -> None:
    orders, order = [], next_order("", ("state", "created", "val/loss", "val/acc"))
    while order:
        orders.append(order)
        order = next_order(order, ("state", "created", "val/loss", "val/acc"))
    assert orders == ["name", "state", "-created", "val/loss", "-val/acc"]
    assert [reversed_order(order) for order in (*orders, "")] == [
        *("-name", "-state", "created", "-val/loss", "val/acc", "created")
    ]
    assert [order_text(order) for order in orders[1:4]] == [
        *("state, A to Z", "created, newest first", "val/loss, lowest first")
    ]
    assert next_order("config.lr", ("state",)) == "name"
    assert (first_order("metric"), order_text("metric")) == ("metric", "metric, best first")
