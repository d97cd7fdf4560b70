"""The filter language for runs: from text to a tree. Pure.

    fox tag:base* and (val/loss<0.2 or state=failed) not has:note started > 3d ago

Terms next to each other are joined by ``and``, which binds more strongly than ``or``. A value or a
word with blanks, brackets or operators stands in double quotes.
"""

from __future__ import annotations

import dataclasses
import json
import re
import warnings
from dataclasses import dataclass
from typing import NoReturn

from ltui.training.problem import Problem, ProblemError

COMPARISONS = ("!=", "<=", ">=", "=", "<", ">")
KEYWORDS = frozenset({"and", "or", "not"})
DEEPEST = 40
"""Maximum number of brackets and ``not`` inside one another."""
_BLANKS = re.compile(r"\s*")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_NAME = re.compile(r'(?:[^\s()":=<>!]|!(?!=))+')
_VALUE = re.compile(r'[^\s()"]+')
_REGEX = re.compile(r"/((?:[^/\\]|\\.)*)/")
_COMPARISON = re.compile(r"\s*(!=|<=|>=|=|<|>)\s*")
_AGO = re.compile(r"\s+ago\b")


class FilterError(ProblemError):
    """A filter that cannot be understood, with the place in its text."""

    def __init__(self, text: str, column: int, what: str, remedy: str | None = None) -> None:
        """``column``: index of the wrong character, from 0."""
        self.column = column
        where = f"filter, column {column + 1}"
        shown = "".join(c if c.isprintable() else " " for c in text)
        excerpt = f"  {shown}\n  {' ' * column}^"
        super().__init__(Problem(where=where, what=what, remedy=remedy, excerpt=excerpt))


@dataclass(frozen=True, slots=True)
class Word:
    """A text that occurs in the name, program, state, tags, group or note of a run."""

    text: str


@dataclass(frozen=True, slots=True)
class Match:
    """``field:pattern``: a glob or a part of the text, or a regular expression."""

    field: str
    pattern: str
    is_regex: bool = False
    column: int = dataclasses.field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Compare:
    """``field<value`` with one of ``COMPARISONS``."""

    field: str
    operator: str
    value: str
    column: int = dataclasses.field(default=0, compare=False)
    value_column: int = dataclasses.field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Has:
    """``has:field``: the run has a value for the field."""

    field: str
    column: int = dataclasses.field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Not:
    """``not``: the part does not match."""

    part: Filter


@dataclass(frozen=True, slots=True)
class AllOf:
    """``and``: every part matches. Without parts, every run matches."""

    parts: tuple[Filter, ...]


@dataclass(frozen=True, slots=True)
class AnyOf:
    """``or``: one of the parts matches."""

    parts: tuple[Filter, ...]


Filter = Word | Match | Compare | Has | Not | AllOf | AnyOf
Term = Word | Match | Compare | Has


def parse_filter(text: str) -> Filter:
    """Return the tree of a filter; ``AllOf(())`` for an empty text. Raises ``FilterError``."""
    parser = _Parser(text)
    if parser.at_end():
        return AllOf(())
    tree = parser.any_of(0)
    if not parser.at_end():
        parser.fail("this bracket closes nothing.", "Remove it, or open one before it.")
    return tree


def compiled(pattern: str) -> re.Pattern[str]:
    """Return a regular expression that ignores case. Raises ``re.error`` and what ``re`` raises."""
    with warnings.catch_warnings():
        # A pattern such as `[[a]` is odd, but its warning would be printed over the screen.
        warnings.simplefilter("ignore", FutureWarning)
        return re.compile(pattern, re.IGNORECASE)


def terms_of(tree: Filter) -> list[Term]:
    """Return all terms of a tree."""
    if isinstance(tree, Not):
        return terms_of(tree.part)
    if isinstance(tree, AllOf | AnyOf):
        return [term for part in tree.parts for term in terms_of(part)]
    return [tree]


