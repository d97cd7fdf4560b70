"""Presets: how they are read, their form, and how a run's specification is built from one.

A preset is a configuration file that LightningCLI would accept, with one more section, ``ltui:``.
The shipped ones are in ``ltui.presets``; a LightningCLI file of the user works without the section.
Only this module and ``preset_discovery`` read files in ``training/config``.

The texts in the fields of a preset's form become a configuration and a list of errors. That part is
pure: the screen calls ``apply_form`` on every change.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from msgspec import Struct, field

from ltui.training.config.device_selection import (
    UNKNOWN_MACHINE,
    Machine,
    free_count,
    parse_devices,
)
from ltui.training.config.ltui_section import Knob, LtuiSection, read_section
from ltui.training.config.preflight import preflight
from ltui.training.config.preset_discovery import (
    SUFFIXES,
    preset_names,
    shipped_folder,
    shipped_names,
    suspected_names,
)
from ltui.training.config.run_spec import RunSpec
from ltui.training.config.structure_check import Argument, closest_match, find_faults, locate_fault
from ltui.training.config.yaml_document import (
    Document,
    parse_value,
    read_document,
    value_at,
    with_value,
)
from ltui.training.problem import Problem, ProblemError

DISTRIBUTIONS = {
    "sklearn": "scikit-learn",
    "PIL": "pillow",
    "cv2": "opencv-python",
    "yaml": "pyyaml",
}
"""Module name to distribution name. ``training/rank/train_preset.py`` has a copy, because ranks
import nothing of this package."""

MODULES = {distribution: module for module, distribution in DISTRIBUTIONS.items()}
"""Distribution name to module name."""


_MAX_BYTES = 4 << 20
_MAX_SUSPECTED_BYTES = 64 << 10
"""Size up to which a file that may be a damaged preset is parsed."""


class Preset(LtuiSection, frozen=True, kw_only=True):
    """One configuration that can be run, with the values of its ``ltui`` section."""

    name: str
    """``quickstart``, or the path of the user's file as given."""
    document: Document = field(default_factory=dict)
    """The configuration as written, with interpolations and without the ``ltui`` section."""
    path: Path | None = None
    """Path of the file; None for text that is not in a file."""
    shipped: bool = False
    lines: Mapping[str, int] = field(default_factory=dict)
    """Line of each dotted path in the file."""
    section: Mapping[str, Any] = field(default_factory=dict)
    """The ``ltui`` section as written."""

    @property
    def where(self) -> str:
        """Name of the file, as used in the place of an error."""
        return f"{self.name}.yaml" if self.shipped else self.name


def load_preset(name_or_path: str, cwd: Path | None = None) -> Preset:
    """Return the shipped preset of that name, or else the preset in that file.

    Relative paths start at ``cwd``. Raise ``ProblemError`` if there is none (with the most similar
    name), if the file cannot be read or is not YAML, or if its ``ltui`` section is invalid. The
    configuration itself is checked by ``preflight``.
    """
    shipped = shipped_names()
    if name_or_path in shipped:
        path = shipped_folder() / f"{name_or_path}.yaml"
        return parse_preset(_read(path, path.name), name=name_or_path, path=path, shipped=True)
    path = (cwd or Path()) / Path(name_or_path).expanduser()
    if not path.is_file():
        raise ProblemError(_no_such_preset(name_or_path, path, preset_names(cwd)))
    return parse_preset(_read(path, name_or_path), name=name_or_path, path=path.resolve())


def damaged_files(cwd: Path) -> dict[str, Problem]:
    """Return the files in ``cwd`` that seem to be presets but are not valid YAML, with the error.

    Large files are skipped because parsing them takes too long.
    """
    problems: dict[str, Problem] = {}
    for name in suspected_names(cwd):
        try:
            if (cwd / name).stat().st_size <= _MAX_SUSPECTED_BYTES:
                read_document(_read(cwd / name, name), name)
        except ProblemError as error:
            problems[name] = error.problems[0]
        except OSError:
            continue
    return problems


