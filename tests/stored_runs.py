"""Run directories as ended runs leave them, with a specification and a history, made in bulk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ltui.training.config.run_spec import RunSpec
from ltui.training.lifecycle.launch_run import create_run_directory
from ltui.training.state.run_snapshot import Event, MetricValue, RunSnapshot, RunState
from ltui.training.store.history_writer import Batch, StoreWriter
from ltui.training.store.run_directory import RunDir

LAUNCHED = 1_790_000_000.0
"""Unix time at which the runs were launched unless a test says otherwise."""


def stored_run(home: Path, run_id: str, **changes: Any) -> RunDir:
    """A run that has ended. ``changes``: fields of its snapshot, and ``config``; ``metrics`` may be
    plain numbers, the last values; ``reported`` are the hyperparameters that it reported."""
    run_dir = RunDir(home / "runs" / run_id)
    metrics = {
        name: value
        if isinstance(value, MetricValue)
        else MetricValue(last=value, step=9, best_min=value, best_max=value)
        for name, value in changes.pop("metrics", {}).items()
    }
    config = changes.pop("config", {"trainer": {}})
    reported = changes.pop("reported", None)
    values: dict[str, Any] = {
        "id": run_id,
        "name": run_id[:-5],
        "state": RunState.FINISHED,
        "preset": "quickstart",
        "created_at": LAUNCHED,
        "started_at": LAUNCHED,
        "ended_at": LAUNCHED + 60,
        "elapsed_s": 60.0,
        "global_step": 9,
        "run_dir": str(run_dir.path),
        **changes,
    }
    snapshot = RunSnapshot(metrics=metrics, **values)
    spec = RunSpec(
        id=run_id,
        name=snapshot.name,
        created_at=snapshot.created_at or LAUNCHED,
        cwd="/",
        python="python3",
        preset=snapshot.preset,
        command=snapshot.command,
        config=None if snapshot.command else config,
    )
    run_dir.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    create_run_directory(run_dir, spec)
    writer = StoreWriter(run_dir.db_path)
    writer.write_snapshot(snapshot)
    if reported is not None:
        data = {"values": reported}
        event = Event(rank=0, seq=0, t=LAUNCHED, kind="hyperparameters", text="", data=data)
        writer.commit(1, Batch(events=[event]))
    writer.close()
    return run_dir
