"""Which samples a rank gets of a ``.beton``: as many batches on every rank, every sample, in all
three orders; and on from the middle, with whatever ranks there are then."""

from __future__ import annotations

import os
import subprocess
import sys

# torch stays out of this process, so the properties are tried in one of their own.
_PROGRAM = """
import sys
sys.modules.update(ffcv=None, numba=None, cv2=None)

import numpy as np
import torch
from hypothesis import given, settings, strategies as st
from ltui.training.data.ffcv.epoch_order import BetonLoader, EpochOrder, quasi_random

examples = settings(max_examples=int(sys.argv[1]), deadline=None)
kinds = st.sampled_from(["random", "quasi_random", "sequential"])
few = st.integers(1, 5)

def pages(samples):
    # Samples stand in pages in no order, as several processes write them.
    return np.random.default_rng(samples).integers(0, max(1, samples // 3) + 1, samples)

def order(samples, size, rank, ranks, kind, epoch, **how):
    made = EpochOrder(
        samples, batch_size=size, rank=rank, world_size=ranks, order=kind,
        page_of=pages(samples), page_bytes=64 << 20, **how,
    )
    made.set_epoch(epoch)
    return made

def loader(made):
    size = made.batch_size
    return BetonLoader(made, lambda drawn: [drawn[i:i+size] for i in range(0, len(drawn), size)])

def read(one, batches=None):
    got = []
    for batch in iter(one):
        got.append(batch)
        if len(got) == batches:
            break
    return got

@examples
@given(st.integers(1, 90), few, st.integers(1, 9), kinds, st.integers(0, 3), st.booleans())
def whole(samples, ranks, size, kind, epoch, pad):
    loaders = [loader(order(samples, size, r, ranks, kind, epoch, pad=pad)) for r in range(ranks)]
    read_by = [list(one) for one in loaders]
    assert len({len(one) for one in loaders}) == 1
    assert all(len(got) == len(one) for got, one in zip(read_by, loaders))
    assert len({tuple(len(b) for b in got) for got in read_by}) == 1
    drawn = sorted(n for got in read_by for batch in got for n in batch)
    if pad:
        # Every sample once, besides padding.
        assert [n for n in drawn if n != samples] == list(range(samples))
    else:
        assert set(drawn) == set(range(samples))
    assert len(drawn) - samples < ranks

@examples
@given(st.integers(1, 90), few, st.integers(1, 9), kinds, st.integers(0, 3))
def without_the_rest(samples, ranks, size, kind, epoch):
    if samples < ranks * size:
        try:
            order(samples, size, 0, ranks, kind, epoch, drop_last=True)
        except ValueError as error:
            assert str(samples) in str(error)
            return
        raise AssertionError("an order without a batch")
    loaders = [
        loader(order(samples, size, r, ranks, kind, epoch, drop_last=True)) for r in range(ranks)
    ]
    read_by = [list(one) for one in loaders]
    assert len({len(got) for got in read_by}) == 1
    assert all(len(got) == len(one) for got, one in zip(read_by, loaders))
    assert {len(batch) for got in read_by for batch in got} == {size}
    drawn = [n for got in read_by for batch in got for n in batch]
    assert len(set(drawn)) == len(drawn)
    assert samples - len(drawn) < ranks * size

@examples
@given(st.integers(2, 90), few, few, st.integers(1, 9), st.integers(1, 9), kinds, st.integers(0, 9),
       st.booleans())
def goes_on(samples, ranks, ranks_then, size, size_then, kind, stop, drop_last):
    drop_last = drop_last and samples >= max(ranks * size, ranks_then * size_then)
    how = {"drop_last": drop_last, "pad": not drop_last}
    first = [loader(order(samples, size, r, ranks, kind, 2, **how)) for r in range(ranks)]
    stop = min(stop, len(first[0]) - 1)
    before = [n for one in first for batch in (read(one, stop) if stop else []) for n in batch]
    states = [one.state_dict() for one in first]
    assert all(state == states[0] for state in states) or not stop
    again = [
        loader(order(samples, size_then, r, ranks_then, kind, 2, **how)) for r in range(ranks_then)
    ]
    for one in again:
        one.load_state_dict(states[0])
    left = again[0].batches_left()
    read_by = [list(one) for one in again]
    if left:
        assert {len(got) for got in read_by} == {left}
    after = [n for got in read_by for batch in got for n in batch]
    if left or not stop:
        drawn = [n for n in before + after if n != samples]
        assert len(set(drawn)) == len(drawn)
        if not drop_last:
            assert sorted(drawn) == list(range(samples))
    # The next epoch is whole again, and as if nothing had happened.
    for one in (*again,):
        one.sampler.set_epoch(3)
    fresh = [
        loader(order(samples, size_then, r, ranks_then, kind, 3, **how)) for r in range(ranks_then)
    ]
    assert [list(one) for one in again] == [list(one) for one in fresh]

def epochs_differ():
    for kind in ("random", "quasi_random"):
        draws = [order(90, 8, 0, 2, kind, epoch).draw() for epoch in (0, 1, 0)]
        assert draws[0] == draws[2] != draws[1]

def keeps_to_few_pages():
    page_of = np.arange(4000) // 20
    for ranks in (1, 2, 4):
        dealt = quasi_random(page_of, ranks, 8, torch.Generator().manual_seed(3))
        assert sorted(dealt) == list(range(4000))
        seen = set()
        for rank in range(ranks):
            own = page_of[dealt[rank::ranks]]
            # Of the 200 pages a rank has its share, and at any time one pool of 8 is open.
            assert len(set(own)) <= 200 // ranks + 1
            last = {page: at for at, page in enumerate(own)}
            first = {page: at for at, page in reversed(list(enumerate(own)))}
            opened = [sum(first[p] <= at <= last[p] for p in last) for at in range(0, len(own), 50)]
            assert max(opened) <= 8
            seen |= set(own)
        assert len(seen) == 200

whole(); without_the_rest(); goes_on(); epochs_differ(); keeps_to_few_pages()

from ltui.training.data.beton_data import BetonData
from ltui.training.data.digits import Digits
print(BetonData().with_ffcv, Digits.__name__)
"""


def test_orders_and_that_the_data_modules_load_without_ffcv() -> None:
    examples = "300" if os.environ.get("LTUI_DATA") == "all" else "60"
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, examples], capture_output=True, text=True, timeout=250
    )
    assert done.stdout == "False Digits\n", done.stderr[-3000:]
