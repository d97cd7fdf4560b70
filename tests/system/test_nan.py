"""A real training whose loss becomes NaN: it is named everywhere, and nothing continues from it."""

from __future__ import annotations

import csv
import io
import json
import shutil
import sys

import pytest

from ltui.training.store.find_run import find_run
from ltui.training.store.history_reader import RunStore
from tests.system.conftest import SCRIPTS, Ltui

NAN_FROM = 120


def start(ltui: Ltui, *arguments: str, options: tuple[str, ...] = ()) -> int:
    """Start the script; return the step of a checkpoint before the NaN, and save one after it."""
    shutil.copy(SCRIPTS / "nan_script.py", ltui.cwd)
    command = (sys.executable, "nan_script.py", str(NAN_FROM), *arguments)
    ltui("exec", "--detach", *options, "--", *command)
    ltui.wait_for_step(5)
    ltui("checkpoint", "last")
    (saved,) = ltui.show()["checkpoints"]
    assert saved["weights"] == "finite"
    ltui.wait(lambda s: any(v["kind"] == "nan_loss" for v in s["verdicts"]))
    ltui("checkpoint", "last")
    return int(saved["global_step"])


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_nan_is_named_everywhere_and_a_resume_goes_back_before_it(ltui: Ltui) -> None:
    good = start(ltui, "2000")
    running = ltui.show()
    words = f"loss NaN since step {NAN_FROM}"
    assert (running["state"], running["state_word"]) == ("running", f"running, {words}")
    (verdict,) = running["verdicts"]
    assert f"from step {good}, the last checkpoint before the NaN" in verdict["remedy"]
    stop = ltui("stop", "last").stdout
    assert f"The last checkpoint before the NaN is step {good}." in stop
    stopped = ltui.show()
    assert stopped["state"] == "stopped"
    assert stopped["state_word"] == f"stopped, {words}"
    assert stopped["detail"].endswith(words)
    # The loss of each step, which the script logs as well, is not shown beside it.
    assert stopped["metrics"].keys() == {"train_loss"}
    assert stopped["metrics"]["train_loss"]["last"] == "NaN"
    assert [c["weights"] for c in stopped["checkpoints"]] == ["finite", "NaN", "NaN"]
    assert f"stopped, {words}" in ltui("runs").stdout
    text = ltui("show", "last").stdout
    assert f"step {good}, finite, checksum ok" in text
    assert f"step {stopped['global_step']}, NaN weights, checksum ok" in text
    table = csv.DictReader(io.StringIO(ltui("export", "last", "--format", "csv").stdout))
    assert {row["value"] for row in table if int(row["step"]) >= NAN_FROM} == {"NaN"}
    rows = json.loads(ltui("export", "last", "--format", "json").stdout)
    assert {row["value"] for row in rows if row["step"] >= NAN_FROM} == {"NaN"}

    refused = ltui("resume", "last", "--from", "3", check=2).stderr
    assert f"There are checkpoints of steps {good}, " in refused
    ltui("resume", "last", "--detach")
    ltui.wait(lambda s: s["attempt"] == 2 and (s["global_step"] or 0) >= NAN_FROM + 20)
    assert ltui.show()["state_word"] == "running"
    ltui("stop", "last")
    done = ltui("resume", "last", "--detach", "--from", str(good))
    assert "Warning" not in done.stderr
    resumed = ltui.wait(lambda s: s["attempt"] == 3 and s["state"] == "running")
    assert resumed["global_step"] < NAN_FROM
    ltui("stop", "--kill", "last")
    ltui.wait_until_alone()


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("saves_before", [True, False])
def test_an_automatic_restart_goes_back_before_the_nan_or_says_that_it_cannot(
    ltui: Ltui, saves_before: bool
) -> None:
    ltui.environment["LTUI_RESTART_DELAY_S"] = "0.1"
    good = start(ltui, "300", "crash", options=("--restarts", "1"))
    if not saves_before:
        checkpoints = ltui.show()["checkpoints"]
        for path in (checkpoints[0]["path"], f"{checkpoints[0]['path']}.json"):
            (ltui.home / path).unlink()
    ended = ltui.wait(lambda s: s["state"] in ("finished", "failed", "crashed"))
    if saves_before:
        assert (ended["state"], ended["attempt"], ended["global_step"]) == ("finished", 2, 300)
        assert not ended["verdicts"]
        with RunStore(find_run(ltui.home, "last")) as store:
            assert [attempt.resumed_step for attempt in store.attempts()] == [None, good]
            event = [event for event in store.events() if event.kind == "attempt"][1]
        assert "has NaN weights" in event.data["skipped"][0]
    else:
        assert "not restarted: there is no checkpoint before the NaN" in ended["detail"]
    ltui.wait_until_alone()
