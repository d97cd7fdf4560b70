"""What a resume restores beside the weights: the rest of an epoch, DDP's buckets, random states.

Resharded to other ranks or batch sizes, the rest of an epoch uses every sample once.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from ltui.training.data.sample_order import RankLoader, RankOrder
from ltui.training.rank.resume.dataloader_position import DataLoaderPosition
from ltui.training.rank.resume.loader_order import read_generators
from ltui.training.rank.resume.plain_data import preserve_random_states
from tests.rank.runs import ROOT

SETTINGS = settings(max_examples=80, deadline=None)
GROUPS = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 7), st.integers(0, 6)), max_size=4)


@SETTINGS
@given(st.integers(1, 90), st.booleans(), st.integers(0, 3), GROUPS, st.integers(1, 6))
def test_rank_loaders(
    samples: int, shuffle: bool, epoch: int, groups: list[tuple[int, int, int]], last: int
) -> None:
    """Attempts of (ranks, batch size, batches until the stop), then one that ends the epoch."""

    def loaders(ranks: int, size: int, state: dict[str, int] | None) -> list[RankLoader]:
        created = []
        for rank in range(ranks):
            order = RankOrder(samples, rank=rank, world_size=ranks, shuffle=shuffle)
            order.set_epoch(epoch)

            def opened(numbers: list[int], size: int = size) -> Any:
                return (numbers[i : i + size] for i in range(0, len(numbers), size))

            loader = RankLoader(order, size, opened)
            if state is not None:
                loader.load_state_dict(state)
            created.append(loader)
        return created

    use_counts: Counter[int] = Counter()
    state: dict[str, int] | None = None
    padding = 0
    for ranks, size, stop in [*groups, (last, 3, 10**6)]:
        current = loaders(ranks, size, state)
        assert len({loader.batches_left() for loader in current}) == 1
        expected, used_batches = current[0].batches_left(), 0
        readers = [iter(loader) for loader in current]
        while used_batches < min(stop, expected):
            for reader in readers:
                use_counts.update(next(reader))
            used_batches += 1
        state = current[0].state_dict()
        assert all(loader.state_dict() == state for loader in current)
        if used_batches == expected:
            assert all(next(reader, None) is None for reader in readers)
            padding = ranks - 1
            break
    assert sorted(use_counts) == list(range(samples))
    assert use_counts.total() - samples <= padding


@SETTINGS
@given(
    st.integers(1, 90),
    st.booleans(),
    st.tuples(st.integers(1, 5), st.integers(1, 6)),
    st.tuples(st.integers(1, 5), st.integers(1, 6)),
    st.integers(0, 8),
)
def test_dataloaders(
    samples: int, shuffle: bool, before: tuple[int, int], after: tuple[int, int], stop: int
) -> None:
    """With Lightning's samplers: torch's own on one rank, otherwise a DistributedSampler."""

    data = list(range(samples))

    def loader(rank: int, ranks: int, size: int) -> Any:
        if ranks == 1:
            return DataLoader(data, size, shuffle=shuffle)  # type: ignore[arg-type]
        shared = DistributedSampler(data, ranks, rank, shuffle=shuffle, seed=7)  # type: ignore
        shared.set_epoch(2)
        return DataLoader(data, size, sampler=shared)  # type: ignore[arg-type]

    torch.manual_seed(11)
    use_counts: Counter[int] = Counter()
    ranks, size = before
    used, states = 0, []
    for rank in range(ranks):
        saved_loader = loader(rank, ranks, size)
        position = DataLoaderPosition(saved_loader)
        batches = iter(saved_loader)
        used = min(stop, len(saved_loader))
        for _ in range(used):
            use_counts.update(next(batches).tolist())
        states.append(position.state())
    if used in (0, len(saved_loader)):
        return  # at its start or its end nothing is resharded
    torch.manual_seed(12)  # another process
    ranks, size = after
    lengths = set()
    for rank in range(ranks):
        resumed_loader = loader(rank, ranks, size)
        position = DataLoaderPosition(resumed_loader)
        # All ranks reshard the order of rank 0.
        assert position.resume(states[rank if before == after else 0])
        batches_left = position.batches_left()
        batches_read = [batch.tolist() for batch in resumed_loader]
        assert position.exact
        assert len(batches_read) == batches_left
        lengths.add(batches_left)
        for numbers in batches_read:
            use_counts.update(numbers)
        assert len(list(resumed_loader)) == len(resumed_loader)  # the next epoch is whole
    assert len(lengths) == 1
    assert sorted(use_counts) == data
    assert use_counts.total() - samples < max(ranks, 1)


def test_a_batch_sampler_may_have_an_attribute_named_tracked() -> None:

    class Batches:
        def __init__(self) -> None:
            self.tracked: list[int] = []
            self.generator = torch.Generator()

        def __iter__(self) -> Any:
            yield torch.randperm(4, generator=self.generator).tolist()

    loader = DataLoader(range(4), batch_sampler=Batches())  # type: ignore[arg-type,var-annotated]
    assert len(read_generators(loader)) == 1


@pytest.mark.timeout(200)
def test_the_bucket_layout_is_restored_or_left_unchanged(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.rank.exactness.bucketed", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert ended.returncode == 0, ended.stderr[-3000:]
    result = json.loads((tmp_path / "buckets.json").read_text())
    assert len(result["layout"]) > 2
    assert result["differs by itself"]  # else the rest shows nothing
    assert result["given"]
    assert result["same"]
    assert result["kept"] == result["kept later"] == result["layout"]
    for name in ("another model", "static graph", "none"):
        refused, untouched, trains = result[name]
        assert (refused, untouched, trains) == (True, True, True), name


def test_states_are_read_on_the_host_whatever_the_default_device_is() -> None:
    """On another device, reading them back would wait for it; this one cannot be read at all."""
    random.seed(3)
    expected = random.random()
    random.seed(3)
    with torch.device("meta"), preserve_random_states():
        random.random()
    assert random.random() == expected
