"""A rank without torch: keeps a pulse, puts step records, obeys the control file, saves.

Its weights are a chain of hashes, one link a step, so whoever reads a loss or a checkpoint can tell
whether it is the right one. Checkpoints are written as real ranks do: parts of every rank, a
barrier, then ``publish_checkpoint``, which real ranks call too.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import signal
import sys
import time
from pathlib import Path

from fake_weights import body_of, loss_of, next_weights

from ltui.training.rank.heartbeat_thread import start_heartbeat_thread
from ltui.training.shared.checkpoint_files import (
    checkpoint_name,
    partial_path,
    prune_periodic,
    publish_checkpoint,
    rank_file,
    remove,
    require_space,
)
from ltui.training.shared.record_types import Outcome, Phase, RecordKind, StepField
from ltui.training.tensor_queue.control_block import Command, ControlFile
from ltui.training.tensor_queue.pulse_block import PulseWriter
from ltui.training.tensor_queue.ring_writer import RingWriter

RUN_DIR = Path(os.environ["LTUI_RUN_DIR"])
ATTEMPT = int(os.environ["LTUI_ATTEMPT"])
QUEUES = RUN_DIR / "queue" / str(ATTEMPT)
CHECKPOINTS = RUN_DIR / "checkpoints"
_CHUNK_BYTES = 1 << 16


class Lockstep:
    """Stands in for collectives: nobody passes a place that another has not reached."""

    STEP, SAVE, SAVED, LEFT = range(4)

    def __init__(self, rank: int, ranks: int) -> None:
        handle = os.open(QUEUES / "lockstep.bin", os.O_RDWR | os.O_CREAT, 0o600)
        size = 8 * ranks * 4
        os.ftruncate(handle, size)
        self.words = memoryview(mmap.mmap(handle, size)).cast("q")
        os.close(handle)
        self.rank, self.ranks = rank, ranks

    def meet(self, number: int, place: int = STEP, value: int = 0) -> list[int]:
        """Wait until all ranks reach ``number``. Return the value that each rank added to it."""
        first = place * self.ranks
        self.words[first + self.rank] = number + value
        while min(self.words[first : first + self.ranks]) < number:
            time.sleep(0.001)
        return [word - number for word in self.words[first : first + self.ranks]]


class FakeRank:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rank = options.rank
        QUEUES.mkdir(parents=True, exist_ok=True)
        size = int(os.environ["LTUI_QUEUE_BYTES"])
        self.ring = RingWriter.create(QUEUES / f"rank-{self.rank:05d}.queue", size)
        self.pulse = PulseWriter(self.ring.view)
        self.control = ControlFile.open(QUEUES / "control.bin")
        self.step, self.weights = 0, b""
        resumed = os.environ.get("LTUI_RESUME_FROM")
        if resumed:
            self.step = int(Path(resumed).name.split("-")[1])
            self.load(Path(resumed))
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        self.pulse.set(
            pid=os.getpid(), start_ticks=ticks, rank=self.rank, world_size=options.ranks,
            phase=Phase.SETUP, global_step=self.step,
        )  # fmt: skip
        hello = {"rank": self.rank, "world_size": options.ranks, "pid": os.getpid(),
                 "start_ticks": ticks}  # fmt: skip
        hello |= (
            {"device": f"cuda:{self.rank}"} if options.gpus else {"host": "here", "device": "cpu"}
        )
        self.label(RecordKind.HELLO, hello)
        plan = {"max_steps": options.steps, "max_epochs": 1, "batches_per_epoch": options.steps}
        self.label(RecordKind.PLAN, plan)
        self.lockstep = Lockstep(options.rank, options.ranks)
        self.saves = 0
        self.decided = 0

    def load(self, checkpoint: Path) -> None:
        """Take the weights up; they must be what ``step`` steps of training give."""
        data = checkpoint.read_bytes()
        self.weights = data[:32]
        expected = b""
        for step in range(1, self.step + 1):
            expected = next_weights(expected, step)
        own = rank_file(checkpoint, self.rank).read_bytes()
        if (self.weights, own) != (expected, b"rank %d " % self.rank + expected) or (
            data != body_of(self.weights, len(data) - 32)
        ):
            sys.exit(f"{checkpoint.name} holds other weights than step {self.step} had")

    def label(self, kind: RecordKind, document: dict) -> None:
        self.ring.put(kind, time.monotonic_ns(), json.dumps(document).encode(), ())

    def event(self, kind: str, text: str, **fields: object) -> None:
        document = {"kind": kind, "text": text, "step": self.step, "t": time.time(), **fields}
        self.label(RecordKind.EVENT, document)

    def train(self) -> None:
        while self.step < self.options.steps:
            self.wait_at_the_gate()
            self.pulse.set(phase=Phase.FORWARD, batch=self.step)
            began = time.monotonic()
            slow = self.rank == self.options.slow_rank
            time.sleep(self.options.pause + (self.options.slow if slow else 0.0))
            if self.step == self.options.spin_at:
                self.spin()
            forward_s = time.monotonic() - began
            self.pulse.set(phase=Phase.BACKWARD)
            self.lockstep.meet(self.step + 1)
            self.step += 1
            self.weights = next_weights(self.weights, self.step)
            step_row = self.ring.row(RecordKind.STEP, len(StepField))
            row = step_row.fields
            row[StepField.GLOBAL_STEP] = self.step
            row[StepField.BATCH] = self.step - 1
            row[StepField.SAMPLES] = 8
            row[StepField.LOSS] = loss_of(self.weights)
            row[StepField.STEP_S] = time.monotonic() - began
            row[StepField.FORWARD_S] = forward_s
            row[StepField.WALL_S] = time.time()
            row[StepField.STEPPED] = 1.0
            step_row.publish(time.monotonic_ns())
            self.pulse.set(phase=Phase.BATCH_END, global_step=self.step)
            self.act()
            if self.options.save_every and self.step % self.options.save_every == 0:
                self.save("periodic")
                if self.rank == 0:
                    prune_periodic(CHECKPOINTS, int(os.environ["LTUI_CHECKPOINT_KEEP"]))
            if self.step == self.options.fail_at and self.rank == self.options.fail_rank:
                self.fail()
        self.pulse.set(phase=Phase.ENDED, outcome=Outcome.FINISHED)
        # The process group is left together, as real ranks leave theirs.
        self.lockstep.meet(1, Lockstep.LEFT)

    def wait_at_the_gate(self) -> None:
        if self.options.gate and self.step == self.options.gate_at:
            while not self.options.gate.exists():
                time.sleep(0.01)

    def spin(self) -> None:
        """Stand in for a call that waits for a GPU: CUDA uses a core for that."""
        start_heartbeat_thread(RUN_DIR, ATTEMPT, self.rank)
        while True:
            pass

    def fail(self) -> None:
        self.event("exception", "boom", type="RuntimeError", message="boom at last")
        self.pulse.set(phase=Phase.EXCEPTION, outcome=Outcome.RAISED)
        sys.exit(1)

    def act(self) -> None:
        """Rank 0 binds all to the next step, as real ranks agree on one."""
        state = self.control.read()
        asked, decided = state.request, state.decision
        if state.plan and state.plan.at_global_step == self.step:
            self.stop()
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
        if not self.save("stop"):
            return
        self.pulse.set(phase=Phase.STOPPING, outcome=Outcome.STOPPED)
        self.event("stopped", "stopped", global_step=self.step)
        while self.options.end_gate and not self.options.end_gate.exists():
            time.sleep(0.01)
        self.pulse.set(phase=Phase.ENDED)
        self.lockstep.meet(1, Lockstep.LEFT)
        sys.exit(0)

    def save(self, reason: str) -> bool:
        self.pulse.set(phase=Phase.CHECKPOINT)
        self.saves += 1
        path = CHECKPOINTS / checkpoint_name(self.step, reason)
        error = None
        try:
            if self.rank == 0:
                require_space(CHECKPOINTS, self.options.size)
                self.write(partial_path(path), body_of(self.weights, self.options.size))
            self.write(
                partial_path(rank_file(path, self.rank)), b"rank %d " % self.rank + self.weights
            )
        except OSError as failure:
            error = str(failure)
            remove(partial_path(rank_file(path, self.rank)))
        self.lockstep.meet(self.saves, Lockstep.SAVE)
        if self.rank == 0 and error is None:
            try:
                path, _ = publish_checkpoint(
                    partial_path(path), path, self.options.ranks, global_step=self.step, epoch=0,
                    reason=reason, attempt=ATTEMPT, fit=1,
                )  # fmt: skip
            except OSError as failure:
                error = str(failure)
        if error is not None:
            remove(partial_path(path))
        # What the barrier carries: that this rank could save, or not.
        ok = all(self.lockstep.meet(2 * self.saves, Lockstep.SAVED, value=error is None))
        if self.rank == 0:
            kind = "checkpoint_saved" if ok else "checkpoint_failed"
            text = f"saved {path.name}" if ok else f"No checkpoint was saved: {error}."
            self.event(kind, text, path=str(path), global_step=self.step, reason=reason)
        return ok

    def write(self, path: Path, data: bytes) -> None:
        with path.open("wb") as file:
            for begin in range(0, len(data), _CHUNK_BYTES):
                file.write(data[begin : begin + _CHUNK_BYTES])
                file.flush()
            os.fsync(file.fileno())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100000)
    parser.add_argument("--pause", type=float, default=0.02)
    parser.add_argument("--gate", type=Path, help="a file that is waited for at a step")
    parser.add_argument("--gate-at", type=int, default=0)
    parser.add_argument("--end-gate", type=Path, help="a file that stopped ranks wait for")
    parser.add_argument("--fail-at", type=int, default=-1)
    parser.add_argument("--fail-rank", type=int, default=0)
    parser.add_argument("--slow-rank", type=int, default=-1)
    parser.add_argument("--slow", type=float, default=0.0, help="seconds more of its every step")
    parser.add_argument("--gpus", action="store_true", help="say that each rank has one")
    parser.add_argument("--spin-at", type=int, default=-1, help="the step that never ends")
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--size", type=int, default=0)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    FakeRank(parser.parse_args()).train()


if __name__ == "__main__":
    main()
