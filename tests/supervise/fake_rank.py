"""A rank without torch: keeps a pulse, puts step records, obeys the control file."""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import signal
import sys
import time
from pathlib import Path

from ltui.training.queue.control import Command, ControlFile
from ltui.training.queue.pulse import PulseWriter
from ltui.training.queue.records import Kind, Outcome, Phase, StepField
from ltui.training.queue.ring import RingWriter

RUN_DIR = Path(os.environ["LTUI_RUN_DIR"])
QUEUES = RUN_DIR / "queue" / os.environ["LTUI_ATTEMPT"]


class Lockstep:
    """Stands in for the gradient all-reduce: nobody passes a step that another has not reached."""

    def __init__(self, rank: int, ranks: int) -> None:
        handle = os.open(QUEUES / "lockstep.bin", os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(handle, 8 * ranks)
        self.words = memoryview(mmap.mmap(handle, 8 * ranks)).cast("q")
        os.close(handle)
        self.rank = rank

    def meet(self, step: int) -> None:
        self.words[self.rank] = step
        while min(self.words) < step:
            time.sleep(0.001)


class FakeRank:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rank = options.rank
        QUEUES.mkdir(parents=True, exist_ok=True)
        size = int(os.environ["LTUI_QUEUE_BYTES"])
        self.ring = RingWriter.create(QUEUES / f"rank-{self.rank:05d}.queue", size)
        self.pulse = PulseWriter(self.ring.view)
        self.control = ControlFile.open(QUEUES / "control.bin")
        resumed = os.environ.get("LTUI_RESUME_FROM")
        self.step = int(Path(resumed).name.split("-")[1]) if resumed else 0
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        self.pulse.set(
            pid=os.getpid(), start_ticks=ticks, rank=self.rank, world_size=options.ranks,
            phase=Phase.SETUP, global_step=self.step,
        )  # fmt: skip
        hello = {"rank": self.rank, "world_size": options.ranks, "pid": os.getpid(),
                 "start_ticks": ticks, "host": "here", "device": "cpu"}  # fmt: skip
        self.label(Kind.HELLO, hello)
        plan = {"max_steps": options.steps, "max_epochs": 1, "batches_per_epoch": options.steps}
        self.label(Kind.PLAN, plan)
        self.lockstep = Lockstep(options.rank, options.ranks)
        self.decided = 0

    def label(self, kind: Kind, document: dict) -> None:
        self.ring.put(kind, time.monotonic_ns(), json.dumps(document).encode(), ())

    def event(self, kind: str, text: str, **fields: object) -> None:
        document = {"kind": kind, "text": text, "step": self.step, "t": time.time(), **fields}
        self.label(Kind.EVENT, document)

    def train(self) -> None:
        while self.step < self.options.steps:
            self.pulse.set(phase=Phase.FORWARD, batch=self.step)
            time.sleep(self.options.pause)
            self.pulse.set(phase=Phase.BACKWARD)
            self.lockstep.meet(self.step + 1)
            self.step += 1
            row = [0.0] * len(StepField)
            row[StepField.GLOBAL_STEP] = self.step
            row[StepField.BATCH] = self.step - 1
            row[StepField.SAMPLES] = 8
            row[StepField.LOSS] = 1.0 / self.step
            row[StepField.STEP_S] = self.options.pause
            row[StepField.WALL_S] = time.time()
            row[StepField.STEPPED] = 1.0
            self.ring.put_row(row, Kind.STEP)
            self.pulse.set(phase=Phase.BATCH_END, global_step=self.step)
            self.act()
            if self.step == self.options.fail_at and self.rank == self.options.fail_rank:
                self.fail()
        self.pulse.set(phase=Phase.ENDED, outcome=Outcome.FINISHED)

    def fail(self) -> None:
        self.event("exception", "boom", type="RuntimeError", message="boom at last")
        self.pulse.set(phase=Phase.EXCEPTION, outcome=Outcome.RAISED)
        sys.exit(1)

    def act(self) -> None:
        """Rank 0 binds all to the next step, as real ranks agree on one."""
        state = self.control.read()
        asked, decided = state.request, state.decision
        if self.rank == 0 and asked and asked.request_id > (decided.decision_id if decided else 0):
            self.control.decide(asked.request_id, asked.kind, self.step + 1)
        elif decided and decided.decision_id > self.decided and self.step >= decided.at_global_step:
            self.decided = decided.decision_id
            self.obey(decided.kind)

    def obey(self, kind: Command) -> None:
        if kind is Command.STOP:
            self.stop()
        elif kind is Command.CHECKPOINT:
            self.save("request")
        elif kind is Command.PAUSE:
            self.pulse.set(phase=Phase.PAUSED)
            while (now := self.control.read().request) and now.kind is Command.PAUSE:
                time.sleep(0.02)

    def stop(self) -> None:
        self.save("stop")
        self.event("stopped", "stopped", global_step=self.step)
        self.pulse.set(phase=Phase.ENDED, outcome=Outcome.STOPPED)
        sys.exit(0)

    def save(self, reason: str) -> None:
        if self.rank:
            return
        path = RUN_DIR / "checkpoints" / f"step-{self.step:08d}-{reason}.ckpt"
        path.write_bytes(b"weights")
        manifest = {
            "version": 1, "file": path.name, "sha256": hashlib.sha256(b"weights").hexdigest(),
            "size_bytes": 7, "saved_at": time.time(), "global_step": self.step, "reason": reason,
        }  # fmt: skip
        part = RUN_DIR / f".{path.name}.part"
        part.write_text(json.dumps(manifest))
        part.rename(f"{path}.json")
        self.event("checkpoint_saved", "saved", path=str(path), global_step=self.step)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100000)
    parser.add_argument("--pause", type=float, default=0.02)
    parser.add_argument("--fail-at", type=int, default=-1)
    parser.add_argument("--fail-rank", type=int, default=0)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    FakeRank(parser.parse_args()).train()


if __name__ == "__main__":
    main()
