"""Configuration as plain values: YAML with the line of every key, dotted paths, interpolation.

Numbers are read as by LightningCLI: ``1e-3`` is a number, and a date is a string.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from typing import Any

import yaml
from msgspec import Struct, field

from ltui.training.problem import Problem, ProblemError

Document = dict[str, Any]


_EVENT_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(yaml.SafeLoader):
    """Safe YAML loader that recognises the same numbers as LightningCLI."""


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, regexp) for tag, regexp in resolvers if not tag.endswith((":float", ":timestamp"))
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"""^(?:[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
        |[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+
        |\.[0-9_]+(?:[eE][-+]?[0-9]+)?
        |[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$""",
        re.VERBOSE,
    ),
    list("-+0123456789."),
)


class Source(Struct, frozen=True, kw_only=True):
    """Values of a configuration, and the line (from 1) of each dotted path."""

    values: Document
    lines: Mapping[str, int] = field(default_factory=dict)


class Fault(Struct, frozen=True, kw_only=True):
    """An error at a dotted path, without the place where that path is written."""

    path: str
    what: str
    remedy: str | None = None


def format_value(value: Any) -> str:
    """Return a value for a message: short and in backticks."""
    text = (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )
    text = text if len(text) <= 40 else text[:37] + "..."
    return f"`{text}`"


MOST_LEVELS = 100
"""Maximum nesting of a document. The parser in C needs stack for each level and has no limit."""
MOST_EXPANDED = 100_000
"""Maximum number of values of a document with anchors, each alias counted as what it stands for."""


def check_size(text: str) -> None:
    """Raise ``ValueError`` if a YAML text is nested too deeply, or if its aliases multiply.

    Nine anchors that each repeat the one before ten times stand for a billion values. Raise
    ``yaml.YAMLError`` if it is no YAML.
    """
    totals: dict[str, int] = {}
    # The open containers: the anchor, and the number of values in it.
    above: list[tuple[str | None, int]] = [(None, 0)]
    has_alias = False
    for event in yaml.parse(text, Loader=_EVENT_LOADER):
        anchor, size = getattr(event, "anchor", None), 1
        if isinstance(event, yaml.CollectionStartEvent):
            above.append((anchor, 1))
            if len(above) > MOST_LEVELS:
                raise ValueError(f"it is nested more than {MOST_LEVELS} levels deep")
            continue
        if isinstance(event, yaml.AliasEvent):
            has_alias, size = True, totals.get(anchor or "", 1)
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, size = above.pop()
            if anchor is not None:
                totals[anchor] = size
        elif not isinstance(event, yaml.ScalarEvent):
            continue
        outer, before = above[-1]
        above[-1] = (outer, before + size)
        if has_alias and before + size > MOST_EXPANDED:
            raise ValueError(f"its anchors stand for more than {MOST_EXPANDED} values")


def read_document(text: str, where: str, keys: str = "trainer, model and data") -> Source:
    """Parse YAML. Raise ``ProblemError`` with the line if the text is not a YAML mapping.

    ``keys`` names keys that such a file has.
    """
    try:
        loader = _open_loader(text)
    except ValueError as error:
        raise ProblemError.of(where=where, what=f"invalid YAML: {error}.") from error
    try:
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise ProblemError.of(
                where=where,
                what="the file is empty." if node is None else "the file is not a mapping of keys.",
                remedy=f"A configuration has the keys {keys}.",
            )
        lines, faults = _collect_lines(node, where)
        values = None if faults else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        position = error.problem_mark or error.context_mark
        place = f"{where}:{position.line + 1}" if position else where
        message = f"invalid YAML: {error.problem or error.context}."
        raise ProblemError.of(where=place, what=message) from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        if isinstance(error, ProblemError):
            raise
        raise ProblemError.of(where=where, what=f"invalid YAML: {error}.") from error
    finally:
        loader.dispose()
    if faults:
        raise ProblemError(*faults)
    assert isinstance(values, dict)
    return Source(values=values, lines=lines)


def _open_loader(text: str) -> _Loader:
    """Return a loader. Raise ``ValueError`` if the text has a character that YAML forbids, or is
    nested or expanded without measure."""
    try:
        # An error of the syntax is reported with its line by the loader itself.
        with suppress(yaml.YAMLError):
            check_size(text)
        return _Loader(text)
    except yaml.reader.ReaderError as error:
        raise ValueError(f"it contains {chr(error.character)!r}, which is not allowed") from error


def _collect_lines(root: yaml.Node, where: str) -> tuple[dict[str, int], list[Problem]]:
    """Return the line of each dotted path, and the keys and values that make no document."""
    lines: dict[str, int] = {}
    faults: list[Problem] = []

    def collect(node: yaml.Node, path: str, above: frozenset[int]) -> None:
        if id(node) in above:
            place = f"{where}:{node.start_mark.line + 1} {path}"
            faults.append(Problem(where=place, what="the value contains itself."))
            return
        above = above | {id(node)}
        if isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for key, value in node.value:
                name, line = str(key.value), key.start_mark.line + 1
                below = f"{path}.{name}" if path else name
                if name in seen and name != "<<":
                    faults.append(Problem(where=f"{where}:{line} {below}", what="duplicate key."))
                seen.add(name)
                lines[below] = line
                collect(value, below, above)
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                lines[f"{path}.{index}"] = item.start_mark.line + 1
                collect(item, f"{path}.{index}", above)

    collect(root, "", frozenset())
    return lines, faults


def parse_value(text: str) -> Any:
    """Parse one YAML value, as in ``--set key=value``. Raise ``ValueError`` with a short reason."""
    loader = _open_loader(text)
    try:
        return loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        raise ValueError(error.problem or error.context or "not YAML") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from error
    finally:
        loader.dispose()


def write_document(document: Mapping[str, Any]) -> str:
    """Return plain values as YAML; keys keep their order."""
    return yaml.safe_dump(dict(document), sort_keys=False, allow_unicode=True)


def value_at(document: Any, path: str, default: Any = None) -> Any:
    """Return the value at a dotted path; numbers are list indices."""
    value = document
    for part in path.split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return default
    return value


def with_value(document: Mapping[str, Any], path: str, value: Any) -> Document:
    """Return a copy with ``value`` at a dotted path; missing mappings on the path are created.

    Raise ``KeyError`` with the path that cannot be entered: a plain value, or a list without such
    an item.
    """
    copy = deepcopy(dict(document))
    target: Any = copy
    parts = path.split(".")
    for depth, part in enumerate(parts[:-1]):
        if isinstance(target, list):
            if not (part.isdecimal() and int(part) < len(target)):
                raise KeyError(".".join(parts[: depth + 1]))
            target = target[int(part)]
        elif isinstance(target, dict):
            if target.get(part) is None:
                target[part] = {}
            target = target[part]
        if not isinstance(target, (dict, list)):
            raise KeyError(".".join(parts[: depth + 1]))
    if isinstance(target, list):
        if not (parts[-1].isdecimal() and int(parts[-1]) < len(target)):
            raise KeyError(path)
        target[int(parts[-1])] = value
    else:
        target[parts[-1]] = value
    return copy


def iterate_values(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every nested value with its dotted path, outer values first."""
    items: Iterator[tuple[Any, Any]]
    if isinstance(value, Mapping):
        items = iter(value.items())
    elif isinstance(value, list):
        items = iter(enumerate(value))
    else:
        return
    for key, inner in items:
        below = f"{path}.{key}" if path else str(key)
        yield below, inner
        yield from iterate_values(inner, below)


def resolve(document: Mapping[str, Any]) -> tuple[Document, list[Fault]]:
    """Resolve ``${...}`` by OmegaConf's rules; return the document and the errors."""
    plain = deepcopy(dict(document))
    if not any(isinstance(value, str) and "${" in value for _, value in iterate_values(plain)):
        return plain, []
    # Imported here because it takes 0.1 s and most presets have no interpolation.
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        resolved = OmegaConf.to_container(OmegaConf.create(plain), resolve=True)
    except OmegaConfBaseException as error:
        key = str(getattr(error, "full_key", None) or "")
        reason = str(error).splitlines()[0].rstrip(".")
        path = key.replace("[", ".").replace("]", "")
        return plain, [Fault(path=path, what=f"the reference cannot be resolved: {reason}.")]
    assert isinstance(resolved, dict)
    return {str(k): v for k, v in resolved.items()}, []
