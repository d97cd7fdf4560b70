"""Reader of the user's configuration file (``user_config.py`` describes what it holds).

A wrong value is reported and left out; the other values still count.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ltui.app.user_config import SETTINGS, Setting, UserConfig
from ltui.training.config.ltui_section import read_section, unknown_section_key
from ltui.training.config.structure_check import Argument, closest_match, locate_fault, value_fault
from ltui.training.config.yaml_document import Fault, Source, format_value, read_document
from ltui.training.problem import Problem, ProblemError

MAX_BYTES = 1 << 20
"""Size of the file above which it is not read."""
LAUNCH_KEYS = ("stall", "checkpoint", "restarts", "mirror", "freeze")
"""Keys of a preset's ``ltui:`` section that the file may give defaults for."""
SECTIONS = ("keys", "launch")
"""Top-level keys whose content ``SETTINGS`` does not list."""


def read_config_file(path: Path) -> UserConfig:
    """Return what a file says. Never raises."""
    try:
        text = _read(path)
        source = read_document(text, str(path), "theme, keys, launch") if _is_used(text) else None
    except ProblemError as error:
        return UserConfig(path=path, problems=error.problems, launch_problems=error.problems)
    return UserConfig(path=path) if source is None else _from_source(path, source)


def locate(config: UserConfig, faults: Collection[Fault]) -> list[Problem]:
    """Return errors with their places in the file."""
    return [locate_fault(fault, str(config.path), config.lines) for fault in faults]


def theme_faults(config: UserConfig, names: Collection[str]) -> list[Fault]:
    """Return the error if the file names a theme that is not among ``names``."""
    name = config.values.get("theme")
    if name is None or name in names:
        return []
    near = closest_match(name, names)
    remedy = f"Did you mean `{near}`?" if near else f"Themes: {', '.join(sorted(names))}."
    return [Fault(path="theme", what=f"there is no theme {format_value(name)}.", remedy=remedy)]


def _read(path: Path) -> str:
    """Return the text. Raise ``ProblemError`` if the file cannot be read."""
    where = str(path)
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise ProblemError.of(where=where, what="this is not a file.")
        if size > MAX_BYTES:
            raise ProblemError.of(where=where, what="too large for a configuration.")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        reason = error.strerror or str(error)
        raise ProblemError.of(where=where, what=f"the file cannot be read: {reason}.") from error
    except UnicodeDecodeError as error:
        raise ProblemError.of(where=where, what="the file is not UTF-8 text.") from error


def _is_used(text: str) -> bool:
    """Return whether the file has more than comments."""
    return any(line.strip() and not line.lstrip().startswith("#") for line in text.splitlines())


def _from_source(path: Path, source: Source) -> UserConfig:
    settings, faults = _read_settings(source.values)
    keys, key_faults = _read_keys(source.values)
    launch, launch_faults = _read_launch(source.values)
    config = UserConfig(path=path, values=settings, keys=keys, launch=launch, lines=source.lines)
    return replace(
        config,
        problems=tuple(locate(config, [*faults, *key_faults, *launch_faults])),
        launch_problems=tuple(locate(config, launch_faults)),
    )


def _read_settings(document: Mapping[str, Any]) -> tuple[dict[str, Any], list[Fault]]:
    groups = {path.partition(".")[0] for path in SETTINGS if "." in path}
    top_level = [*dict.fromkeys(path.partition(".")[0] for path in SETTINGS), *SECTIONS]
    values: dict[str, Any] = {}
    faults: list[Fault] = []
    found: dict[str, Any] = {}
    for key, value in document.items():
        if key not in top_level:
            faults.append(unknown_section_key(str(key), top_level))
        elif key in groups and isinstance(value, Mapping):
            found |= {f"{key}.{name}": item for name, item in value.items()}
        elif key in groups:
            faults.append(_not_a_mapping(str(key), value))
        elif key not in SECTIONS:
            found[key] = value
    for path, value in found.items():
        group = path.partition(".")[0]
        setting = SETTINGS.get(path)
        if setting is None:
            names = [known.partition(".")[2] for known in SETTINGS if known.startswith(f"{group}.")]
            faults.append(unknown_section_key(path, names))
        elif (fault := value_fault(path, value, _argument(setting))) is not None:
            faults.append(fault)
        elif isinstance(value, list) and not all(isinstance(v, str) and v for v in value):
            faults.append(Fault(path=path, what="must be a list of texts."))
        elif value is not None:
            values[path] = value
    return values, faults


def _argument(setting: Setting) -> Argument:
    return Argument(
        kinds=(setting.kind,),
        choices=setting.choices,
        low=setting.low,
        high=setting.high,
        optional=setting.default is None,
    )


def _read_keys(values: Mapping[str, Any]) -> tuple[dict[str, tuple[str, ...]], list[Fault]]:
    section, faults = _section(values, "keys")
    keys: dict[str, tuple[str, ...]] = {}
    for name, value in section.items():
        # YAML reads a digit as a number; it is the key of that digit.
        written = value if isinstance(value, list) else [value]
        items = [str(v) if type(v) is int else v for v in written]
        if items and all(isinstance(item, str) and item for item in items):
            keys[str(name)] = tuple(items)
        else:
            text = f"must be a key or a list of keys (got {format_value(value)})."
            remedy = "Write it in quotes, such as 'ctrl+s', or [s, f5]."
            faults.append(Fault(path=f"keys.{name}", what=text, remedy=remedy))
    return keys, faults


def _read_launch(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Fault]]:
    """Check the section as that of a preset, which has the same keys."""
    section, faults = _section(values, "launch")
    unknown = [key for key in section if key not in LAUNCH_KEYS]
    faults += [unknown_section_key(f"launch.{key}", LAUNCH_KEYS) for key in unknown]
    known = {key: value for key, value in section.items() if key in LAUNCH_KEYS}
    faults += [
        Fault(path=fault.path.replace("ltui", "launch", 1), what=fault.what, remedy=fault.remedy)
        for fault in read_section(known)[1]
    ]
    return ({} if faults else known), faults


def _section(values: Mapping[str, Any], name: str) -> tuple[Mapping[str, Any], list[Fault]]:
    """Return a part of the file; empty if it is missing or is no mapping, which is an error."""
    section = values.get(name)
    if section is None or isinstance(section, Mapping):
        return section or {}, []
    return {}, [_not_a_mapping(name, section)]


def _not_a_mapping(path: str, value: Any) -> Fault:
    return Fault(path=path, what=f"must be a mapping of keys (got {format_value(value)}).")
