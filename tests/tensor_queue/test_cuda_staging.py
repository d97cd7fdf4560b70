"""CUDA tensors through the queue: order, losses, no waiting. The test finishes each copy itself;
the last tests run on a real one where there is a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
import torch

from ltui.training.tensor_queue import cuda_staging, torch_codec
from ltui.training.tensor_queue.cuda_staging import StagingQueue
from ltui.training.tensor_queue.queue_reader import QueueReader
from ltui.training.tensor_queue.queue_writer import QueueWriter
from ltui.training.tensor_queue.torch_codec import to_tensor
from tests.tensor_queue.rows import put_row


class ManualCopy:
    """A copy that arrives when the test says so, with what the source held when it was enqueued."""

    made: ClassVar[list[ManualCopy]] = []

    def __init__(self, sources: list[torch.Tensor]) -> None:
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
    monkeypatch.setattr(torch_codec.EncodedTensor, "on_cuda", lambda self: True)
    monkeypatch.setattr(ManualCopy, "made", [])
    monkeypatch.setattr(cuda_staging, "PinnedCopy", ManualCopy)
    return ManualCopy.made


def numbers(reader: QueueReader) -> list[float]:
    return [float(r.array.reshape(-1)[0]) for r in reader.poll().records]  # type: ignore[union-attr]


def test_a_staged_tensor_is_published_when_its_copy_has_arrived(
    tmp_path: Path, device: list[ManualCopy]
) -> None:
    writer = QueueWriter.create(tmp_path / "q")
    reader = QueueReader(tmp_path / "q", from_seq=0)
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
    writer.close()


def test_staged_tensors_keep_their_order(tmp_path: Path, device: list[ManualCopy]) -> None:
    writer = QueueWriter.create(tmp_path / "q")
    reader = QueueReader(tmp_path / "q", from_seq=0)
    for number in range(3):
        writer.put(torch.tensor(float(number)), 2)
    device[2].arrive()
    device[1].arrive()
    writer.flush_staged()
    assert numbers(reader) == []
    device[0].arrive()
    writer.put(torch.tensor(9.0), 2)
    assert numbers(reader) == [0.0, 1.0, 2.0]
    writer.close()


def test_a_sparse_tensor_is_staged_part_by_part(tmp_path: Path, device: list[ManualCopy]) -> None:
    writer = QueueWriter.create(tmp_path / "q")
    reader = QueueReader(tmp_path / "q")
    writer.put(torch.eye(3).to_sparse(), 2)
    device[0].arrive()
    writer.flush_staged()
    (record,) = reader.poll().records
    assert torch.equal(to_tensor(record).to_dense(), torch.eye(3))
    writer.close()


def test_copies_that_never_arrive_are_missed(tmp_path: Path, device: list[ManualCopy]) -> None:
    writer = QueueWriter.create(tmp_path / "q")
    reader = QueueReader(tmp_path / "q", from_seq=0)
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
    encoded = torch_codec.encode(torch.ones(1))
    assert stage.add(1, 0, b"", encoded)
    assert not stage.add(1, 0, b"", encoded)
    assert list(stage.arrived()) == []
    assert stage.abandon() == 1
    assert len(stage) == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_device_is_never_synchronised(tmp_path: Path) -> None:
    writer = QueueWriter.create(tmp_path / "q")
    reader = QueueReader(tmp_path / "q", from_seq=0)
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
    writer.close()
    reader.close()
