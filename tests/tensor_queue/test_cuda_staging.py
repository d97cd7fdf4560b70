"""CUDA tensors through the queue: order, losses, no waiting. The test finishes each copy itself;
the last tests run on a real one where there is a GPU."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from ltui.training.tensor_queue import queue_writer
from ltui.training.tensor_queue.queue_reader import QueueReader
from ltui.training.tensor_queue.queue_writer import PinnedCopy, QueueWriter, StagingQueue
from tests.tensor_queue.decode import to_tensor
from tests.tensor_queue.rows import put_row

Queue = tuple[QueueWriter, QueueReader]


class ManualCopy:
    """A copy that arrives when the test says so, with what the source held when it was enqueued."""

    made: ClassVar[list[ManualCopy]] = []

    def __init__(self, sources: list[torch.Tensor]) -> None:
        self.begin(sources)

    def begin(self, sources: list[torch.Tensor]) -> None:
        self.parts = [torch.full_like(source, 77) for source in sources]
        self._arriving = [source.clone() for source in sources]
        self._here = False
        self.made.append(self)

    def arrive(self) -> None:
        self.parts = self._arriving
        self._here = True

    def done(self) -> bool:
        return self._here


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> list[ManualCopy]:
    """Every tensor counts as a CUDA tensor; the copies that were asked for."""
    monkeypatch.setattr(queue_writer.EncodedTensor, "on_cuda", lambda self: True)
    monkeypatch.setattr(ManualCopy, "made", [])
    monkeypatch.setattr(queue_writer, "PinnedCopy", ManualCopy)
    monkeypatch.setattr(queue_writer, "is_capturing", lambda: False)
    return ManualCopy.made


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    """A queue, and a reader of all that is in it."""
    writer = QueueWriter.create(tmp_path / "q")
    reader = QueueReader(tmp_path / "q", from_seq=0)
    yield writer, reader
    writer.close()
    reader.close()


def numbers(reader: QueueReader) -> list[float]:
    return [float(r.array.reshape(-1)[0]) for r in reader.poll().records]  # type: ignore[union-attr]


def test_a_staged_tensor_is_published_when_its_copy_has_arrived(
    queue: Queue, device: list[ManualCopy]
) -> None:
    writer, reader = queue
    source = torch.full((3,), 5.0)
    writer.put(source, 2, b"loss", t_ns=123)
    source.fill_(6.0)
    writer.flush_staged()
    put_row(writer, [1.0], 1)
    assert numbers(reader) == [1.0], "what needs no copy does not wait for what does"
    device[0].arrive()
    writer.flush_staged()
    (record,) = reader.poll().records
    assert (record.label, record.t_ns, record.seq) == (b"loss", 123, 1)
    assert to_tensor(record).tolist() == [5.0, 5.0, 5.0]


def test_staged_tensors_keep_their_order(queue: Queue, device: list[ManualCopy]) -> None:
    writer, reader = queue
    for number in range(3):
        writer.put(torch.tensor(float(number)), 2)
    device[2].arrive()
    device[1].arrive()
    writer.flush_staged()
    assert numbers(reader) == []
    device[0].arrive()
    writer.put(torch.tensor(9.0), 2)
    assert numbers(reader) == [0.0, 1.0, 2.0]


def test_memory_is_used_again_once_its_record_is_published(
    queue: Queue, device: list[ManualCopy]
) -> None:
    writer, reader = queue

    def put(*tensors: torch.Tensor) -> None:
        for tensor in tensors:
            writer.put(tensor, 2)
        for copy in device[-len(tensors) :]:
            copy.arrive()
        writer.flush_staged()

    first, second = torch.full((1,), 1.0), torch.full((1,), 2.0)
    put(first, second)
    put(torch.full((1,), 3.0), torch.full((1,), 4.0), torch.full((1,), 5.0))
    assert len(set(map(id, device))) == 3, "two copies are used again, and a third is made"
    assert numbers(reader) == [1.0, 2.0, 3.0, 4.0, 5.0]
    put(torch.full((2,), 6.0), torch.full((1,), 7.0, dtype=torch.float64), torch.ones(5000))
    put(torch.ones(5000))
    assert len(set(map(id, device))) == 7, "another shape or type, and what is large, has its own"


def test_memory_of_an_evaluation_is_used_again_in_training() -> None:
    """Trainer.validate, Trainer.test and the evaluations of many scripts are in inference mode."""
    with torch.inference_mode():
        copy = PinnedCopy([torch.ones(2)])
    copy.begin([torch.zeros(2)])
    assert copy.parts[0].tolist() == [0.0, 0.0]
    with torch.inference_mode():
        copy.begin([torch.ones(2)])
    assert copy.parts[0].tolist() == [1.0, 1.0]


def test_copies_are_on_the_host_whatever_the_default_device_is() -> None:
    source = torch.ones(2)
    with torch.device("meta"):
        copy = PinnedCopy([source])
    assert copy.parts[0].tolist() == [1.0, 1.0]


def test_a_sparse_tensor_is_staged_part_by_part(queue: Queue, device: list[ManualCopy]) -> None:
    writer, reader = queue
    writer.put(torch.eye(3).to_sparse(), 2)
    device[0].arrive()
    writer.flush_staged()
    (record,) = reader.poll().records
    assert torch.equal(to_tensor(record).to_dense(), torch.eye(3))


def test_copies_that_never_arrive_are_missed(queue: Queue, device: list[ManualCopy]) -> None:
    writer, reader = queue
    for _ in range(300):
        writer.put(torch.ones(1), 2)
    assert len(device) == 256, "no more copies are held than that"
    poll = reader.poll()
    assert (poll.records, poll.missed) == ((), 44)
    writer.close()
    poll = reader.poll()
    assert (poll.records, poll.missed) == ((), 256)


def test_a_full_staging_queue_refuses_records(device: list[ManualCopy]) -> None:
    stage = StagingQueue(limit=1)
    encoded = queue_writer.encode(torch.ones(1))
    assert stage.add(1, 0, b"", encoded)
    assert not stage.add(1, 0, b"", encoded)
    assert list(stage.arrived()) == []
    assert stage.abandon() == 1
    assert len(stage) == 0


def test_a_record_that_is_too_large_is_refused_at_its_put(
    tmp_path: Path, device: list[ManualCopy]
) -> None:
    writer = QueueWriter.create(tmp_path / "q", capacity_bytes=1 << 16)
    with pytest.raises(ValueError, match="does not fit"):
        writer.put(torch.ones(1 << 14), 2)
    with pytest.raises(ValueError, match="does not fit"):
        writer.put(torch.eye(1 << 12).to_sparse(), 2)
    assert device == []
    writer.close()


def test_the_size_of_a_payload_is_known_before_it_is_copied() -> None:
    dense = torch.arange(6.0).reshape(2, 3)
    for tensor in (dense, dense.t(), dense.to_sparse()):
        encoded = queue_writer.encode(tensor)
        sizes = [len(c) if isinstance(c, bytes) else c[1] for c in encoded.chunks()]
        assert encoded.payload_bytes() == sum(sizes)


def test_a_captured_graph_is_left_alone(
    queue: Queue, device: list[ManualCopy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To query an event would end the program's capture with an error."""
    writer, reader = queue
    writer.put(torch.tensor(1.0), 2)
    monkeypatch.setattr(ManualCopy, "done", lambda _self: pytest.fail("queried"))
    monkeypatch.setattr(queue_writer, "is_capturing", lambda: True)
    writer.put(torch.tensor(2.0), 2)
    writer.flush_staged()
    assert len(device) == 1, "a copy became part of the graph"
    monkeypatch.undo()
    monkeypatch.setattr(queue_writer, "is_capturing", lambda: False)
    device[0].arrive()
    writer.flush_staged()
    poll = reader.poll()
    assert [float(to_tensor(r)) for r in poll.records] == [1.0]
    assert poll.missed == 1


