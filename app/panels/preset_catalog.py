"""The presets of the home screen, read from files: the selected one first, the others later.

Its methods are called in a worker's thread, because reading takes longer than one frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ltui.app.panels.presets_panel import PresetEntry

if TYPE_CHECKING:
    from ltui.training.config.presets import Preset


class PresetCatalog:
    """The presets that were read, and the problems of files that can't be read."""

    def __init__(self) -> None:
        self.presets: dict[str, Preset] = {}
        """Presets by name; empty until all files were read."""
        self.problems: dict[str, str] = {}
        """The reason by name for each file that can't be read."""

    @property
    def is_read(self) -> bool:
        """True if all files were read."""
        return bool(self.presets or self.problems)

    def read_first(self, name: str | None, folder: Path) -> Preset | None:
        """Return one preset; None if it can't be read. ``read_all`` finds the reason."""
        # Imported here: the first frame shows names only.
        from ltui.training.config.presets import load_preset
        from ltui.training.problem import ProblemError

        try:
            return None if name is None else load_preset(name, folder)
        except ProblemError:
            return None

    def read_all(self, folder: Path, first: Preset | None) -> list[PresetEntry]:
        """Read every preset but ``first``, which was read before; return the lines of the list."""
        # Imported here: the first frame shows names only.
        from ltui.training.config.preset_discovery import preset_names
        from ltui.training.config.presets import damaged_files, load_preset
        from ltui.training.problem import ProblemError

        presets = {} if first is None else {first.name: first}
        problems = {name: str(problem) for name, problem in damaged_files(folder).items()}
        names = (*problems, *preset_names(folder))
        for name in names:
            try:
                if name not in presets:
                    presets[name] = load_preset(name, folder)
            except ProblemError as error:
                problems[name] = str(error.problems[0])
        self.presets, self.problems = presets, problems
        return _entries(names, presets, problems)


def _entries(
    names: Sequence[str], presets: dict[str, Preset], problems: dict[str, str]
) -> list[PresetEntry]:
    """Return the lines of the list: the user's files first, then the shipped presets."""
    entries = [
        PresetEntry(
            name=name,
            tags=presets[name].tags if name in presets else (),
            own=name.startswith("./"),
            problem=problems.get(name),
        )
        for name in names
    ]
    return sorted(entries, key=lambda entry: (not entry.own, entry.own and entry.name))