def _no_such_preset(name: str, path: Path, available: Sequence[str]) -> Problem:
    if path.is_dir():
        return Problem(where=name, what="this is a folder.", remedy="Give a preset or a YAML file.")
    names_without_suffix = {n.removeprefix("./").rsplit(".", 1)[0]: n for n in available}
    near = closest_match(name, [*available, *names_without_suffix], cutoff=0.5)
    remedy = f"Did you mean `{names_without_suffix.get(near, near)}`?" if near else None
    if path.suffix in SUFFIXES or "/" in name:
        return Problem(where=name, what="no such file.", remedy=remedy)
    names = ", ".join(available)
    return Problem(
        where=name,
        what="no preset or file of that name.",
        remedy=remedy or f"Known presets: {names}.",
    )


def _read(path: Path, where: str) -> str:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ProblemError.of(where=where, what="too large for a configuration.")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        text = f"the file cannot be read: {error.strerror}."
        raise ProblemError.of(where=where, what=text) from error
    except UnicodeDecodeError as error:
        raise ProblemError.of(where=where, what="the file is not UTF-8 text.") from error


def parse_preset(
    text: str, *, name: str, path: Path | None = None, shipped: bool = False
) -> Preset:
    """Parse a preset from YAML text, of a file or an editor. Raise ``ProblemError``."""
    where = f"{name}.yaml" if shipped else name
    source = read_document(text, where)
    section, faults = read_section(source.values.get("ltui"))
    if faults:
        raise ProblemError(*(locate_fault(fault, where, source.lines) for fault in faults))
    document = {k: v for k, v in source.values.items() if k != "ltui"}
    lines: Mapping[str, int] = source.lines
    if "model" not in document and isinstance(document.get("fit"), dict):
        # LightningCLI also accepts its settings below the name of the subcommand.
        document = document["fit"]
        lines = {k.removeprefix("fit."): v for k, v in lines.items()}
    knobs = tuple(k.with_default(value_at(document, k.key)) for k in section.knobs)
    values = {f: getattr(section, f) for f in section.__struct_fields__}
    values |= {"knobs": knobs, "title": section.title or (path.stem if path else name)}
    return Preset(
        name=name,
        document=document,
        path=path,
        shipped=shipped,
        lines=lines,
        section=source.values.get("ltui") or {},
        **values,
    )


def build_spec(
    preset: Preset,
    overrides: Sequence[str],
    *,
    id: str,  # noqa: A002  (the field's name)
    name: str,
    cwd: Path | str,
    python: str,
    created_at: float,
    machine: Machine = UNKNOWN_MACHINE,
) -> RunSpec:
    """Build the specification of a run from a preset and overrides for this machine.

    Raise ``ProblemError`` with all errors.
    """
    configuration = preflight(
        preset.document,
        overrides,
        preset.where,
        lines=preset.lines,
        machine=machine,
        cpu_ranks=preset.cpu_ranks,
    )
    folder = preset.path.parent if preset.path is not None and not preset.shipped else None
    return RunSpec(
        id=id,
        name=name,
        created_at=created_at,
        cwd=str(cwd),
        python=python,
        preset=preset.name,
        config=configuration.document,
        after_fit=preset.after_fit,
        python_path=() if folder is None else (str(folder),),
        nproc=configuration.nproc,
        nodes=configuration.nodes,
        gpus=configuration.gpus,
        overrides=tuple(overrides),
        checkpoint=preset.checkpoint,
        stall=preset.stall,
        restarts=preset.restarts,
        mirror=preset.mirror,
        freeze=preset.freeze,
        tags=preset.tags,
        about=preset.about or None,
    )


def required_modules(requires: Iterable[str]) -> dict[str, str]:
    """Return the module that each required distribution provides."""
    named = {r: re.split(r"[<>=!~\[; ]", r, maxsplit=1)[0] for r in requires}
    return {r: MODULES.get(n.lower(), n.replace("-", "_")) for r, n in named.items()}


