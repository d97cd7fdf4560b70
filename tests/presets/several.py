"""Trains several configurations one after the other in the same ranks, which import torch once.

Started by torch elastic: ``several.py RUNS.json``, a list of what
``ltui.training.rank.train_preset`` is given, each with a ``name``. Every rank
writes ``report-RANK.json``: {name: {metric or fact: number} or {"error": text}}.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from ltui.training.rank.train_preset import build_cli


def main(path: str) -> None:
    rank = int(os.environ["RANK"])
    report: dict[str, Any] = {}
    for one in json.loads(Path(path).read_text()):
        sys.path[:0] = one.get("python_path", [])
        try:
            report[one["name"]] = train(one)
        except Exception:
            report[one["name"]] = {"error": traceback.format_exc()}
        Path(f"report-{rank}.json").write_text(json.dumps(report))
        if "error" in report[one["name"]]:
            # The other rank may wait for this one.
            os._exit(1)


def train(one: dict[str, Any]) -> dict[str, float]:
    cli = build_cli(one["config"], train=True)
    seen: dict[str, float] = {}
    from lightning.pytorch import Callback

    class Report(Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            seen.setdefault("steps", 0)

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            # Before the first use: what was just used may still be gathered.
            seen["parameters"] = sum(_here(p) for p in pl_module.parameters())

        def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
            seen["steps"] = trainer.global_step

        def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
            seen.update({k: float(v) for k, v in trainer.callback_metrics.items()})
            if stage == "fit":
                seen["batches"] = trainer.num_training_batches

    cli.trainer.callbacks.append(Report())
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    for method in one["after_fit"]:
        getattr(cli.trainer, method)(cli.model, datamodule=cli.datamodule, verbose=False)
    close = getattr(cli.datamodule, "close", None)
    if close is not None:
        close()
    return seen


def _here(parameter: Any) -> int:
    """Numbers of a parameter that this rank holds."""
    local = getattr(parameter, "to_local", None)
    return int((local() if local is not None else parameter).numel())


if __name__ == "__main__":
    main(sys.argv[1])
