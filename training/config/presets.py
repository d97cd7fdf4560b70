"""Presets: how they are read, and how a run's specification is built from one.

A preset is a configuration file that LightningCLI would accept, with one more section, ``ltui:``.
The shipped ones are in ``ltui.presets``; a LightningCLI file of the user works without the section.
Only this module and ``preset_discovery`` read files in ``training/config``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import field

from ltui.training.config.device_selection import UNKNOWN_MACHINE, Machine
from ltui.training.config.ltui_section import LtuiSection, read_section
from ltui.training.config.preflight import preflight
from ltui.training.config.preset_discovery import (
    SUFFIXES,
    preset_names,
    shipped_folder,
    shipped_names,
    suspected_names,
)
from ltui.training.config.run_spec import RunSpec
from ltui.training.config.structure_check import closest_match, locate_fault
from ltui.training.config.yaml_document import Document, read_document, value_at
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
        tags=preset.tags,
        about=preset.about or None,
    )


def required_modules(requires: Iterable[str]) -> dict[str, str]:
    """Return the module that each required distribution provides."""
    named = {r: re.split(r"[<>=!~\[; ]", r, maxsplit=1)[0] for r in requires}
    return {r: MODULES.get(n.lower(), n.replace("-", "_")) for r, n in named.items()}
