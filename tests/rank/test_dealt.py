"""The rest of an epoch dealt to other ranks, in batches of another size: every sample once."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

SETTINGS = settings(max_examples=80, deadline=None)
GROUPS = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 7), st.integers(0, 6)), max_size=4)


@SETTINGS
@given(st.integers(1, 90), st.booleans(), st.integers(0, 3), GROUPS, st.integers(1, 6))
def test_rank_loaders(
    samples: int, shuffle: bool, epoch: int, groups: list[tuple[int, int, int]], last: int
) -> None:
    """Attempts of (ranks, batch size, batches until the stop), then one that ends the epoch."""
    from ltui.training.data.sample_order import RankLoader, RankOrder

    def loaders(ranks: int, size: int, state: dict[str, int] | None) -> list[RankLoader]:
        made = []
        for rank in range(ranks):
            order = RankOrder(samples, rank=rank, world_size=ranks, shuffle=shuffle)
            order.set_epoch(epoch)

            def opened(numbers: list[int], size: int = size) -> Any:
                return (numbers[i : i + size] for i in range(0, len(numbers), size))

            loader = RankLoader(order, size, opened)
            if state is not None:
                loader.load_state_dict(state)
            made.append(loader)
        return made

    seen: Counter[int] = Counter()
    state: dict[str, int] | None = None
    fillers = 0
    for ranks, size, stop in [*groups, (last, 3, 10**6)]:
        now = loaders(ranks, size, state)
        assert len({loader.batches_left() for loader in now}) == 1
        promised, taken = now[0].batches_left(), 0
        readers = [iter(loader) for loader in now]
        while taken < min(stop, promised):
            for reader in readers:
                seen.update(next(reader))
            taken += 1
        state = now[0].state_dict()
        assert all(loader.state_dict() == state for loader in now)
        if taken == promised:
            assert all(next(reader, None) is None for reader in readers)
            fillers = ranks - 1
            break
    assert sorted(seen) == list(range(samples))
    assert seen.total() - samples <= fillers


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
    """With the samplers that Lightning puts in: torch's own on one rank, else a shared one."""
    import torch
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    from ltui.training.rank.resume.dataloader_position import DataLoaderPosition

    data = list(range(samples))

    def loader(rank: int, ranks: int, size: int) -> Any:
        if ranks == 1:
            return DataLoader(data, size, shuffle=shuffle)  # type: ignore[arg-type]
        shared = DistributedSampler(data, ranks, rank, shuffle=shuffle, seed=7)  # type: ignore
        shared.set_epoch(2)
        return DataLoader(data, size, sampler=shared)  # type: ignore[arg-type]

    torch.manual_seed(11)
    seen: Counter[int] = Counter()
    ranks, size = before
    used, states = 0, []
    for rank in range(ranks):
        one = loader(rank, ranks, size)
        position = DataLoaderPosition(one)
        batches = iter(one)
        used = min(stop, len(one))
        for _ in range(used):
            seen.update(next(batches).tolist())
        states.append(position.state())
    if used in (0, len(one)):
        return  # at its start or its end nothing is resharded
    torch.manual_seed(12)  # another process
    ranks, size = after
    lengths = set()
    for rank in range(ranks):
        other = loader(rank, ranks, size)
        position = DataLoaderPosition(other)
        # All deal the same order, that of rank 0.
        assert position.resume(states[rank if before == after else 0])
        left = position.batches_left()
        got = [batch.tolist() for batch in other]
        assert position.exact
        assert len(got) == left
        lengths.add(left)
        for numbers in got:
            seen.update(numbers)
        assert len(list(other)) == len(other)  # the next epoch is whole
    assert len(lengths) == 1
    assert sorted(seen) == data
    assert seen.total() - samples < max(ranks, 1)
