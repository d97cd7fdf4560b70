"""Simulated ranks of one machine, without torch: real queue files, pulses and step consensus.

``python -m tests.nodes.simulated_ranks WORLD STEP_S START_S`` is the engine of node 0: it
runs rank 0, which publishes requests, until a stop.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from ltui.training.rank.coordination.step_consensus import (
    Action,
    BarrierTable,
    Move,
    boundary_position,
    passed_state,
    table_name,
    waiting_state,
)
from ltui.training.shared.record_types import Outcome, Phase, RecordKind, StepField
from ltui.training.tensor_queue.control_block import Command, ControlFile
from ltui.training.tensor_queue.pulse_block import PulseWriter
from ltui.training.tensor_queue.ring_writer import RingWriter

QUEUE_BYTES = 1 << 16
_ACTIONS = {Command.STOP: Action.STOP, Command.CHECKPOINT: Action.CHECKPOINT}


class SimulatedRanks:
    """The ranks of one machine, which pass each boundary at the same moment.

    Call ``advance`` often. ``acted_s`` is the monotonic time at which they agreed to stop.
    """

    def __init__(
        self, queue_dir: Path, ranks: range, world_size: int, step_s: float, start_s: float
    ) -> None:
        """``start_s`` is the monotonic time of step 0, the same for all ranks of the run.

        It stands in for collectives, which keep the ranks of a training together.
        """
        self.numbers = ranks
        queue_dir.mkdir(parents=True, exist_ok=True)
        self._step_s, self._next_s = step_s, start_s + step_s
        table = queue_dir / table_name(0, world_size, 0)
        self._rows = [BarrierTable(table, rank, world_size) for rank in ranks]
        self._rings = [
            RingWriter.create(queue_dir / f"rank-{rank:05d}.queue", QUEUE_BYTES) for rank in ranks
        ]
        self._pulses = [PulseWriter(ring.view) for ring in self._rings]
        self._control = ControlFile.open(queue_dir / "control.bin") if ranks[0] == 0 else None
        self._request_id = 0
        self._pending: tuple[Action, int] | None = None
        self._done = 0
        self._step = 0
        self._waits_at: int | None = None
        self.acted_s: float | None = None
        for rank, ring, pulse in zip(ranks, self._rings, self._pulses, strict=True):
            pid = os.getpid()
            pulse.set(
                pid=pid, start_ticks=1, rank=rank, local_rank=rank - ranks[0],
                world_size=world_size, phase=Phase.FORWARD,
            )  # fmt: skip
            hello = {"rank": rank, "world_size": world_size, "pid": pid, "start_ticks": 1,
                     "host": "simulated", "device": "cpu"}  # fmt: skip
            ring.put(RecordKind.HELLO, time.monotonic_ns(), json.dumps(hello).encode(), ())

    def advance(self, now_s: float) -> bool:
        """Do what is due. Return False once the ranks have stopped."""
        if self.acted_s is not None:
            return False
        if self._waits_at is None and now_s >= self._next_s:
            self._next_s += self._step_s
            self._step += 1
            self._record(now_s)
            self._pass(boundary_position(1, self._step))
        if self._waits_at is not None:
            self._wait(self._waits_at, now_s)
        return self.acted_s is None

    def _record(self, now_s: float) -> None:
        for ring, pulse in zip(self._rings, self._pulses, strict=True):
            row = ring.row(RecordKind.STEP, len(StepField))
            for field in StepField:
                row.fields[field] = float("nan")
            row.fields[StepField.GLOBAL_STEP] = self._step
            row.fields[StepField.BATCH] = self._step - 1
            row.fields[StepField.SAMPLES] = 8
            row.fields[StepField.LOSS] = 1 / self._step
            row.fields[StepField.STEP_S] = self._step_s
            row.fields[StepField.WALL_S] = time.time()
            row.fields[StepField.STEPPED] = 1.0
            row.publish(int(now_s * 1e9))
            pulse.set(phase=Phase.FORWARD, global_step=self._step, batch=self._step)

    def _pass(self, position: int) -> None:
        """Pass a boundary, or wait there if there is a request."""
        first = self._rows[0]
        if self._control is not None:
            state = self._control.poll()
            request = None if state is None else state.request
            if request is not None and request.request_id > self._request_id:
                self._request_id = request.request_id
                self._pending = _ACTIONS[request.kind], request.request_id
            if self._pending is not None and first.can_publish():
                first.publish(*self._pending)
                self._pending = None
        if first.words[0] == self._done:
            for row in self._rows:
                row.set_state(passed_state(position))
            return
        number, _ = first.request()
        for row in self._rows:
            row.set_seen(number)
            row.set_state(waiting_state(position))
        self._waits_at = position

    def _wait(self, position: int, now_s: float) -> None:
        number, action = self._rows[0].request()
        move = self._rows[0].next_move(position, number)
        if move is Move.WAIT:
            return
        self._waits_at = None
        if move is Move.ACT:
            self._done = number << 4 | action
            for row in self._rows:
                row.set_acted(number)
                row.set_save_result(number, ok=True)
            if action is Action.STOP:
                self._stop(now_s)
                return
        for row in self._rows:
            row.set_state(passed_state(position))

    def _stop(self, now_s: float) -> None:
        self.acted_s = now_s
        event = {"kind": "stopped", "text": "stopped", "step": self._step, "t": time.time(),
                 "global_step": self._step}  # fmt: skip
        for ring, pulse in zip(self._rings, self._pulses, strict=True):
            ring.put(RecordKind.EVENT, int(now_s * 1e9), json.dumps(event).encode(), ())
            pulse.set(phase=Phase.ENDED, outcome=Outcome.STOPPED, decision_done=self._request_id)

    def close(self) -> None:
        for row in self._rows:
            row.close()


def main() -> None:
    world_size, step_s, start_s = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    queue_dir = Path(os.environ["LTUI_RUN_DIR"]) / "queue" / os.environ["LTUI_ATTEMPT"]
    ranks = SimulatedRanks(queue_dir, range(1), world_size, step_s, start_s)
    while ranks.advance(time.monotonic()):
        time.sleep(0.01)
    print(json.dumps({"acted_s": ranks.acted_s}), flush=True)


if __name__ == "__main__":
    main()
