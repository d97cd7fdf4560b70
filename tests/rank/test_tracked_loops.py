"""Tracked loops: a resumed program gets exactly the items that an uninterrupted one would get."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from ltui.training.rank.program import tracked_loop
from ltui.training.rank.program.tracked_loop import LoopStack, TrackedLoop
from ltui.training.rank.resume.plain_data import States, read_random_states

Program = Callable[[Callable[..., TrackedLoop]], Iterator[Any]]
"""Yields at the end of each body of its innermost loop."""
Saved = tuple[list[dict[str, Any]], States]


class Stop(Exception):
    """The end of a process at a boundary."""


def run(program: Program, saved: Saved | None, bodies: int) -> tuple[list[Any], Saved | None, list]:
    """Run ``program`` in a new process until ``bodies`` bodies have ended.

    Return what it yielded, what a checkpoint at its end has (None if it finished), and what could
    not be restored.
    """
    stack, results, inexact = LoopStack(), list[Any](), list[str]()
    state: Saved | None = None
    stack.inexact = inexact.append
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracked_loop, "stack", stack)
        if saved is not None:
            stack.resume(*saved, None, same_ranks=True)

        def end_of_body() -> None:
            nonlocal state
            if len(results) >= bodies and state is None:
                state = stack.positions(), read_random_states()
                raise Stop

        stack.end_of_body = end_of_body
        try:
            for result in program(lambda items, name="": TrackedLoop(items, name)):
                results.append(result)
        except Stop:
            pass
        assert stack.loops == []
    return results, state, inexact


def assert_resumes(make: Callable[[], Program], stops: Iterable[int]) -> None:
    """Run a program once through, and once with a new process after each number of bodies."""
    torch.manual_seed(7)
    whole, _, _ = run(make(), None, 10**9)
    torch.manual_seed(7)
    parts: list[Any] = []
    saved: Saved | None = None
    for bodies in (*stops, 10**9):
        results, saved, inexact = run(make(), saved, bodies)
        parts += results
        assert inexact == []
        if saved is None:
            break
        torch.manual_seed(random.randrange(10**6))  # another process
    assert parts == whole


def nested(epochs: int, batches: int) -> Program:
    def program(track: Callable[..., TrackedLoop]) -> Iterator[Any]:
        for epoch in track(range(epochs)):
            for batch in track(range(batches)):
                yield epoch, batch, torch.rand(1).item()

    return program


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 5), st.lists(st.integers(1, 6), max_size=5))
def test_nested_ranges(epochs: int, batches: int, stops: list[int]) -> None:
    assert_resumes(lambda: nested(epochs, batches), stops)


def passes_of(loader: Callable[[], Any], epochs: int = 3) -> Program:
    """Return a program that makes ``epochs`` passes, each over what ``loader()`` returns."""

    def program(track: Callable[..., TrackedLoop]) -> Iterator[Any]:
        for epoch in track(range(epochs)):
            for batch in track(loader()):
                yield epoch, batch.tolist(), torch.rand(1).item()

    return program


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.booleans(), st.booleans(), st.lists(st.integers(1, 9), max_size=4))
def test_a_shuffled_loader(epochs: int, new: bool, generator: bool, stops: list[int]) -> None:
    """``new``: the program builds a loader for each epoch."""

    def make() -> Program:
        def build() -> DataLoader[Any]:
            own = torch.Generator().manual_seed(3) if generator else None
            data: Any = list(range(20))
            return DataLoader(data, batch_size=3, shuffle=True, generator=own)

        loader = build()

        return passes_of(build if new else lambda: loader, epochs)

    assert_resumes(make, stops)


class DataLoaderShard(DataLoader[Any]):
    """As accelerate's: it fetches one batch ahead, and counts its passes for the sampler."""

    __module__ = "accelerate.data_loader"

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.base_dataloader = loader
        self.iteration = 0

    def state_dict(self) -> Any:
        return vars(self)["dl_state_dict"]  # set only if the loader inside has a state

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError(state)

    def __iter__(self) -> Any:
        sampler: Any = self.base_dataloader.sampler
        sampler.set_epoch(self.iteration)
        batches = iter(self.base_dataloader)
        ahead = next(batches, None)
        while ahead is not None:
            current, ahead = ahead, next(batches, None)
            yield current
        self.iteration += 1


