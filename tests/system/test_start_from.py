"""A run that begins with another run's checkpoint, chosen in the dashboard's form."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from textual.widgets import Input, Select

from ltui.app.panels.form_fields import KnobField, StartField
from ltui.app.panels.gpu_panel import GpuOverview
from ltui.app.screens.home import HomeScreen
from ltui.app.screens.run import RunScreen
from ltui.app.textual_app import LtuiApp
from tests.system.conftest import Ltui

pytestmark = pytest.mark.timeout(400)


def losses(ltui: Ltui, run: str) -> dict[tuple[int, int], float]:
    """Return the training loss by rank and step."""
    exported = ltui("export", run, "--metric", "train/loss", "--format", "json").stdout
    return {(row["rank"], row["step"]): row["value"] for row in json.loads(exported)}


@pytest.mark.slow
async def test_it_goes_on_from_the_other_runs_weights(
    ltui: Ltui, private_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: its losses are those that the other went on to have."""
    ltui(
        *("run", "quickstart", "--name", "source", "--detach"),
        *("--set", "trainer.max_epochs=1000", "--set", "data.init_args.loader=torch"),
    )
    ltui.wait_for_step(3)
    ltui("checkpoint", "source")
    saved = ltui.wait(lambda s: s["checkpoints"])["checkpoints"][0]
    saved_step = saved["global_step"]
    ltui.wait_for_step(saved_step + 20)
    ltui("stop", "source")
    source = ltui.show()
    monkeypatch.chdir(ltui.cwd)

    app = LtuiApp(private_home)
    async with app.run_test(size=(160, 50)) as pilot:

        async def until(true: Callable[[], object]) -> None:
            deadline = time.monotonic() + 120
            while not true():
                assert time.monotonic() < deadline, "it never came"
                await pilot.pause(0.05)

        screen = app.screen
        assert isinstance(screen, HomeScreen)
        await pilot.press("N")
        await until(lambda: screen.form_panel.result is not None)
        fields = {field.knob.key: field for field in screen.query(KnobField)}
        fields["trainer.max_epochs"].query_one(Input).value = "1000"
        fields["data.init_args.loader"].query_one(Select).value = "torch"
        screen.query_one(StartField).query_one(Input).value = f"source:{saved_step}"
        screen.form_panel.launch()
        await until(lambda: isinstance(app.screen, RunScreen) and app.screen.query(GpuOverview))
        await pilot.pause()

    ltui.wait(lambda s: s["id"] != source["id"] and (s["global_step"] or 0) >= saved_step + 10)
    ltui("stop", "last")
    begun = ltui.show()
    assert begun["attempt"] == 1
    before, after = losses(ltui, source["id"]), losses(ltui, begun["id"])
    last = min(source["global_step"], begun["global_step"])
    steps = {(rank, step) for rank in (0, 1) for step in range(saved_step + 1, last + 1)}
    assert steps == {key for key in after if key[1] <= last}
    assert {key: after[key] for key in steps} == {key: before[key] for key in steps}
