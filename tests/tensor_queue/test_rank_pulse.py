"""The pulse: what is set is read, changes move the clock, half-written slots are never read."""

from __future__ import annotations

from pathlib import Path

import pytest

from ltui.training.shared.record_types import Outcome, Phase, PulseState
from ltui.training.tensor_queue.pulse_block import PULSE_BYTES, PulseWriter, parse_pulse
from ltui.training.tensor_queue.queue_file import PULSE_AT
from ltui.training.tensor_queue.queue_reader import QueueReader
from ltui.training.tensor_queue.ring_writer import RingWriter
from tests.required import required

FIELDS = {
    "pid": 4_000_000,
    "start_ticks": 1 << 40,
    "rank": 3,
    "local_rank": 1,
    "world_size": 8,
    "epoch": 5,
    "batch": 77,
    "global_step": 10_000_000_000,
    "decision_done": 4,
    "restarts": 2,
}


@pytest.fixture
def page() -> bytearray:
    return bytearray(PULSE_AT + 4096)


def block(page: bytearray) -> bytes:
    return bytes(page[PULSE_AT : PULSE_AT + PULSE_BYTES])


def read(page: bytearray) -> PulseState:
    return required(parse_pulse(block(page)))


def test_every_field_comes_out_as_it_was_set(tmp_path: Path) -> None:
    ring = RingWriter.create(tmp_path / "q", 4096)
    reader = QueueReader(tmp_path / "q")
    assert reader.pulse() is None
    pulse = PulseWriter(ring.view)
    pulse.set(phase=Phase.BACKWARD, outcome=Outcome.STOPPED, telemetry_ok=False, **FIELDS)
    state = required(reader.pulse())
    assert {name: getattr(state, name) for name in FIELDS} == FIELDS
    assert (state.phase, state.outcome) == (Phase.BACKWARD, Outcome.STOPPED)
    assert state.telemetry_ok is False
    pulse.mute()
    ring.close()


def test_only_progress_changes_the_time_of_the_change(page: bytearray) -> None:
    pulse = PulseWriter(memoryview(page))
    pulse.set(phase=Phase.FETCH)
    first = read(page)
    pulse.set(phase=Phase.FETCH)
    pulse.set(decision_done=5, batch=0)
    pulse.beat()
    still = read(page)
    assert (still.changed_ns, still.changed_wall_s) == (first.changed_ns, first.changed_wall_s)
    assert still.heartbeat_ns > first.heartbeat_ns
    for change in ({"batch": 1}, {"epoch": 1}, {"global_step": 1}, {"phase": Phase.FORWARD}):
        before = read(page)
        pulse.set(**change)
        after = read(page)
        assert after.changed_ns > before.changed_ns, change


def test_an_unknown_field_is_refused(page: bytearray) -> None:
    with pytest.raises(TypeError, match="globalstep"):
        PulseWriter(memoryview(page)).set(globalstep=3)


def test_a_slot_written_to_any_point_leaves_the_pulse_before(page: bytearray) -> None:
    pulse = PulseWriter(memoryview(page))
    for batch in range(6):
        pulse.set(phase=Phase.FORWARD, batch=batch)
    before = block(page)
    pulse.set(batch=6)
    after = block(page)
    changed = [at for at in range(PULSE_BYTES) if before[at] != after[at]]
    assert len(changed) > 3
    for cut in range(changed[0], changed[-1] + 1):
        state = required(parse_pulse(after[:cut] + before[cut:]))
        assert state.batch == 5
    whole = required(parse_pulse(after))
    assert whole.batch == 6


def test_a_phase_of_a_newer_rank_side_is_unknown(page: bytearray) -> None:
    pulse = PulseWriter(memoryview(page))
    pulse.set(phase=4000, batch=3)
    state = read(page)
    assert (state.phase, state.batch) == (Phase.UNKNOWN, 3)