class _Parser:
    """A recursive descent over the text of one filter."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def at_end(self) -> bool:
        self._skip(_BLANKS)
        return self._at == len(self._text)

    def fail(self, what: str, remedy: str | None = None, column: int | None = None) -> NoReturn:
        raise FilterError(self._text, self._at if column is None else column, what, remedy)

    def any_of(self, depth: int) -> Filter:
        parts = [self._all_of(depth)]
        while self._keyword("or"):
            parts.append(self._all_of(depth))
        return parts[0] if len(parts) == 1 else AnyOf(tuple(parts))

    def _all_of(self, depth: int) -> Filter:
        parts = [self._negated(depth)]
        while self._keyword("and") or self._term_follows():
            parts.append(self._negated(depth))
        return parts[0] if len(parts) == 1 else AllOf(tuple(parts))

    def _negated(self, depth: int) -> Filter:
        if depth > DEEPEST:
            self.fail("the filter is nested too deeply.", f"Use at most {DEEPEST} levels.")
        if self._keyword("not"):
            return Not(self._negated(depth + 1))
        self._skip(_BLANKS)
        opened = self._at
        if not self._skip_text("("):
            return self._term()
        inner = self.any_of(depth + 1)
        self._skip(_BLANKS)
        if not self._skip_text(")"):
            self.fail("this bracket is not closed.", "Add `)`.", opened)
        return inner

    def _term_follows(self) -> bool:
        return not self.at_end() and self._text[self._at] != ")" and not self._next_is("or")

    def _next_is(self, keyword: str) -> bool:
        name = _NAME.match(self._text, self._at)
        if name is None or name[0].lower() != keyword:
            return False
        # `or=1` is a comparison with a field of that name.
        return self._text[name.end() : name.end() + 1] not in tuple(":=<>!")

    def _keyword(self, keyword: str) -> bool:
        self._skip(_BLANKS)
        if not self._next_is(keyword):
            return False
        self._at += len(keyword)
        return True

    def _term(self) -> Term:
        start = self._at
        was_quoted = self._text[start : start + 1] == '"'
        name = self._word(_NAME)
        if name is None:
            self.fail(*self._missing())
        if self._skip_text(":"):
            return self._pattern(name, start, is_has=name.lower() == "has" and not was_quoted)
        comparison = _COMPARISON.match(self._text, self._at)
        if comparison is None:
            if not was_quoted and name.lower() in KEYWORDS:
                self.fail(f"`{name}` needs a term before and after it.", column=start)
            return Word(name)
        self._at = comparison.end()
        value_column = self._at
        if self._skip_text("="):
            self.fail(f"`{comparison[1]}=` is no comparison.", "Use = != < <= > >=.", value_column)
        value = self._word(_VALUE)
        if value is None:
            self.fail(f"a value is missing after `{name}{comparison[1]}`.")
        if self._skip(_AGO):
            value = f"{value} ago"
        return Compare(name, comparison[1], value, start, value_column)

    def _pattern(self, name: str, start: int, *, is_has: bool) -> Term:
        if is_has:
            wanted = self._word(_NAME)
            if wanted is None:
                self.fail("the name of a field is missing after `has:`.", "Try has:note.")
            return Has(wanted, start)
        regex = _REGEX.match(self._text, self._at)
        if regex is not None:
            column, self._at = self._at, regex.end()
            try:
                compiled(regex[1])
            except (re.error, OverflowError, RecursionError) as error:
                self.fail(f"the regular expression is wrong ({error}).", column=column)
            return Match(name, regex[1], True, start)
        pattern = self._word(_VALUE)
        if pattern is None:
            self.fail(f"a pattern is missing after `{name}:`.", f"To find runs with it: has:{name}")
        return Match(name, pattern, False, start)

    def _missing(self) -> tuple[str, str | None]:
        if self._at == len(self._text):
            return "something is missing here.", "Give a word or a condition such as val/loss<0.2."
        if self._text[self._at] == '"':
            return "this quote is not closed.", None
        return "a word or the name of a field is missing here.", None

    def _word(self, plain: re.Pattern[str]) -> str | None:
        """Return the quoted text or the plain word at the current place; None if neither is."""
        if quoted := _QUOTED.match(self._text, self._at):
            try:
                text = str(json.loads(quoted[0], strict=False))
            except ValueError:
                self.fail("a backslash in quotes stands before what it cannot escape.")
            if not text:
                self.fail("the quotes are empty.")
            self._at = quoted.end()
            return text
        word = plain.match(self._text, self._at)
        if word is None:
            return None
        self._at = word.end()
        return word[0]

    def _skip(self, pattern: re.Pattern[str]) -> bool:
        blank = pattern.match(self._text, self._at)
        self._at = blank.end() if blank is not None else self._at
        return blank is not None

    def _skip_text(self, text: str) -> bool:
        if not self._text.startswith(text, self._at):
            return False
        self._at += len(text)
        return True
