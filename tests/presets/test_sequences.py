"""Files of sequences: what was written is read; what can't be right names the sample; nobody can
make a dataset look whole that is not; memory stays bounded. And which samples a rank draws: each
once, as many batches on every rank, on from the middle."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

# torch stays out of this process.
_PROGRAM = """
import os, pickle, sys
from pathlib import Path
import numpy as np
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from ltui.training.data.sample_order import RankLoader, RankOrder, torch_batches
from ltui.training.data.sequence_dataset import (
    LengthBatchSampler, LengthOrder, SequenceDataset, pad,
)
from ltui.training.data.sequence_writer import (
    ENTRY, HEADER_BYTES, NO_LABEL, SequenceError, SequenceWriter,
)

base = Path(sys.argv[1])
random = np.random.default_rng(0)

def arrays(count, dtype="float32", columns=5):
    return [(random.normal(0, 9, (random.integers(1, 40), columns))).astype(dtype)
            for _ in range(count)]

def write(path, samples, **how):
    with SequenceWriter(path, columns=samples[0].shape[1], dtype=samples[0].dtype.name, **how) as w:
        for i, sample in enumerate(samples):
            w.add(sample, i)
    return path

def refused(call, *words, error=SequenceError):
    try:
        call()
    except error as caught:
        text = str(caught)
        assert "\\n" not in text and all(word in text for word in words), text
        return
    raise AssertionError(f"nothing was raised, expected {words}")

def round_trips():
    for dtype in ("float16", "float32", "float64", "int8", "int64", "uint8", "bool"):
        folder = base / dtype
        samples = arrays(30, dtype)
        write(folder / "a.seq", samples)
        dataset = SequenceDataset(folder / "a.seq")
        assert len(dataset) == 30 and dataset.lengths().tolist() == [len(s) for s in samples]
        assert dataset.labels().tolist() == list(range(30))
        for i, sample in enumerate(samples):
            values, label = dataset[i]
            assert values.dtype == sample.dtype and np.array_equal(values, sample) and label == i
            assert not values.flags.writeable
        values, label = dataset[30]
        assert values.shape == (1, 5) and not values.any() and label == NO_LABEL
        refused(lambda: dataset[31], "31", error=IndexError)
        assert list(dataset.verify()) == []

def shards_are_one():
    folder, samples = base / "shards", arrays(50)
    write(folder / "a.seq", samples, shard_bytes=4000)
    assert len(list(folder.glob("*.seq"))) > 3
    dataset = pickle.loads(pickle.dumps(SequenceDataset(folder)))
    for i, sample in enumerate(samples):
        assert np.array_equal(dataset[i].values, sample) and dataset[i].label == i
    assert len(SequenceDataset(str(folder / "a-*.seq"))) == 50
    assert len(SequenceDataset(folder / "a.seq")) == 50
    for path in folder.glob("a-00001.*"):
        path.unlink()
    refused(lambda: SequenceDataset(folder), "file 2 of the", "missing")
    several = base / "several"
    write(several / "a.seq", arrays(3))
    write(several / "b.seq", arrays(4))
    assert len(SequenceDataset(several)) == 7
    write(several / "c.seq", arrays(2, columns=4))
    refused(lambda: SequenceDataset(several), "c.idx", "4 columns", "5")

