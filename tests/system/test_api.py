"""The example of docs/api.md: a program that starts, watches, stops and resumes a run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.system.conftest import Ltui

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")


def test_the_example_of_the_page_runs(ltui: Ltui) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
    loaded = "import sys\nassert not {'torch', 'textual'} & {*sys.modules}\n"
    done = subprocess.run(
        [sys.executable, "-c", example + loaded],
        cwd=ltui.cwd,
        env=ltui.environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    met, stopped, losses, again = done.stdout.splitlines()
    assert met.startswith("met - at step ")
    ends = [
        re.fullmatch(r"stopped at step (\d+), checkpoint verified", e) for e in (stopped, again)
    ]
    first, last = (int(end[1]) for end in ends if end is not None)
    assert losses.startswith(f"{first} losses, the last one at step {first} 0.")
    assert last >= first + 10
    assert ltui.steps_on_record() == list(range(1, last + 1))
    assert ltui.show()["attempt"] == 2