START_FROM = "start from"
"""Key of the field for another run's checkpoint, which is no key of the configuration."""


class FormResult(Struct, frozen=True, kw_only=True):
    """Configuration and errors that follow from a form."""

    document: Document
    """The preset's configuration with all valid fields applied."""
    overrides: tuple[str, ...]
    """Changed fields as arguments of ``--set``."""
    problems: tuple[Problem, ...]
    """Errors. ``where`` is the key of the field with the error, or else the place in the file."""


def field_texts(preset: Preset) -> dict[str, str]:
    """Return the initial text of each field, by knob key."""
    return {knob.key: field_text(knob.default) for knob in preset.knobs}


def field_text(value: Any) -> str:
    """Return a value as the text of a field."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ",".join(str(item) for item in value)
    return str(value)


def apply_form(
    preset: Preset, texts: Mapping[str, str], machine: Machine = UNKNOWN_MACHINE
) -> FormResult:
    """Return the configuration and errors for the texts of a form.

    ``texts`` maps knob keys to texts. A field without a text keeps the preset's value.
    """
    document = dict(preset.document)
    overrides: list[str] = []
    problems: list[Problem] = []
    for knob in preset.knobs:
        text = texts.get(knob.key)
        if text is None or text.strip() == field_text(knob.default):
            continue
        try:
            value = parse_field(knob, text)
            document = with_value(document, knob.key, value)
        except (ValueError, KeyError) as error:
            problems.append(Problem(where=knob.key, what=str(error.args[0])))
            continue
        overrides.append(f"{knob.key}={_one_line_yaml(value)}")
    keys = {knob.key for knob in preset.knobs}
    invalid_fields = {problem.where for problem in problems}
    for fault in find_faults(document, machine=machine, cpu_ranks=preset.cpu_ranks):
        if fault.path not in keys:
            problems.append(locate_fault(fault, preset.where, preset.lines))
        elif fault.path not in invalid_fields:
            problems.append(Problem(where=fault.path, what=fault.what, remedy=fault.remedy))
    return FormResult(document=document, overrides=tuple(overrides), problems=tuple(problems))


def parse_field(knob: Knob, text: str) -> Any:
    """Return the value of a field's text. Raise ``ValueError`` with a sentence."""
    text = text.strip()
    if knob.type == "choice":
        return _choice(knob, text)
    if not text:
        if knob.default is None or knob.type in ("str", "path"):
            return None if knob.default is None else ""
        raise ValueError("required")
    if knob.type in ("str", "path"):
        return text
    if knob.type == "devices":
        if text == "auto" or free_count(text):
            return text
        # In brackets, one number is a list, too: `[2]` is the GPU 2 and not two GPUs.
        devices = parse_devices(parse_value(text) if text.startswith("[") else text)
        return -1 if devices is None else devices
    try:
        value = parse_value(text)
    except ValueError:
        value = text
    if knob.type == "bool":
        if isinstance(value, bool):
            return value
        raise ValueError(f"must be true or false (got `{text}`)")
    kind = "whole" if knob.type == "int" else "number"
    number = Argument(kinds=(kind,), low=knob.min, high=knob.max, optional=False)
    # A number in quotes is text, although the Trainer accepts it.
    if isinstance(value, str) or number.fault(value) is not None:
        raise ValueError(f"must be {number.expected} (got `{text}`)")
    return value


def _choice(knob: Knob, text: str) -> Any:
    if text not in knob.choices:
        raise ValueError(f"must be one of {', '.join(knob.choices)} (got `{text}`)")
    value = parse_value(text)
    # A choice has the type of the preset's value: `16-mixed` is a string, `32` may be either.
    return text if isinstance(knob.default, str) or isinstance(value, (dict, list)) else value


def _one_line_yaml(value: Any) -> str:
    """Return a value as YAML on one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...").removesuffix("\n")
