"""The wheel has every file of the source folders, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("app", "training", "widgets", "presets")


def test_wheel_has_the_tree(tmp_path: Path) -> None:
    # A copy, because setuptools leaves build folders beside what it builds.
    source = tmp_path / "source"
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    for name in tracked:
        if (ROOT / name).is_file():
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path)],
        cwd=source,
        capture_output=True,
        check=True,
        timeout=100,
    )
    (wheel,) = tmp_path.glob("*.whl")
    packed = {
        name.removeprefix("ltui/").replace("ltui_rank/", "training/rank_api/")
        for name in zipfile.ZipFile(wheel).namelist()
        if ".dist-info/" not in name
    }
    expected = {
        name
        for name in tracked
        if name.startswith(tuple(f"{folder}/" for folder in FOLDERS)) and (ROOT / name).is_file()
    }
    assert packed == expected