def damaged():
    folder = base / "damaged"
    samples = arrays(20)
    path = write(folder / "a.seq", samples)
    index = path.with_suffix(".idx")
    data, entries = path.read_bytes(), index.read_bytes()

    def restored(change):
        path.write_bytes(data)
        index.write_bytes(entries)
        change()

    def offset(i):
        return HEADER_BYTES + i * ENTRY.itemsize

    restored(lambda: path.write_bytes(data[: len(data) // 2]))
    rows = np.frombuffer(entries, ENTRY, offset=HEADER_BYTES)
    ends = rows["offset"] + rows["rows"] * 20
    first = int(np.nonzero(ends > len(data) // 2)[0][0])
    refused(lambda: SequenceDataset(path), "a.seq", f"sample {first}:", "past the end")
    restored(lambda: path.write_bytes(data[:30]))
    refused(lambda: SequenceDataset(path), "cut off within its header")
    restored(lambda: path.write_bytes(data + b"more"))
    refused(lambda: SequenceDataset(path), "its index says")
    restored(lambda: path.unlink())
    refused(lambda: SequenceDataset(path), "a.seq", "No such file")
    restored(lambda: index.unlink())
    refused(lambda: SequenceDataset(path), "a.idx", "No such file")
    restored(lambda: index.write_bytes(entries[: offset(7) + 3]))
    refused(lambda: SequenceDataset(path), "sample 7:", "7 of 20")
    restored(lambda: index.write_bytes(b"PNG" + entries[3:]))
    refused(lambda: SequenceDataset(path), "not a sequence index")
    restored(lambda: index.write_bytes(entries[:40] + b"!" + entries[41:]))
    refused(lambda: SequenceDataset(path), "header", "checksum")

    def far(number, field, value):
        changed = np.frombuffer(entries, ENTRY, offset=HEADER_BYTES).copy()
        changed[number][field] = value
        index.write_bytes(entries[:HEADER_BYTES] + changed.tobytes())

    for field, value in (("offset", 1 << 40), ("rows", 1 << 40), ("rows", (1 << 64) - 1),
                         ("offset", (1 << 64) - 1)):
        restored(lambda: far(11, field, value))
        refused(lambda: SequenceDataset(path), "sample 11:", "past the end")
    restored(lambda: far(11, "rows", 1))
    refused(lambda: SequenceDataset(path), "entries", "checksum")

    at = int(rows["offset"][4]) + 6
    restored(lambda: path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]))
    dataset = SequenceDataset(path)
    dataset[3], dataset[5]
    refused(lambda: dataset[4], "a.seq", "sample 4:", "checksum")
    assert len(list(dataset.verify())) == 1
    unchecked = SequenceDataset(path, check=False)[4].values
    assert len(unchecked) == len(samples[4]) and not np.array_equal(unchecked, samples[4])
    caught = None
    try:
        dataset[4]
    except SequenceError as error:
        caught = pickle.loads(pickle.dumps(error))
    assert "sample 4:" in str(caught) and caught.sample == 4

    restored(lambda: None)
    write(folder / "other.seq", samples)
    index.write_bytes((folder / "other.idx").read_bytes())
    refused(lambda: SequenceDataset(path), "the index of another data file")

    restored(lambda: None)
    dataset = SequenceDataset(path)
    dataset[0]
    os.truncate(path, len(data) // 2)
    refused(lambda: dataset[19], "sample 19:", "shorter")
    refused(lambda: SequenceDataset(base / "nowhere"), "can't be read")
    (base / "empty").mkdir()
    refused(lambda: SequenceDataset(base / "empty"), "no .seq file")

def interrupted():
    folder = base / "interrupted"
    write(folder / "a.seq", arrays(3))
    before = sorted((p.name, p.read_bytes()) for p in folder.iterdir())
    try:
        with SequenceWriter(folder / "a.seq", columns=5) as out:
            out.add(arrays(1)[0])
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert sorted((p.name, p.read_bytes()) for p in folder.iterdir()) == before
    with SequenceWriter(folder / "b.seq", columns=5) as out:
        for odd in (np.zeros((2, 4), "f4"), np.zeros((0, 5), "f4"), np.zeros((1, 5), "c8")):
            refused(lambda: out.add(odd), "sample 0", error=ValueError)
        out.add(np.zeros((2, 5), "float64"))
    assert SequenceDataset(folder / "b.seq")[0].values.dtype == np.float32
    killed = SequenceWriter(folder / "c.seq", columns=5)
    killed.add(arrays(1)[0])
    # As a kill leaves it: temporary files, and nothing that is taken for a dataset.
    assert len(SequenceDataset(folder)) == 4
    killed.abandon()

def padding():
    batch = pad([(np.ones((3, 2), "float32"), 1), (np.full((1, 2), 2, "float32"), NO_LABEL)])
    assert batch.values.shape == (2, 3, 2)
    assert batch.mask.tolist() == [[True] * 3, [True, False, False]]
    assert batch.values[1].tolist() == [[2, 2], [0, 0], [0, 0]] and batch.labels.tolist() == [1, -1]

def loader(order, size):
    batches = lambda drawn: [drawn[i : i + size] for i in range(0, len(drawn), size)]
    return RankLoader(order, size, batches)

@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 9), st.booleans(), st.integers(0, 4))
def draws_each_sample_once(samples, world_size, size, shuffle, epoch):
    drawn, batches = [], set()
    for rank in range(world_size):
        order = RankOrder(
            samples, rank=rank, world_size=world_size, shuffle=shuffle, filler=samples
        )
        order.set_epoch(epoch)
        one = loader(order, size)
        got = list(one)
        assert len(got) == len(one)
        batches.add(len(got))
        drawn += [i for batch in got for i in batch]
    assert len(batches) == 1
    assert sorted(i for i in drawn if i != samples) == list(range(samples))
    assert drawn.count(samples) < world_size

@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.integers(1, 9), st.integers(0, 60), st.integers(0, 3))
def goes_on(samples, size, stop, epoch):
    order, again = RankOrder(samples, shuffle=True), RankOrder(samples, shuffle=True)
    order.set_epoch(epoch)
    again.set_epoch(epoch)
    first, second = loader(order, size), loader(again, size)
    stop = min(stop, len(first))
    reading = iter(first)
    before = [next(reading) for _ in range(stop)]
    second.load_state_dict(first.state_dict())
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

@settings(max_examples=120, deadline=None)
@given(st.lists(st.integers(1, 99), max_size=90), st.integers(1, 6), st.integers(1, 9),
       st.booleans(), st.booleans(), st.booleans(), st.integers(0, 3))
def deals(lengths, world, size, shuffle, drop_last, fill, epoch):
    count = len(lengths)
    ranks = []
    for rank in range(world):
        order = LengthOrder(lengths, size, rank=rank, world_size=world, shuffle=shuffle,
                            drop_last=drop_last, filler=count if fill else None, seed=3)
        order.set_epoch(epoch)
        one = loader(order, size)
        got = list(one)
        assert len(got) == len(one)
        assert LengthBatchSampler(order).batches_after(0) == got
        ranks.append(got)
    # As many batches on every rank, and of the same size at every step.
    assert len({tuple(map(len, got)) for got in ranks}) == 1
    drawn = [i for got in ranks for batch in got for i in batch]
    kept = [i for i in drawn if i != count]
    if drop_last:
        assert len(set(drawn)) == len(drawn) == count // (world * size) * world * size
        assert all(len(batch) == size for got in ranks for batch in got)
    else:
        assert set(kept) == set(range(count))
        assert len(drawn) - count < world if count else not drawn
        if fill:
            assert len(kept) == count

@settings(max_examples=120, deadline=None)
@given(st.lists(st.integers(1, 99), min_size=1, max_size=90), st.integers(1, 4), st.integers(1, 4),
       st.integers(1, 7), st.integers(1, 7), st.integers(0, 20), st.integers(0, 3))
def goes_on_among_others(lengths, world, world_then, size, size_then, stop, epoch):
    count = len(lengths)

    def order(rank, ranks, size):
        made = LengthOrder(lengths, size, rank=rank, world_size=ranks, shuffle=True, filler=count,
                           seed=5)
        made.set_epoch(epoch)
        return made

    first = [loader(order(r, world, size), size) for r in range(world)]
    stop = min(stop, len(first[0]))
    reading = [iter(one) for one in first]
    used = [i for one in reading for _ in range(stop) for i in next(one)]
    states = [one.state_dict() for one in first]
    assert all(state == states[0] for state in states)
    after = [loader(order(r, world_then, size_then), size_then) for r in range(world_then)]
    rest = []
    for one in after:
        one.load_state_dict(states[0])
        left = one.batches_left()
        got = list(one)
        if states[0]["samples"] < count:
            assert left == len(got)
            rest.append(got)
    if rest:
        assert len({tuple(map(len, got)) for got in rest}) == 1
        used += [i for got in rest for batch in got for i in batch]
    assert sorted(i for i in used if i != count) == list(range(count))
    if (world, size) == (world_then, size_then) and 0 < stop < len(first[0]):
        assert [list(one) for one in reading] == rest

def groups_and_epochs():
    lengths = random.integers(1, 1000, 4096)
    orders = []
    for rank in range(2):
        order = LengthOrder(lengths, 16, rank=rank, world_size=2, shuffle=True, seed=1)
        orders.append(order)
    one, other = (LengthBatchSampler(order).batches_after(0) for order in orders)
    def waste(batches):
        rows = sum(lengths[b].max() * len(b) for b in batches)
        return 1 - sum(lengths[b].sum() for b in batches) / rows
    plain = random.permutation(4096).reshape(-1, 16).tolist()
    assert waste(one) < 0.1 < 0.3 < waste(plain)
    # Both ranks have as much to do at each step.
    assert np.mean([abs(lengths[a].max() - lengths[b].max()) for a, b in zip(one, other)]) < 20
    longest = [lengths[b].max() for b in one]
    assert abs(np.corrcoef(np.arange(len(longest)), longest)[0, 1]) < 0.5
    orders[0].set_epoch(1)
    assert LengthBatchSampler(orders[0]).batches_after(0) != one
    orders[0].set_epoch(0)
    assert LengthBatchSampler(orders[0]).batches_after(0) == one
    given_group = LengthBatchSampler(LengthOrder(lengths, 16, shuffle=True, group=64))
    assert given_group.deal_rest(3) == given_group.batches_after(0)[3:]
    assert not hasattr(LengthBatchSampler(orders[0]), "deal_rest")

def through_workers():
    samples = arrays(40)
    dataset = SequenceDataset(write(base / "workers" / "a.seq", samples, shard_bytes=3000))
    order = LengthOrder(dataset.lengths(), 8, shuffle=True, seed=1)
    for workers in (0, 2):
        batches = torch_batches(dataset, 8, workers, collate_fn=pad)
        seen = [i for batch in RankLoader(order, 8, batches)
                for i in batch.labels.tolist()]
        assert sorted(seen) == list(range(40))

round_trips(); shards_are_one(); damaged(); interrupted(); padding(); groups_and_epochs()
through_workers(); deals(); goes_on_among_others()
draws_each_sample_once(); goes_on(); epochs_differ()
print('"ok"')
"""


def _say(program: str, *arguments: str, **how: Any) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=110,
        **how,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_sequences_and_their_batches(tmp_path: Path) -> None:
    assert _say(_PROGRAM, str(tmp_path)) == "ok"


LIMIT = 32 << 20
"""Bytes that the process may have of its own (RLIMIT_DATA). It needs no rights and counts heap and
private maps, so a dataset that is copied can't be held; pages of a file mapped for reading are not
its own, so their bound is measured: the most that was ever resident of files."""

_BOUNDED = """
import json, resource, sys
import numpy as np
from ltui.training.data.sequence_dataset import SequenceDataset

limit, resident = int(sys.argv[2]), int(sys.argv[3])

def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))

