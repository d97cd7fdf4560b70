"""Configuration as plain values: YAML with the line of every key, dotted paths, interpolation.

Numbers are read as by LightningCLI: ``1e-3`` is a number, and a date is a string.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import yaml

from ltui.training.problem import Problem, ProblemError

Document = dict[str, Any]


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Values of a configuration, and the line (from 1) of each dotted path."""

    values: Document
    lines: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """An error at a dotted path, without the place where that path is written."""

    path: str
    what: str
    remedy: str | None = None


def read_document(text: str, where: str, keys: str = "trainer, model and data") -> Source:
    """Parse YAML. Raise ``ProblemError`` with the line if the text is not a YAML mapping.

    ``keys`` names keys that such a file has.
    """
    try:
        loader = _open_loader(text)
    except ValueError as error:
        raise ProblemError.of(where=where, what=f"invalid YAML: {error}.") from error
    lines: dict[str, int] = {}
    faults: list[Problem] = []
    try:
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise ProblemError.of(
                where=where,
                what="the file is empty." if node is None else "the file is not a mapping of keys.",
                remedy=f"A configuration has the keys {keys}.",
            )
        _collect_lines(node, "", lines, faults, where, frozenset())
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
    """Return a loader. Raise ``ValueError`` if the text has a character that YAML forbids."""
    try:
        return _Loader(text)
    except yaml.reader.ReaderError as error:
        raise ValueError(f"it contains {chr(error.character)!r}, which is not allowed") from error


def _collect_lines(
    node: yaml.Node,
    path: str,
    lines: dict[str, int],
    faults: list[Problem],
    where: str,
    above: frozenset[int],
) -> None:
    if id(node) in above:
        line = node.start_mark.line + 1
        faults.append(Problem(where=f"{where}:{line} {path}", what="the value contains itself."))
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
            _collect_lines(value, below, lines, faults, where, above)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[f"{path}.{index}"] = item.start_mark.line + 1
            _collect_lines(item, f"{path}.{index}", lines, faults, where, above)


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


def has_interpolation(document: Mapping[str, Any]) -> bool:
    """Return True if some value contains ``${...}``."""
    return any(isinstance(value, str) and "${" in value for _, value in iterate_values(document))


def resolve(document: Mapping[str, Any]) -> tuple[Document, list[Fault]]:
    """Resolve ``${...}`` by OmegaConf's rules; return the document and the errors."""
    plain = deepcopy(dict(document))
    if not has_interpolation(plain):
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
