"""A Hydra project as it is: config groups, overrides, output folders, Lightning's own launch."""

from __future__ import annotations

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.system.conftest import Ltui

PROJECT = Path(__file__).parent / "hydra_project"


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.skipif(find_spec("hydra") is None, reason="hydra-core is not installed")
def test_a_hydra_project_is_watched_with_its_overrides_and_ranks(ltui: Ltui) -> None:
    shutil.copytree(PROJECT, ltui.cwd, dirs_exist_ok=True)
    overrides = ["trainer=ddp", "experiment=quick", "model.rate=0.2", "hydra.run.dir=outputs/here"]
    done = ltui("exec", "--", sys.executable, "src/train.py", *overrides, timeout=240)
    snapshot = ltui.show()
    assert snapshot["state"] == "finished"
    # 32 points, batches of 4, two ranks, three epochs.
    assert [rank["global_step"] for rank in snapshot["ranks"]] == [12, 12]
    assert snapshot["metrics"]["val/error"]["last"] < 1.0
    output = ltui.cwd / "outputs" / "here"
    used = yaml.safe_load((output / ".hydra" / "config.yaml").read_text())
    assert (used["model"]["rate"], used["data"]["count"], used["trainer"]["devices"]) == (
        0.2,
        32,
        2,
    )
    # Lightning names the job of its second rank anew, in the same folder.
    assert (output / "rank-0.txt").read_text() == "train 12"
    assert (output / "rank-1.txt").read_text() == "train_ddp_process_1 12"
    _the_caution_is_everywhere(ltui, snapshot, done.stderr + done.stdout)
    ltui.wait_until_alone()


def _the_caution_is_everywhere(ltui: Ltui, snapshot: dict[str, Any], printed: str) -> None:
    (caution,) = snapshot["cautions"]
    assert "val/error is logged in validation without sync_dist=True" in caution["what"]
    assert "sync_dist=True" in caution["remedy"]
    for text in (printed, ltui("show", "last").stdout):
        assert "WARNING: val/error is logged in validation without sync_dist" in text
