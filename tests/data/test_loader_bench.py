"""``ltui bench data`` measures every preset's loader, and with several counts of workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ltui.training.config.preset_discovery import shipped_names
from tests.data.conftest import everything, ltui, needs_ffcv
from tests.json_schema import mistakes
from tests.ltui_command import answer
from tests.presets.test_all_presets import TRUSTING, made_up_cifar, scaled_down


def measured(folder: Path, preset: str, overrides: list[str]) -> dict[str, list[int | None]]:
    """Loader -> the worker counts that were measured."""
    (folder / "home").mkdir(exist_ok=True)
    sets = [word for override in overrides for word in ("--set", override)]
    short = ("--workers", "1", "--seconds", "1", "--rounds", "1", "--json")
    done = ltui("bench", "data", preset, *short, *sets, folder=folder, timeout=380)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[int | None]] = {}
    document = answer(done.stdout)
    schema = json.loads(ltui("schema", "bench data", folder=folder).stdout)
    assert mistakes(document, schema["data"]["bench data"], schema) == []
    for variant in document["variants"]:
        assert min(variant["samples_per_s"]) > 0
        found.setdefault(variant["loader"], []).append(variant["workers"])
    return found


@pytest.mark.slow
def test_sequences(tmp_path: Path) -> None:
    small = ["data.init_args.made_up=40", "data.init_args.batch_size=4"]
    assert measured(tmp_path, "sequences-mmap", small) == {"DataLoader": [0, 1]}


@needs_ffcv
@everything
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", sorted(shipped_names()))
def test_every_preset(tmp_path: Path, name: str) -> None:
    if name == "cifar10-cnn":
        made_up_cifar(tmp_path / "data", 41)
        (tmp_path / "made_up.py").write_text(TRUSTING)
        folder = f"data.init_args.folder={tmp_path / 'data'}"
        overrides = ["data.class_path=made_up.MadeUp", "data.init_args.batch_size=8", folder]
    else:
        _, overrides = scaled_down(tmp_path).get(name, (name, []))
    found = measured(tmp_path, name, overrides)
    both = "ffcv" in name or name == "quickstart"
    assert set(found) == ({"FFCV", "DataLoader"} if both else {"DataLoader"})
    assert 1 in found["DataLoader"]
