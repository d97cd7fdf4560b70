"""Pictures of a live run for the documents, without what belongs to the machine they are from."""

from __future__ import annotations

import asyncio
import html
import re
import socket
from collections.abc import Mapping
from pathlib import Path

import psutil

from ltui.app.textual_app import LtuiApp
from ltui.training.store.run_directory import RunDir

SIZE = (160, 50)
FILL_S = 5.0
"""Seconds until every panel of a screen has its contents."""
_SPACE = "\N{NO-BREAK SPACE}"
"""Textual writes every space as one."""
_TEXT = re.compile(r"(?<=>)[^<>]+(?=</text>)")
_PATH = re.compile(rf"(?<![\w.%~/])/(?!home/you\b)(?:[\w.+@-]+/)+([^\s{_SPACE}]*)")
"""An absolute path of two parts or more; the group is its last part."""
_UUID = re.compile(r"(?!0{8}-)[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""The identifier of a GPU."""
_NO_UUID = "00000000-0000-0000-0000-000000000000"


def run_and_gpu(home: Path, run_dir: RunDir) -> tuple[str, str]:
    """Return the screen of the run and that of its first GPU, as SVG.

    Without a GPU both are the screen of the run.
    """

    async def take() -> tuple[str, str]:
        title = f"ltui, {SIZE[0]}x{SIZE[1]}"
        app = LtuiApp(home, run=run_dir)
        async with app.run_test(size=SIZE) as pilot:
            await pilot.pause(FILL_S)
            run = app.export_screenshot(title=title)
            await pilot.press("3", "enter")
            await pilot.pause(2)
            return run, app.export_screenshot(title=title)

    run, gpu = asyncio.run(take())
    return impersonal(run, machine_names()), impersonal(gpu, machine_names())


def machine_names() -> dict[str, str]:
    """Return the names of this machine and its user, and what replaces them."""
    names = {socket.gethostname(): "your-host", psutil.Process().username(): "you"}
    # A user without a name, as in many containers, is a number.
    return {name: neutral for name, neutral in names.items() if not name.isdecimal()}


def impersonal(svg: str, names: Mapping[str, str]) -> str:
    """Return ``svg`` without identifiers of GPUs and folders of paths, and with ``names`` replaced.

    Every text keeps its length, and with that its place in the picture.
    """

    def replaced(match: re.Match[str]) -> str:
        before = html.unescape(match[0])
        text = _UUID.sub(_NO_UUID, _PATH.sub(r"/home/you/\1", before))
        for private, neutral in names.items():
            text = _word(private).sub(neutral, text)
        text = text[: len(before)].ljust(len(before), _SPACE)
        return html.escape(text, quote=False).replace(_SPACE, "&#160;")

    return _TEXT.sub(replaced, svg)


def private_words(svg: str, names: Mapping[str, str]) -> list[str]:
    """Return the absolute paths, identifiers of GPUs and ``names`` in the text of ``svg``."""
    text = "\n".join(html.unescape(part) for part in _TEXT.findall(svg))
    found = [match[0] for pattern in (_PATH, _UUID) for match in pattern.finditer(text)]
    return sorted({*found, *(name for name in names if _word(name).search(text))})


def _word(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])")
