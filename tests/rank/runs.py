"""A run directory for tests: the environment of its ranks, and the records that they wrote."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ltui.training.rank.callback_factory import rebuild_callback
from ltui.training.shared.rank_environment import RankEnvironment
from ltui.training.shared.record_types import PulseState, RecordKind, StepField
from ltui.training.tensor_queue.control_block import Command, ControlFile
from ltui.training.tensor_queue.queue_reader import QueueReader
from tests.required import required

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "scripts" / "train.py"

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}
"""Options of a Trainer that prints and writes nothing by itself."""


@dataclass
class RunFolder:
    """One run's directory, attempt 1."""

    path: Path
    attempt: int = 1
    requests: int = 0

    def environment(self, **extra: str) -> dict[str, str]:
        return {
            "LTUI_RUN_DIR": str(self.path),
            "LTUI_RUN_ID": "test",
            "LTUI_ATTEMPT": str(self.attempt),
            **extra,
        }

    def rank_environment(self, **extra: str) -> RankEnvironment:
        """Return what a rank reads of ``environment``."""
        return required(RankEnvironment.read(self.environment(**extra)))

    def callback(self, **extra: str) -> Any:
        """Return the callback that Lightning's factory makes in a rank of this run."""
        return rebuild_callback("lightning", self.rank_environment(**extra))

    @property
    def queue_dir(self) -> Path:
        return self.path / "queue" / str(self.attempt)

    @property
    def checkpoints(self) -> list[Path]:
        return sorted((self.path / "checkpoints").glob("*.ckpt"))

    def request(self, command: Command) -> int:
        self.requests += 1
        control = ControlFile.open(self.queue_dir / "control.bin")
        control.request(command, self.requests)
        control.close()
        return self.requests

    def plan(self, step: int | None = None, epochs: int | None = None) -> None:
        """Replace the planned stop."""
        self.queue_dir.mkdir(parents=True, exist_ok=True)
        control = ControlFile.open(self.queue_dir / "control.bin")
        control.plan(step, epochs)
        control.close()

    @contextlib.contextmanager
    def _reader(self, rank: int) -> Iterator[QueueReader | None]:
        path = self.queue_dir / f"rank-{rank:05d}.queue"
        if not path.exists():
            yield None
            return
        with contextlib.closing(QueueReader(path)) as reader:
            yield reader

    def records(self, rank: int = 0) -> list[Any]:
        records: list[Any] = []
        with self._reader(rank) as reader:
            while reader is not None and (new := reader.poll().records):
                records += new
        return records

    def pulse(self, rank: int = 0) -> PulseState | None:
        with self._reader(rank) as reader:
            return None if reader is None else reader.pulse()

    def steps(self, rank: int = 0) -> np.ndarray:
        rows = [r.array for r in self.records(rank) if r.kind == RecordKind.STEP]
        return np.array(rows).reshape(-1, len(StepField))

    def column(self, field_: StepField, rank: int = 0) -> list[float]:
        column: list[float] = self.steps(rank)[:, field_].tolist()
        return column

    def labels(self, kind: RecordKind, rank: int = 0) -> list[dict[str, Any]]:
        return [json.loads(r.label) for r in self.records(rank) if r.kind == kind]

    def events(self, kind: str, rank: int = 0) -> list[dict[str, Any]]:
        return [e for e in self.labels(RecordKind.EVENT, rank) if e["kind"] == kind]

    def metrics(self, rank: int = 0) -> dict[str, list[tuple[int, float]]]:
        """Return the metrics as name -> [(step, value)]."""
        metrics: dict[str, list[tuple[int, float]]] = {}
        for record in self.records(rank):
            if record.kind == RecordKind.METRICS:
                label = json.loads(record.label)
                for name, value in zip(label["names"], record.array.tolist(), strict=True):
                    metrics.setdefault(name, []).append((label["step"], value))
        return metrics


@dataclass
class Script:
    """An unmodified script under a run's environment, in a session of its own."""

    run: RunFolder
    side: Path
    arguments: list[str]
    torchrun: int = 0
    """Ranks that torch elastic starts; 0: the script's own launcher does."""
    python: str = sys.executable
    extra: dict[str, str] = field(default_factory=dict)

    def start(self) -> Script:
        command = [self.python]
        if self.torchrun:
            command += ["-m", "torch.distributed.run", f"--nproc-per-node={self.torchrun}"]
            command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
        self.log = self.run.path / f"log-{time.monotonic_ns()}.txt"
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("LTUI_")},
            **self.run.environment(**self.extra),
            "PYTHONPATH": str(self.side),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, str(SCRIPT), *self.arguments],
                env=environment,
                cwd=self.run.path,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def __enter__(self) -> Script:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.end()

    def wait(self, s: float = 110) -> int:
        try:
            return self.process.wait(s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running:\n{self.output()}") from None

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def pids(self, ranks: int = 2) -> list[int]:
        return [pulse.pid for r in range(ranks) if (pulse := self.run.pulse(r)) is not None]

    def end(self) -> None:
        for pid in [self.process.pid, *self.pids()]:
            try:
                os.killpg(os.getpgid(pid), signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        self.process.wait(60)
