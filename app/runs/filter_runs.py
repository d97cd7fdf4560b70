"""Check filters against the fields of runs, and find and sort the runs that match. Pure."""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from fnmatch import translate

from ltui.app.runs.filter_syntax import (
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
    terms_of,
)
from ltui.app.runs.run_entry import RunEntry
from ltui.app.runs.run_fields import FIELDS, Kind, kind_of, parse_value, value_of
from ltui.training.problem import ProblemError
from ltui.widgets.sanitise import clean_name

Predicate = Callable[[RunEntry], bool]
WORD_FIELDS = ("id", "name", "preset", "state", "tag", "group", "note")
"""Fields in which a bare word is looked for."""
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def run_filter(text: str, now: float) -> Predicate:
    """Return whether a run matches, as a function. Raises ``FilterError``.

    ``now``: unix time that ``3d ago`` refers to.
    """
    return _predicate(parse_filter(text), text, now)


def fields_of(text: str) -> set[str]:
    """Return the names of the fields in a filter. Raises ``FilterError``."""
    return {term.field for term in terms_of(parse_filter(text)) if not isinstance(term, Word)}


def _predicate(tree: Filter, text: str, now: float) -> Predicate:
    if isinstance(tree, AllOf | AnyOf):
        parts = [_predicate(part, text, now) for part in tree.parts]
        every = all if isinstance(tree, AllOf) else any
        return lambda entry: every(part(entry) for part in parts)
    if isinstance(tree, Not):
        part = _predicate(tree.part, text, now)
        return lambda entry: not part(entry)
    if isinstance(tree, Word):
        word = tree.text.lower()
        return lambda entry: any(
            word in value.lower() for name in WORD_FIELDS for value in _texts(entry, name)
        )
    if isinstance(tree, Has):
        return lambda entry: _is_present(value_of(entry, tree.field))
    if isinstance(tree, Match):
        return _match(tree, text)
    return _compare(tree, text, now)


def _match(tree: Match, text: str) -> Predicate:
    name = tree.field
    if name not in FIELDS:
        raise FilterError(text, tree.column, f"there is no field `{name}`.", _nearest(name))
    if kind_of(name) is not Kind.TEXT:
        remedy = f"Use = or <: the values of `{name}` are no texts."
        raise FilterError(text, tree.column, f"`{name}` is {kind_of(name).value}.", remedy)
    if tree.is_regex:
        find: Callable[[str], object] = re.compile(tree.pattern, re.IGNORECASE).search
    elif any(sign in tree.pattern for sign in "*?["):
        find = re.compile(translate(tree.pattern), re.IGNORECASE | re.DOTALL).match
    else:
        part = tree.pattern.lower()
        find = lambda value: part in value.lower()  # noqa: E731 - one of three ways to find it
    return lambda entry: any(find(value) for value in _texts(entry, name))


def _compare(tree: Compare, text: str, now: float) -> Predicate:
    name, kind = tree.field, kind_of(tree.field)
    if kind is Kind.TEXT:
        if tree.operator not in ("=", "!="):
            remedy = f"Use {name}:PATTERN, {name}=TEXT or {name}!=TEXT."
            raise FilterError(text, tree.column, f"`{name}` is a text.", remedy)
        wanted, negated = tree.value.lower(), tree.operator == "!="
        return lambda entry: (wanted in [v.lower() for v in _texts(entry, name)]) != negated
    try:
        value = parse_value(kind, tree.value, now)
    except ValueError as error:
        what = f"`{tree.value}` cannot be compared with `{name}`."
        raise FilterError(text, tree.value_column, what, str(error)) from None
    compare = _COMPARE[tree.operator]

    def holds(entry: RunEntry) -> bool:
        found = value_of(entry, name)
        # NaN differs from every number, so a run whose loss is NaN matches loss!=0.
        return isinstance(found, float) and compare(found, value)

    return holds


def _texts(entry: RunEntry, name: str) -> Sequence[str]:
    value = FIELDS[name].value(entry)
    if isinstance(value, tuple):
        return value
    return (value,) if isinstance(value, str) and value else ()


def _is_present(value: object) -> bool:
    return value not in (None, "", (), 0.0) or (isinstance(value, float) and math.isnan(value))


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name, list(FIELDS), n=1)
    fields = ", ".join(name for name, field in FIELDS.items() if field.kind is Kind.TEXT)
    return f"Did you mean `{near[0]}`?" if near else f"The fields with text are {fields}."


def unknown_metrics(names: Iterable[str], entries: Sequence[RunEntry]) -> list[str]:
    """Return a sentence for each name that is neither a field nor a metric of any run."""
    logged = {name for entry in entries for name in entry.metrics.names}
    sentences = []
    for name in sorted(set(names) - FIELDS.keys()):
        if name in logged or (name.endswith((".min", ".max")) and name[:-4] in logged):
            continue
        near = difflib.get_close_matches(name, [*FIELDS, *logged], n=1)
        hint = f" Did you mean `{clean_name(near[0])}`?" if near else ""
        sentences.append(f"no run has a field or a metric `{clean_name(name)}`.{hint}")
    return sentences


def sort_key(text: str) -> tuple[str, bool]:
    """Return the field of ``--sort`` and whether it is reversed: ``-created`` is."""
    name = text.removeprefix("-")
    if not name:
        raise ProblemError.of(
            where=f"--sort {text}",
            what="the name of a field or metric is missing.",
            remedy="Try --sort=-created or --sort=val/loss.",
        )
    return name, text.startswith("-")


def sorted_by_metric(entries: Iterable[RunEntry]) -> list[RunEntry]:
    """Return the runs by the metric that represents each, best value first; those without last."""

    def key(entry: RunEntry) -> tuple[bool, str, float]:
        run = entry.summary
        if run is None or run.metric_value is None or not math.isfinite(run.metric_value):
            return True, "", 0.0
        return False, run.metric, run.metric_value if run.lower_is_better else -run.metric_value

    return sorted(entries, key=key)


def sorted_runs(entries: Iterable[RunEntry], name: str, *, reverse: bool) -> list[RunEntry]:
    """Return the runs by a field, the lowest value first unless ``reverse`` is set.

    Runs without a value come last, and ties keep their places.
    """
    with_value: list[tuple[float | str, RunEntry]] = []
    without: list[RunEntry] = []
    for entry in entries:
        value = value_of(entry, name)
        key = ", ".join(value) if isinstance(value, tuple) else value
        if key is None or key == "" or (isinstance(key, float) and math.isnan(key)):
            without.append(entry)
        else:
            with_value.append((key.lower() if isinstance(key, str) else key, entry))
    with_value.sort(key=lambda pair: pair[0], reverse=reverse)
    return [entry for _, entry in with_value] + without
