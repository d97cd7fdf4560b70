"""The start of the dashboard: modules that are imported before the first frame, and later ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from textual.color import Color
from textual.css.stylesheet import Stylesheet
from textual.theme import Theme

from ltui.app import cli
from ltui.app.command_line.parser import build_parser
from ltui.app.commands import dashboard
from ltui.app.settings import write_preference
from ltui.app.textual_app import LtuiApp
from ltui.widgets.palette import LTUI_DARK, LTUI_LIGHT
from tests.cli.terminal import Terminal

HEAVY = frozenset(
    {
        *("numpy", "sqlite3", "yaml", "omegaconf", "psutil", "pynvml", "torch", "lightning"),
        *("markdown_it", "pygments", "tree_sitter", "rich.markdown", "rich.syntax"),
        *("argparse", "hashlib", "importlib.metadata", "email", "textual.devtools"),
        *("textual.widgets._markdown", "textual.widgets._text_area", "textual.widgets._data_table"),
        *(
            "ltui.training.config.run_spec",
            "ltui.training.config.presets",
            "ltui.training.lifecycle",
            "ltui.training.process.identity",
            "ltui.training.supervise",
        ),
        *(
            "ltui.widgets.view_models",
            "ltui.widgets.table",
            "ltui.app.live.frame",
            "ltui.app.screens.run",
        ),
    }
)
"""Modules that the first screen does not need. Each costs 2 to 100 ms of the start."""

FIRST_FRAME = """
import gc, json, sys
from pathlib import Path
from ltui.app import cli
import ltui.app.textual_app as dashboard

display = dashboard.LtuiApp._display
def first_frame(app, screen, renderable):
    display(app, screen, renderable)
    if renderable is not None and not app._batch_count and app._running:
        dashboard.LtuiApp._display = display
        seen = {"modules": sorted(sys.modules), "collects": gc.isenabled()}
        Path(sys.argv[1]).write_text(json.dumps(seen))
        app.exit()

dashboard.LtuiApp._display = first_frame
sys.exit(cli.main([]))
"""


def test_the_first_frame_shows_the_presets_and_needs_no_heavy_module(
    tmp_path: Path, private_home: Path
) -> None:
    seen = tmp_path / "seen.json"
    terminal = Terminal([sys.executable, "-c", FIRST_FRAME, str(seen)], tmp_path, os.environ)
    try:
        assert terminal.wait() == 0
        assert "quickstart" in terminal.drawn
    finally:
        terminal.close()
    first = json.loads(seen.read_text())
    assert HEAVY.isdisjoint(first["modules"])
    assert not first["collects"], "the collector runs during the start"


def test_the_collector_runs_again_after_the_start() -> None:
    code = (
        "import gc, time; from ltui.app import open_dashboard;"
        "open_dashboard.COLLECTION_PAUSE_S = 0.5;"
        "open_dashboard.pause_garbage_collection(); assert not gc.isenabled()\n"
        "while not gc.isenabled(): time.sleep(0.01)\n"
        "assert gc.get_freeze_count() > 0"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


def test_ltui_without_arguments_opens_the_dashboard_as_its_grammar_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[tuple[str | None, bool]] = []

    def show(name: str | None = None, *, readonly: bool = False, at: str | None = None) -> int:
        assert at is None
        opened.append((name, readonly))
        return 0

    monkeypatch.setattr(dashboard, "show_dashboard", show)
    options = build_parser().parse_args([])
    assert options.do == "dashboard:open_dashboard"
    assert cli.main([]) == dashboard.open_dashboard(options) == 0
    assert opened == [(None, False), (None, False)]


@pytest.mark.parametrize("theme", [LTUI_LIGHT, LTUI_DARK])
async def test_styles_are_parsed_once_and_in_the_first_theme(
    private_home: Path, monkeypatch: pytest.MonkeyPatch, theme: Theme
) -> None:
    reparsed: list[str] = []
    monkeypatch.setattr(Stylesheet, "reparse", lambda sheet: reparsed.append("again"))
    private_home.mkdir(exist_ok=True)
    write_preference(private_home, "theme", theme.name)
    app = LtuiApp(private_home)
    async with app.run_test(size=(100, 30)):
        assert app.screen.styles.background == Color.parse(theme.background or "")
        assert app.has_class(f"-theme-{theme.name}")
    assert not reparsed
