"""Read the time ledger of a run, with advice: from its history, its specification and a benchmark.

The benchmark is the last one of ``ltui bench data`` for the preset, kept as
``bench/PRESET.json`` in ltui's home.
"""

from __future__ import annotations

import re
from pathlib import Path

from msgspec import Struct

from ltui.training.config.run_spec import RunSpec
from ltui.training.config.yaml_document import iterate_values
from ltui.training.problem import ProblemError
from ltui.training.state.run_snapshot import RunSnapshot
from ltui.training.state.time_advice import Advice, LoaderSetting, advice
from ltui.training.state.time_ledger import TimeLedger, time_ledger
from ltui.training.store.run_directory import RunDir, read_json, write_json
from ltui.training.store.time_queries import TimeStore

MAX_RANKS = 64
"""Maximum number of ranks with an account."""
_PLAIN_NAME = re.compile(r"[\w.-]{1,100}")


class RunTime(Struct, frozen=True):
    """Where the time of a run went, and what would make it faster."""

    ledger: TimeLedger
    advice: list[Advice]


def read_time(run_dir: RunDir, snapshot: RunSnapshot, *, in_detail: bool = False) -> RunTime:
    """Return the time of a run. Raise ``ProblemError`` if its history cannot be read.

    ``in_detail``: with accounts of ranks and machines.
    """
    with TimeStore(run_dir) as store:
        facts = store.time_facts(snapshot)
    ledger = time_ledger(facts, MAX_RANKS if in_detail else 0)
    return RunTime(ledger, advice(ledger, facts, _loader(run_dir)))


def _loader(run_dir: RunDir) -> LoaderSetting:
    try:
        spec = run_dir.read_spec()
    except ProblemError:
        return LoaderSetting()
    if spec.preset is None:
        return LoaderSetting()
    best = recommended_workers(run_dir.home, spec.preset)
    return LoaderSetting(preset=spec.preset, workers=_workers(spec), best_workers=best)


def _workers(spec: RunSpec) -> int | None:
    for path, value in iterate_values(spec.config or {}):
        if path.startswith("data.") and path.endswith("workers") and isinstance(value, int):
            return value
    return None


def _bench_path(home: Path, preset: str) -> Path | None:
    return home / "bench" / f"{preset}.json" if _PLAIN_NAME.fullmatch(preset) else None


def recommended_workers(home: Path, preset: str) -> int | None:
    """Return how many workers the last benchmark of a preset has recommended."""
    path = _bench_path(home, preset)
    workers = ((read_json(path) if path else None) or {}).get("workers")
    return workers if isinstance(workers, int) else None


def record_recommendation(home: Path, preset: str, workers: int | None) -> None:
    """Keep what a benchmark has recommended."""
    path = _bench_path(home, preset)
    if path is not None and workers is not None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_json(path, {"workers": workers})
