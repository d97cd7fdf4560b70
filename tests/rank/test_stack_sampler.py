"""The sampler of a rank: real threads of this process."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ltui.training.diagnosis.stack_samples import StackSamples
from ltui.training.json_codec import from_json
from ltui.training.rank import stack_sampler
from ltui.training.rank.stack_sampler import StackSampler, sample
from tests.required import required
from tests.waiting import wait_for


@contextmanager
def running(work: Callable[[threading.Event], None]) -> Iterator[int]:
    """Run ``work`` in a thread until the end of the block. The value is the thread's ident."""
    stop, started = threading.Event(), threading.Event()

    def run() -> None:
        started.set()
        work(stop)

    thread = threading.Thread(target=run)
    thread.start()
    started.wait()
    try:
        yield required(thread.ident)
    finally:
        stop.set()
        thread.join()


def samples_of(sampler: StackSampler) -> StackSamples:
    return from_json(StackSamples, json.loads(json.dumps(sampler.document())))


def sampled(thread: int, seconds: float) -> StackSamples:
    sampler = StackSampler(thread)
    sampler.run(seconds)
    return samples_of(sampler)


def seconds_in(samples: StackSamples, function: str) -> float:
    return sum(s.seconds for s in samples.stacks if any(f.function == function for f in s.frames))


def waits(stop: threading.Event) -> None:
    stop.wait()


def test_all_time_is_counted_for_the_stack_in_which_it_passes() -> None:
    with running(waits) as thread:
        samples = sampled(thread, 0.5)
    assert samples.seconds >= 0.5
    assert seconds_in(samples, "waits") == pytest.approx(samples.seconds, abs=0.01)
    assert sum(s.held_s for s in samples.stacks) == 0
    (stack, *_) = samples.stacks
    assert stack.frames[0].function == "wait"
    assert stack.frames[0].file.endswith("threading.py")


def holds_the_gil(stop: threading.Event) -> None:
    while not stop.is_set():
        sum(itertools.repeat(1.0, 1 << 26))


def test_a_call_of_c_code_that_holds_the_gil_is_told_from_python() -> None:
    with running(holds_the_gil) as thread:
        # On a loaded machine the thread may hardly get a processor, so that it is not certain.
        samples = wait_for(
            lambda: sampled(thread, 1.0), wanted=lambda s: any(t.held_s > 0 for t in s.stacks)
        )
    held = {s.frames[0].function for s in samples.stacks if s.held_s > 0}
    assert held == {"holds_the_gil"}


def test_the_samples_have_a_limited_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_sampler, "_MAX_STACKS", 3)
    monkeypatch.setattr(stack_sampler, "_MAX_WRITTEN", 2)

    sampler = StackSampler(threading.get_ident())

    def count_at(depth: int, seconds: float) -> None:
        if depth == 0:
            sampler._count(seconds, 0.0)
        else:
            count_at(depth - 1, seconds)

    monkeypatch.setattr(stack_sampler, "_MAX_FRAMES", 8)
    for depth, seconds in enumerate((0.25, 0.5, 1.0, 2.0, 4.0)):
        count_at(depth, seconds)
    samples = samples_of(sampler)
    assert [s.seconds for s in samples.stacks] == [1.0, 0.5]
    assert sampler.other_s == 6.0
    assert [len(s.frames) for s in samples.stacks] == [8, 8]


def test_the_samples_are_written_privately_and_a_failure_is_not_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack_sampler, "SAMPLE_S", 0.1)
    with running(waits) as thread:
        sample(thread, tmp_path / "evidence", 7)
        (path,) = (tmp_path / "evidence").iterdir()
        (tmp_path / "file").touch()
        sample(thread, tmp_path / "file", 8)
    assert path.stat().st_mode & 0o777 == 0o600
    samples = from_json(StackSamples, json.loads(path.read_text()))
    assert samples.request == 7
    assert seconds_in(samples, "waits") > 0
