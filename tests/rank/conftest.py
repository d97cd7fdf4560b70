"""Runs for the tests of the rank side."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rank.runs import QUIET, RunFolder, rank_side


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


@pytest.fixture(scope="session")
def side(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rank_side(tmp_path_factory.mktemp("rank-side"))


@pytest.fixture
def fit(run: RunFolder) -> Iterator[Any]:
    """``fit(model, train, val, **trainer options)`` with the callback, in this process."""
    import lightning.pytorch as pl

    def train(model: Any, *data: Any, call: str = "fit", extra: Any = None, **options: Any) -> Any:
        trainer = options.pop("trainer", None) or pl.Trainer(
            **{
                **QUIET,
                "devices": 1,
                "num_sanity_val_steps": 0,
                "default_root_dir": run.path,
                "callbacks": [run.callback(**(extra or {}))],
                **options,
            }
        )
        getattr(trainer, call)(model, *data)
        return trainer

    yield train
    from ltui.training.rank import channel

    if channel._current is not None:
        channel._current.close()
        channel._current = None
