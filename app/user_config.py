"""The settings that there are, and what the user's configuration file says of them.

``config_file.py`` reads the file; ``settings.py`` resolves which value counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

if TYPE_CHECKING:
    from ltui.training.problem import Problem

FILE_NAME = "config.yaml"
WHICH_EVENTS = ("all", "problems", "none")
TYPES: Mapping[str, tuple[type, ...]] = {
    "text": (str,),
    "truth": (bool,),
    "whole": (int,),
    "number": (int, float),
    "list": (list,),
}
"""Types of the values of each kind of setting."""


class Setting(Struct, frozen=True, kw_only=True):
    """One setting with a fixed name. ``kind`` and the limits are those of an ``Argument``."""

    kind: str
    about: str
    default: Any = None
    """None means that the dashboard decides, for example by the size of the terminal."""
    example: Any = None
    """A value for the template of the file, if there is no default."""
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None


SETTINGS = {
    "theme": Setting(
        kind="text", example="ltui-dark", about="The colour theme; the key t lists all."
    ),
    "layout.details": Setting(
        kind="truth",
        example=True,
        about="Whether a run screen has the details at its side, if there is room.",
    ),
    "layout.details_width": Setting(
        kind="whole", low=30, high=120, example=56, about="The columns of the details at the side."
    ),
    "layout.charts_height": Setting(
        kind="whole",
        low=10,
        high=90,
        example=60,
        about="The charts' percentage of the height that they share with the panel below.",
    ),
    "layout.first_chart_width": Setting(
        kind="whole",
        low=10,
        high=90,
        example=50,
        about="The first chart's percentage of the width of both.",
    ),
    "layout.presets": Setting(
        kind="truth",
        example=True,
        about="Whether the home screen has the presets beside the runs, if there is room.",
    ),
    "runs.columns": Setting(
        kind="list",
        example=["state", "val/loss", "program", "created"],
        about="The columns of the list of runs: fields and metrics as in `ltui runs --help`.",
    ),
    "runs.sort": Setting(
        kind="text",
        example="-created",
        about="The field by which the list is sorted; highest first with a minus sign.",
    ),
    "notifications.show": Setting(
        kind="text",
        choices=WHICH_EVENTS,
        default="all",
        about="Which events of a run appear as notices: all, problems or none.",
    ),
    "notifications.bell": Setting(
        kind="text",
        choices=WHICH_EVENTS,
        default="none",
        about="Which events of a run ring the terminal's bell: all, problems or none.",
    ),
    "notifications.seconds": Setting(
        kind="number", low=1, default=5, about="How long the notice of an event is shown."
    ),
    "queue.slots": Setting(
        kind="whole",
        low=1,
        default=1,
        about="The slots of this machine: how many runs without GPUs the run queue lets run.",
    ),
    "queue.pass": Setting(
        kind="truth",
        default=False,
        about="Whether a queued run may pass one that needs more slots than are free.",
    ),
}
"""The settings by dotted path. ``ltui config`` and its template list them in this order."""


class UserConfig(Struct, frozen=True, kw_only=True):
    """What the file says, without its wrong values."""

    path: Path
    values: Mapping[str, Any] = field(default_factory=dict)
    """Values of ``SETTINGS`` by dotted path."""
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Keys by the id of a binding, as written; ``app/keys/own_keys.py`` checks them."""
    launch: Mapping[str, Any] = field(default_factory=dict)
    """Defaults for the ``ltui:`` section of presets, and for ``ltui exec``."""
    lines: Mapping[str, int] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    launch_problems: tuple[Problem, ...] = ()
    """Those of ``problems`` because of which a run could start without what the file asks for."""

    def origin(self, path: str) -> str | None:
        """Return ``config.yaml:3`` for a value of the file; None if it has none."""
        group, _, name = path.partition(".")
        in_section = {"keys": self.keys, "launch": self.launch}.get(group, {})
        if path not in self.values and name not in in_section:
            return None
        return f"{self.path.name}:{self.lines.get(path, 1)}"