@pytest.mark.parametrize("library", ["fabric", "accelerate", "torchdata"])
@pytest.mark.parametrize("stops", [(1,), (3, 4), (5, 5), (1, 1, 1, 1, 1, 1, 1)])
def test_a_loader_of_a_library(library: str, stops: tuple[int, ...]) -> None:
    """Two count the passes and give the number to the sampler; the third saves its position."""

    def make() -> Program:
        data: Any = list(range(20))
        sampler: Any = DistributedSampler(data, num_replicas=1, rank=0, shuffle=True)
        inner: DataLoader[Any] = DataLoader(data, batch_size=4, sampler=sampler)
        loader: Any = DataLoaderShard(inner)
        if library == "fabric":
            fabric = Fabric(accelerator="cpu", devices=1)
            loader = fabric.setup_dataloaders(inner, use_distributed_sampler=False)
        if library == "torchdata":
            loader = StatefulDataLoader(data, batch_size=4, shuffle=True)
        return passes_of(lambda: loader)

    assert_resumes(make, stops)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(12)


@pytest.mark.parametrize("stops", [(1,), (5, 3), (12,)])
def test_a_stream_is_read_again(stops: tuple[int, ...]) -> None:
    def program(track: Callable[..., TrackedLoop]) -> Iterator[Any]:
        for value in track(DataLoader(Stream(), batch_size=None)):
            yield value, torch.rand(1).item()

    assert_resumes(lambda: program, stops)


@pytest.mark.parametrize("stops", [(2,), (3,), (4, 2), (1, 1, 1, 1, 1, 1)])
def test_loops_one_after_another_are_told_apart_by_their_names(stops: tuple[int, ...]) -> None:
    """A loop that was over runs again, because only the program knows that it need not."""

    def make() -> Program:
        def program(track: Callable[..., TrackedLoop]) -> Iterator[Any]:
            for value in track(range(3), "main"):
                yield value
            for value in track(range(100, 103), "final"):
                yield value

        return program

    _, saved, _ = run(make(), None, stops[0])
    assert saved is not None
    results, _, _ = run(make(), saved, 10**9)
    expected = [0, 1, 2, 100, 101, 102][stops[0] :]
    if stops[0] > 3:  # within the second loop: the first one has another name and runs
        expected = [0, 1, 2, *expected]
    assert results == expected


def test_an_inner_loop_that_is_not_tracked_any_more_is_reported() -> None:
    def before(track: Callable[..., TrackedLoop]) -> Iterator[Any]:
        for epoch in track(range(3)):
            for batch in track(range(4)):
                yield epoch, batch

    def after(track: Callable[..., TrackedLoop]) -> Iterator[Any]:
        for epoch in track(range(3)):
            for batch in range(4):
                yield epoch, batch

    _, saved, _ = run(before, None, 6)
    results, _, inexact = run(after, saved, 10**9)
    assert results[0] == (1, 0)
    assert len(inexact) == 1


def test_a_loop_that_is_left_early_is_forgotten() -> None:
    def program(track: Callable[..., TrackedLoop]) -> Iterator[Any]:
        for epoch in track(range(3)):
            for batch in track(range(100)):
                if batch == 2:
                    break
                yield epoch, batch

    assert_resumes(lambda: program, (1, 2, 1))


def test_a_tracked_loader_is_used_as_the_loader_itself() -> None:
    loader: Any = TrackedLoop(DataLoader(list(range(10)), batch_size=2), "")  # type: ignore[arg-type]
    assert (len(loader), loader.batch_size, len(loader.dataset)) == (5, 2, 10)


def test_a_tracked_loop_can_be_copied() -> None:
    for copied in (copy.deepcopy(TrackedLoop([1, 2], "")), copy.copy(TrackedLoop([1, 2], ""))):
        assert list(copied) == [1, 2]
