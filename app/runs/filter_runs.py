"""Check filters against the fields of runs, and find the runs that match. Pure."""

from __future__ import annotations

import difflib
import operator
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
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
    compiled,
    parse_filter,
    terms_of,
)
from ltui.app.runs.run_entry import RunEntry
from ltui.app.runs.run_fields import (
    FIELD_NAMES,
    FIELDS,
    SETTING,
    Kind,
    kind_of,
    parse_number,
    parse_value,
    setting_texts,
    value_of,
)
from ltui.app.runs.run_list import RunList
from ltui.training.problem import Problem, ProblemError
from ltui.widgets.sanitise import clean_name

Predicate = Callable[[RunEntry], bool]
WORD_FIELDS = ("id", "name", "program", "state", "tag", "group", "note")
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
        absent = (None, "", (), 0.0) if kind_of(tree.field) is Kind.FLAG else (None, "", ())
        return lambda entry: value_of(entry, tree.field) not in absent
    if isinstance(tree, Match):
        return _match(tree, text)
    return _compare(tree, text, now)


def _match(tree: Match, text: str) -> Predicate:
    name = tree.field
    kind = kind_of(name)
    if name not in FIELDS and kind is not Kind.SETTING:
        raise FilterError(text, tree.column, f"there is no field `{name}`.", _nearest(name))
    if kind not in (Kind.TEXT, Kind.SETTING):
        remedy = f"Use = or <: the values of `{name}` are no texts."
        raise FilterError(text, tree.column, f"`{name}` is {kind.value}.", remedy)
    if tree.is_regex:
        find: Callable[[str], object] = compiled(tree.pattern).search
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
        return _equals(tree)
    try:
        value = parse_value(Kind.NUMBER if kind is Kind.SETTING else kind, tree.value, now)
    except ValueError as error:
        if kind is Kind.SETTING and tree.operator in ("=", "!="):
            return _equals(tree)
        what = f"`{tree.value}` cannot be compared with `{name}`."
        raise FilterError(text, tree.value_column, what, str(error)) from None
    compare = _COMPARE[tree.operator]

    if kind is Kind.SETTING and tree.operator == "!=":
        equal = _compare(replace(tree, operator="="), text, now)
        return lambda entry: not equal(entry)

    def holds(entry: RunEntry) -> bool:
        if kind is Kind.SETTING:
            numbers = map(parse_number, setting_texts(entry, name))
            return any(number is not None and compare(number, value) for number in numbers)
        found = value_of(entry, name)
        # NaN differs from every number, so a run whose loss is NaN matches loss!=0.
        return isinstance(found, float) and compare(found, value)

    return holds


def _equals(tree: Compare) -> Predicate:
    wanted, negated = tree.value.lower(), tree.operator == "!="
    return lambda entry: (wanted in [text.lower() for text in _texts(entry, tree.field)]) != negated


def _texts(entry: RunEntry, name: str) -> Sequence[str]:
    if name.startswith(SETTING):
        return setting_texts(entry, name)
    value = FIELDS[name].value(entry)
    if isinstance(value, tuple):
        return value
    return (value,) if isinstance(value, str) and value else ()


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name, FIELD_NAMES, n=1)
    fields = ", ".join(name for name in FIELD_NAMES if kind_of(name) is Kind.TEXT)
    return f"Did you mean `{near[0]}`?" if near else f"The fields with text are {fields}."


def unknown_names(names: Iterable[str], entries: Sequence[RunEntry]) -> list[str]:
    """Return a sentence for each name that is no field, and no metric or setting of any run."""
    logged = {name for entry in entries for name in entry.metrics.names}
    settings = {name for entry in entries for name in entry.settings}
    sentences = []
    for name in sorted(set(names) - FIELDS.keys()):
        if name.startswith(SETTING):
            if any(setting_texts(entry, name) for entry in entries):
                continue
            key = name.removeprefix(SETTING)
            available = settings | {setting.rpartition(".")[2] for setting in settings}
            kind, near = "a setting", difflib.get_close_matches(key, available, n=1)
            near = [f"{SETTING}{setting}" for setting in near]
        elif name in logged or (name.endswith((".min", ".max")) and name[:-4] in logged):
            continue
        else:
            kind = "a field or a metric"
            near = difflib.get_close_matches(name, {*FIELD_NAMES, *logged}, n=1)
        hint = f" Did you mean `{clean_name(near[0])}`?" if near else ""
        sentences.append(f"no run has {kind} `{clean_name(name)}`.{hint}")
    return sentences


def matching_runs(runs: RunList, text: str) -> list[RunEntry]:
    """Return the runs that match the filter ``text``.

    Raise ``ProblemError`` if the filter is wrong, or names a field or metric that no run has.
    """
    matches, used = run_filter(text, time.time()), fields_of(text)
    every_run = runs.complete(runs.poll(), used)
    # A misspelt metric behind `not` would match every run.
    if every_run and (sentences := unknown_names(used, every_run)):
        raise ProblemError(*(Problem(where="--filter", what=text) for text in sentences))
    return [entry for entry in every_run if matches(entry)]