def test_a_device_that_failed_does_not_silence_the_queue(
    queue: Queue, device: list[ManualCopy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of the program's exception is put after the device has failed."""

    def fail(_self: ManualCopy) -> bool:
        raise RuntimeError("CUDA error: device-side assert triggered")

    writer, reader = queue
    writer.put(torch.tensor(1.0), 2)
    monkeypatch.setattr(ManualCopy, "done", fail)
    writer.put(None, 3, b"exception")
    poll = reader.poll()
    assert [record.label for record in poll.records] == [b"exception"]
    assert poll.missed == 1
    memory = weakref.ref(device.pop())
    writer.close()
    assert memory() is not None, "torch would end the process when it frees this memory"


def test_memory_is_kept_if_the_device_fails_when_a_copy_is_enqueued() -> None:
    copy = PinnedCopy([torch.ones(2)])
    memory = weakref.ref(copy)
    with pytest.raises(RuntimeError):
        copy.begin([torch.ones(3)])
    del copy
    gc.collect()
    assert memory() is not None, "torch would end the process when it frees this memory"


def test_a_forked_child_frees_no_memory_of_the_device(
    tmp_path: Path, device: list[ManualCopy]
) -> None:
    writer = QueueWriter.create(tmp_path / "q")
    writer.put(torch.tensor(1.0), 2)
    memory = weakref.ref(device.pop())
    child = os.fork()
    if child == 0:
        writer.close()
        del writer
        os._exit(memory() is None)
    assert os.waitpid(child, 0)[1] == 0
    writer.close()
    assert memory() is None


@pytest.mark.gpu
def test_a_real_device_is_never_synchronised(queue: Queue) -> None:
    writer, reader = queue
    source = torch.zeros(1000, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(20):
            source.fill_(number)
            writer.put(source, 2)
            writer.put(source[::2], 2)
        source.fill_(-1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    writer.flush_staged()
    records = reader.poll().records
    assert [to_tensor(r).unique().tolist() for r in records] == [
        [float(n)] for n in range(20) for _ in range(2)
    ]


@pytest.mark.gpu
def test_a_graph_is_captured_while_copies_wait(queue: Queue) -> None:
    writer, reader = queue
    source = torch.ones(1000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    writer.put(source, 2)
    with torch.cuda.graph(graph):
        source += 1
        writer.put(source, 2)
        writer.put(None, 3)
    graph.replay()
    torch.cuda.synchronize()
    writer.flush_staged()
    poll = reader.poll()
    assert [record.kind for record in poll.records] == [3, 2]
    assert to_tensor(poll.records[1]).unique().tolist() == [1.0]
    assert source.unique().tolist() == [2.0]
    assert poll.missed == 1
