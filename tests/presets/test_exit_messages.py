"""What libraries print while the rank of a preset exits is kept out of its log."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import atexit, os
from ltui.training.rank import train_preset
atexit.register(os.write, 2, b"leaked")  # runs after what is registered later
atexit.register(train_preset.prepare_exit)
train_preset._is_shut_down = {after_training}
os.write(2, b"trained")
"""


def exit_logs(folder: Path, *, after_training: bool) -> dict[str, str]:
    with (folder / "rank-00000.log").open("wb") as log:
        script = SCRIPT.format(after_training=after_training)
        subprocess.run([sys.executable, "-c", script], stderr=log, check=True)
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_messages_of_the_exit_are_in_a_file_of_their_own(tmp_path: Path) -> None:
    logs = exit_logs(tmp_path, after_training=True)
    assert logs == {"rank-00000.log": "trained", "rank-00000.exit": "leaked"}


def test_after_an_error_everything_stays_in_the_log(tmp_path: Path) -> None:
    logs = exit_logs(tmp_path, after_training=False)
    assert logs == {"rank-00000.log": "trainedleaked"}