used = status("VmData")
resource.setrlimit(resource.RLIMIT_DATA, (used + limit, used + limit))
dataset = SequenceDataset(sys.argv[1], resident_bytes=resident)
before, most, total = status("RssFile"), 0, 0.0
for number in np.random.default_rng(0).permutation(len(dataset)).tolist():
    values, label = dataset[number]
    assert values[0, 0] == label
    total += len(values)
    if number % 4 == 0:
        most = max(most, status("RssFile"))
try:
    copy = np.ones(dataset.data_bytes, np.uint8)
    held = True
except MemoryError:
    held = False
print(json.dumps({"bytes": dataset.data_bytes, "rss": most - before, "copy": held}))
"""

_WRITE = """
import resource, sys
import numpy as np
from ltui.training.data.sequence_writer import SequenceWriter

random, rows = np.random.default_rng(0), 0
with SequenceWriter(sys.argv[1], columns=64, shard_bytes=int(sys.argv[3])) as out:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    number = 0
    while rows * 256 < int(sys.argv[2]):
        values = np.full((int(random.integers(100, 3000)), 64), number, np.float32)
        out.add(values, number)
        rows += len(values)
        number += 1
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10)
"""


def test_a_dataset_larger_than_memory(tmp_path: Path) -> None:
    resident = 8 << 20
    grown = _say(_WRITE, str(tmp_path / "a.seq"), str(4 * LIMIT), str(LIMIT))
    assert grown < 32 << 20
    seen = _say(_BOUNDED, str(tmp_path), str(LIMIT), str(resident))
    assert seen["bytes"] >= 4 * LIMIT
    assert not seen["copy"]
    # One sample more than what is kept, and what the kernel maps around a fault.
    assert seen["rss"] < 3 * resident
