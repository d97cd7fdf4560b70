"""The wheel has every file of the source folders, and nothing else; what it needs is locked."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import requires
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("app/", "training/", "widgets/", "presets/")


def test_wheel_has_the_tree(tmp_path: Path) -> None:
    # A copy, because setuptools leaves build folders beside what it builds.
    source = tmp_path / "source"
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    output = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tracked = [name for name in output.split() if (ROOT / name).is_file()]
    for name in tracked:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, source / name)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path)],
        cwd=source,
        capture_output=True,
        check=True,
        timeout=100,
    )
    (wheel,) = tmp_path.glob("*.whl")
    packed = {
        name.replace("ltui/api/", "app/api/")
        .removeprefix("ltui/")
        .replace("ltui_rank/", "training/rank_api/")
        for name in zipfile.ZipFile(wheel).namelist()
        if ".dist-info/" not in name
    }
    assert packed == {name for name in tracked if name.startswith(FOLDERS)}


def test_every_requirement_has_a_locked_version() -> None:
    lock = (ROOT / ".ci/requirements.txt").read_text().lower()
    required = {re.split(r"[^\w.-]", line.lower())[0] for line in requires("ltui-train") or ()}
    assert required - {"ltui-train"} <= set(re.findall(r"^([\w.-]+)==", lock, re.MULTILINE))
