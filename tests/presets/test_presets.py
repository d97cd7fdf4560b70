"""Every shipped preset: it loads, checks clean, and its classes exist and take its arguments."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from ltui.training.config.device_selection import Machine
from ltui.training.config.preset_discovery import shipped_names
from ltui.training.config.presets import apply_form, field_texts, load_preset
from ltui.training.config.structure_check import TRAINER_ARGUMENTS
from ltui.training.config.yaml_document import value_at
from tests.presets.preset_spec import preset_spec

MACHINES = (Machine(gpus=0, cores=2), Machine(gpus=1, cores=8), Machine(gpus=8, cores=64))


@pytest.mark.parametrize("name", shipped_names())
@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: f"{m.gpus}gpu")
def test_a_preset_checks_clean_everywhere(name: str, machine: Machine) -> None:
    assert preset_spec(name, machine).nproc == (machine.gpus or 2)


@pytest.mark.parametrize("name", shipped_names())
def test_a_presets_form_is_whole(name: str) -> None:
    preset = load_preset(name)
    assert preset.about
    assert preset.tags
    assert preset.knobs
    missing = object()
    for knob in preset.knobs:
        assert value_at(preset.document, knob.key, missing) is not missing, knob.key
        if knob.type == "int":  # `ltui presets --json` prints them as they are written
            assert {type(knob.min), type(knob.max)} <= {int, type(None)}
    result = apply_form(preset, field_texts(preset), MACHINES[0])
    assert result.problems == ()
    assert result.overrides == ()


_LOOK = """
import importlib, inspect, json, sys
from lightning.pytorch import Trainer
found = {}
for path, arguments in json.loads(sys.argv[1]):
    module, _, name = path.rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    inspect.signature(cls).bind(**arguments)
    found[path] = [base.__name__ for base in cls.__mro__]
names = list(inspect.signature(Trainer).parameters)
print(json.dumps({"classes": found, "trainer": names}))
"""


@pytest.mark.slow
def test_classes_and_trainer_arguments_are_the_real_ones() -> None:
    uses: list[tuple[str, Mapping[str, Any]]] = []
    for name in shipped_names():
        document = load_preset(name).document
        uses += [(document[k]["class_path"], document[k]["init_args"]) for k in ("model", "data")]
    # torch stays out of this process.
    command = [sys.executable, "-c", _LOOK, json.dumps(uses)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=True)
    seen = json.loads(done.stdout)
    for path, _ in uses:
        base = "LightningModule" if ".models." in path else "LightningDataModule"
        assert base in seen["classes"][path]
    # Versions of Lightning differ by an argument or two; none may be unknown to the checker.
    assert set(seen["trainer"]) <= set(TRAINER_ARGUMENTS)
    assert len(TRAINER_ARGUMENTS) - len(seen["trainer"]) <= 2
