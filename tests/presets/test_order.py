"""Which samples a rank draws: each once, as many batches on every rank, on from the middle."""

from __future__ import annotations

import json
import subprocess
import sys

# torch stays out of this process, so the properties are tried in one of their own.
_PROGRAM = """
from hypothesis import given, settings, strategies as st
from ltui.training.data.sample_order import RankLoader, RankOrder

sizes = st.integers(1, 60)

def batches(indices, size):
    return [indices[i : i + size] for i in range(0, len(indices), size)]

def loader(order, size):
    return RankLoader(order, size, lambda indices: batches(indices, size))

@settings(max_examples=60, deadline=None)
@given(sizes, st.integers(1, 5), st.integers(1, 9), st.booleans(), st.integers(0, 4))
def whole(samples, world_size, size, shuffle, epoch):
    orders = [
        RankOrder(samples, rank=r, world_size=world_size, shuffle=shuffle, filler=samples)
        for r in range(world_size)
    ]
    drawn = []
    for order in orders:
        order.set_epoch(epoch)
        one = loader(order, size)
        got = list(one)
        assert len(got) == len(one)
        drawn += [i for batch in got for i in batch]
    assert len({len(loader(o, size)) for o in orders}) == 1
    assert sorted(i for i in drawn if i != samples) == list(range(samples))
    assert drawn.count(samples) < world_size

@settings(max_examples=60, deadline=None)
@given(sizes, st.integers(1, 9), st.integers(0, 60), st.integers(0, 3))
def goes_on(samples, size, stop, epoch):
    order = RankOrder(samples, shuffle=True)
    order.set_epoch(epoch)
    first = loader(order, size)
    stop = min(stop, len(first))
    reading = iter(first)
    before = [next(reading) for _ in range(stop)]
    state = first.state_dict()
    again = RankOrder(samples, shuffle=True)
    again.set_epoch(epoch)
    second = loader(again, size)
    second.load_state_dict(state)
    after = list(second)
    if 0 < stop < len(first):
        assert before + after == list(loader(order, size))
    again.set_epoch(epoch + 1)
    assert len(list(second)) == len(second)

def epochs_differ():
    order = RankOrder(50, shuffle=True)
    one = order.draw()
    order.set_epoch(1)
    assert order.draw() != one

whole(); goes_on(); epochs_differ()
print('"ok"')
"""


def test_orders() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == "ok"
