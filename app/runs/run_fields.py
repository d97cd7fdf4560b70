"""The fields of a run: what filters compare, lists sort by and columns show. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from datetime import datetime
from enum import Enum
from typing import Any

from msgspec import Struct

from ltui.app.runs.run_entry import RunEntry
from ltui.widgets import formats
from ltui.widgets.sanitise import clean_name

Value = str | float | tuple[str, ...] | None


class Kind(str, Enum):
    """Type of the values of a field."""

    TEXT = "a text"
    SETTING = "a setting"
    NUMBER = "a number"
    DURATION = "a duration"
    TIME = "a time"
    SIZE = "a size"
    FLAG = "yes or no"


class Field(Struct, frozen=True):
    """One field. ``value`` returns None, or an empty value, if a run has none."""

    kind: Kind
    about: str
    value: Callable[[RunEntry], Value]


def _of_summary(name: str) -> Callable[[RunEntry], Value]:
    def value(entry: RunEntry) -> Value:
        found: Any = None if entry.summary is None else getattr(entry.summary, name)
        return float(found) if isinstance(found, int) else found

    return value


def _field(kind: Kind, about: str, name: str) -> Field:
    return Field(kind, about, _of_summary(name))


def _detail(entry: RunEntry) -> Value:
    return entry.problem or "" if entry.summary is None else entry.summary.detail


def _goodput(entry: RunEntry) -> Value:
    return None if entry.goodput is None or math.isnan(entry.goodput) else entry.goodput


FIELDS: dict[str, Field] = {
    "id": Field(Kind.TEXT, "id of the run", lambda entry: entry.id),
    "name": Field(Kind.TEXT, "name of the run", lambda entry: entry.name),
    "program": _field(Kind.TEXT, "preset, file or command", "program"),
    "state": Field(Kind.TEXT, "state, as the list shows it", lambda entry: entry.state),
    "tag": Field(Kind.TEXT, "tags", lambda entry: entry.labels.tags),
    "group": Field(Kind.TEXT, "group", lambda entry: entry.labels.group),
    "note": Field(Kind.TEXT, "note", lambda entry: entry.labels.note),
    "detail": Field(Kind.TEXT, "details of the state", _detail),
    "star": Field(Kind.FLAG, "the run has a star", lambda entry: float(entry.labels.star)),
    "running": Field(Kind.FLAG, "the run has not ended", lambda entry: float(entry.live)),
    "created": _field(Kind.TIME, "time of the launch", "created_at"),
    "started": _field(Kind.TIME, "start of the last attempt", "started_at"),
    "ended": _field(Kind.TIME, "end of the last attempt", "ended_at"),
    "elapsed": _field(Kind.DURATION, "duration of the last attempt", "elapsed_s"),
    "step": _field(Kind.NUMBER, "global step", "step"),
    "epoch": _field(Kind.NUMBER, "epoch", "epoch"),
    "attempt": _field(Kind.NUMBER, "number of the last attempt", "attempt"),
    "ranks": _field(Kind.NUMBER, "number of ranks", "ranks"),
    "exit": _field(Kind.NUMBER, "exit code", "exit_code"),
    "progress": _field(Kind.NUMBER, "progress, 0 to 1", "done"),
    "speed": _field(Kind.NUMBER, "samples per second", "samples_per_s"),
    "metric": _field(Kind.NUMBER, "main metric", "metric_value"),
    "size": Field(Kind.SIZE, "disk use", lambda entry: entry.size_bytes),
    "goodput": Field(Kind.NUMBER, "time in training steps that count, 0 to 1", _goodput),
}
ALIASES = {"preset": "program", "done": "progress", "live": "running"}
"""Further names of fields, which filters and columns of earlier versions have."""
FIELD_NAMES = tuple(FIELDS)
"""The fields by the names that titles and lists of names have."""
FIELDS.update({alias: FIELDS[name] for alias, name in ALIASES.items()})
"""Other names are settings, such as ``config.lr``, and metrics: the last value of a metric, or with
.min or .max its extreme."""
SETTING = "config."
"""Prefix of the names of settings."""


def kind_of(name: str) -> Kind:
    """Return the type of a field, a setting or a metric."""
    if name in FIELDS:
        return FIELDS[name].kind
    return Kind.SETTING if name.startswith(SETTING) else Kind.NUMBER


def value_of(entry: RunEntry, name: str) -> Value:
    """Return the value of a field, a setting or a metric of a run."""
    if name in FIELDS:
        return FIELDS[name].value(entry)
    if name.startswith(SETTING):
        texts = setting_texts(entry, name)
        number = parse_number(texts[0]) if len(texts) == 1 else None
        return texts or None if number is None or not math.isfinite(number) else number
    return entry.metrics.value(name)


def setting_texts(entry: RunEntry, name: str) -> tuple[str, ...]:
    """Return the value of a setting by its name, or the values of all names with this end.

    ``config.lr`` is the setting ``lr``, else ``model.lr`` and ``optimizer.lr``.
    """
    key = name.removeprefix(SETTING)
    if key in entry.settings:
        return (entry.settings[key],)
    ending = f".{key}"
    values = (value for name, value in entry.settings.items() if name.endswith(ending))
    return tuple(dict.fromkeys(values))


def value_text(entry: RunEntry, name: str, now: float) -> str:
    """Return the value as a list shows it; empty if there is none."""
    value, kind = value_of(entry, name), kind_of(name)
    if kind is Kind.SETTING:
        return ", ".join(setting_texts(entry, name))
    if value is None or value == () or value == "":
        return ""
    if isinstance(value, tuple):
        return ", ".join(value)
    if isinstance(value, str):
        return value
    if kind is Kind.FLAG:
        return "★" if value and name == "star" else "yes" if value else ""
    if kind is Kind.TIME:
        return formats.ago(now - value)
    if kind is Kind.DURATION:
        return formats.duration(value)
    if kind is Kind.SIZE:
        return formats.size(value)
    if FIELDS.get(name) in (FIELDS["progress"], FIELDS["goodput"]):
        return formats.percent(value)
    if FIELDS.get(name) is FIELDS["metric"] and entry.summary is not None:
        return f"{clean_name(entry.summary.metric)} {formats.metric(value)}"
    if name in FIELDS and value.is_integer():
        return str(int(value))
    return formats.metric(value)


_UNITS_S = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(s|min|m|h|d|w)")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtKMGT]?)(i?)[bB]?")
_EXAMPLES = {
    Kind.NUMBER: "a number such as 0.25 or 1e-3",
    Kind.DURATION: "a duration such as 90s, 20min or 1h30m",
    Kind.TIME: "a time such as `3d ago`, 2026-11-20 or 2026-11-20T18:30",
    Kind.SIZE: "a size such as 500MB or 1.5GiB",
    Kind.FLAG: "yes or no",
}


def parse_value(kind: Kind, text: str, now: float) -> float:
    """Return the number that a value of a filter stands for.

    Raises ``ValueError`` with an example if the text is no value of that kind.
    """
    parse = {
        Kind.NUMBER: parse_number,
        Kind.DURATION: _duration,
        Kind.TIME: lambda text: _time(text, now),
        Kind.SIZE: _size,
        Kind.FLAG: _flag,
    }[kind]
    value = parse(text)
    if value is None or not math.isfinite(value):
        raise ValueError(f"Use {_EXAMPLES[kind]}.")
    return value


def parse_number(text: str) -> float | None:
    """Return the number that a text is; None for any other text."""
    try:
        return float(text)
    except ValueError:
        return None


def _duration(text: str) -> float | None:
    parts = _DURATION.findall(text)
    if parts and "".join(map("".join, parts)) == text:
        return sum(float(number) * _UNITS_S[unit] for number, unit in parts)
    return parse_number(text)


def _time(text: str, now: float) -> float | None:
    if text.endswith(" ago"):
        passed = _duration(text[:-4].strip())
        return None if passed is None else now - passed
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def _size(text: str) -> float | None:
    size = _SIZE.fullmatch(text)
    if size is None:
        return None
    power = " kmgt".index(size[2].lower() or " ")
    return float(size[1]) * float((1024 if size[3] else 1000) ** power)


def _flag(text: str) -> float | None:
    return {"yes": 1.0, "true": 1.0, "1": 1.0, "no": 0.0, "false": 0.0, "0": 0.0}.get(text.lower())
