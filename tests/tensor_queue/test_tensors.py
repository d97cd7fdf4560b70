"""Tensors through the queue and back: every type and layout that it carries, bit by bit."""

from __future__ import annotations

import ctypes
import math
import warnings
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ltui.training.tensor_queue.queue_file import DTYPE_NAMES, Layout
from ltui.training.tensor_queue.queue_reader import QuantizedArray, QueueReader, Record, SparseArray
from ltui.training.tensor_queue.queue_writer import DTYPES, QueueWriter
from tests.required import required
from tests.tensor_queue.children import run_child
from tests.tensor_queue.decode import to_tensor
from tests.tensor_queue.rows import put_row

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(beta state|deprecated|ComplexHalf|invariant checks).*"
)

DENSE = [dtype for dtype, code in DTYPES.items() if not DTYPE_NAMES[code].startswith("q")]
SIMPLE = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex64]
FLOAT8 = [dtype for dtype in DENSE if "float8" in str(dtype)]


class Loop:
    """A queue and its reader in one: what comes out where a tensor was put in."""

    def __init__(self, path: Path) -> None:
        self.writer = QueueWriter.create(path, capacity_bytes=1 << 16)
        self.reader = QueueReader(path)

    def record(self, tensor: torch.Tensor) -> Record:
        self.writer.put(tensor, 2, b"label")
        poll = self.reader.poll()
        (record,) = poll.records
        assert (poll.missed, record.kind, record.label) == (0, 2, b"label")
        return record

    def close(self) -> None:
        self.writer.close()
        self.reader.close()


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loop]:
    made = Loop(tmp_path_factory.mktemp("tensors") / "q")
    yield made
    made.close()


def memory(tensor: torch.Tensor) -> bytes:
    """The elements, row-major, as bytes."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return ctypes.string_at(plain.data_ptr(), plain.nbytes) if plain.nbytes else b""


def of_bytes(dtype: torch.dtype, shape: list[int], content: bytes) -> torch.Tensor:
    size = torch.empty(0, dtype=dtype).element_size() * int(np.prod(shape))
    data = bytearray((content * (size // max(len(content), 1) + 1))[:size])
    if dtype is torch.bool:
        data = bytearray(byte & 1 for byte in data)
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(shape)


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda t: t,
    "reversed axes": lambda t: t.permute(tuple(reversed(range(t.dim())))),
    "every second": lambda t: t[..., ::2] if t.dim() else t,
    "expanded": lambda t: t.unsqueeze(0).expand(3, *t.shape),
    "requires grad": lambda t: (
        t.clone().requires_grad_() if t.is_floating_point() or t.is_complex() else t
    ),
    "conjugate view": lambda t: t.conj(),
    "negative view": lambda t: t.conj().imag if t.is_complex() else t,
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
}


@settings(max_examples=400)
@given(
    dtype=st.sampled_from(DENSE),
    shape=st.lists(st.integers(0, 5), max_size=4),
    content=st.binary(min_size=1, max_size=64),
    view=st.sampled_from(sorted(VIEWS)),
)
def test_dense(loop: Loop, dtype: torch.dtype, shape: list[int], content: bytes, view: str) -> None:
    tensor = VIEWS[view](of_bytes(dtype, shape, content))
    record = loop.record(tensor)
    back = to_tensor(record)
    assert (back.dtype, back.shape, back.layout) == (tensor.dtype, tensor.shape, torch.strided)
    assert not back.requires_grad
    assert memory(back) == memory(tensor)
    assert record.dtype == str(tensor.dtype).removeprefix("torch.")
    assert isinstance(record.array, np.ndarray)
    assert record.array.shape == tuple(tensor.shape)
    expected = as_numpy(tensor)
    assert record.array.dtype == expected.dtype
    np.testing.assert_array_equal(record.array, expected)


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """What torch itself makes of it, widened where NumPy has no such type."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.dtype is torch.bfloat16 or plain.dtype in FLOAT8:
        return plain.to(torch.float32).numpy()
    if plain.dtype is torch.complex32:
        return plain.to(torch.complex64).numpy()
    return plain.numpy()


@pytest.mark.parametrize("dtype", [*FLOAT8, torch.float16, torch.bfloat16, torch.float32])
def test_every_nan_keeps_its_bits(loop: Loop, dtype: torch.dtype) -> None:
    size = torch.empty(0, dtype=dtype).element_size()
    words = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[size]
    patterns = {1: range(256), 2: range(0x7F00, 0x8000), 4: range(0x7F800001, 0x7F800100)}[size]
    tensor = torch.tensor(list(patterns), dtype=torch.int64).to(words).view(dtype)
    record = loop.record(tensor)
    assert memory(to_tensor(record)) == memory(tensor)
    np.testing.assert_array_equal(record.array, as_numpy(tensor))


@settings(max_examples=120)
@given(
    dtype=st.sampled_from(SIMPLE),
    sparse=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    dense=st.lists(st.integers(0, 3), max_size=2),
    entries=st.integers(0, 6),
    coalesce=st.booleans(),
    grad=st.booleans(),
    data=st.data(),
)
def test_coo(
    loop: Loop,
    dtype: torch.dtype,
    sparse: list[int],
    dense: list[int],
    entries: int,
    coalesce: bool,
    grad: bool,
    data: st.DataObject,
) -> None:
    place = st.tuples(*(st.integers(0, n - 1) for n in sparse))
    columns = data.draw(st.lists(place, min_size=entries, max_size=entries))
    indices = torch.tensor(columns, dtype=torch.int64).reshape(entries, len(sparse)).T
    values = of_bytes(dtype, [entries, *dense], data.draw(st.binary(min_size=1, max_size=40)))
    tensor = torch.sparse_coo_tensor(indices, values, sparse + dense)
    if coalesce:
        tensor = tensor.coalesce()
    if grad and (dtype.is_floating_point or dtype.is_complex):
        tensor = tensor.detach().requires_grad_()
    record = loop.record(tensor)
    back = to_tensor(record)
    assert (back.dtype, back.shape, back.layout) == (dtype, tensor.shape, torch.sparse_coo)
    assert back.is_coalesced() == tensor.is_coalesced()
    assert memory(back._indices()) == memory(tensor._indices())
    assert memory(back._values()) == memory(tensor._values())
    array = record.array
    assert isinstance(array, SparseArray)
    assert (array.layout, array.shape) == (Layout.COO, tuple(tensor.shape))
    np.testing.assert_array_equal(array.indices, tensor._indices().numpy())
    np.testing.assert_array_equal(array.values, as_numpy(tensor._values()))


COMPRESSED: dict[Layout, Callable[[torch.Tensor], torch.Tensor]] = {
    Layout.CSR: lambda t: t.to_sparse_csr(),
    Layout.CSC: lambda t: t.to_sparse_csc(),
    Layout.BSR: lambda t: t.to_sparse_bsr((2, 2)),
    Layout.BSC: lambda t: t.to_sparse_bsc((2, 2)),
}


@settings(max_examples=120)
@given(
    form=st.sampled_from(sorted(COMPRESSED)),
    dtype=st.sampled_from(SIMPLE),
    rows=st.integers(1, 3),
    columns=st.integers(1, 3),
    batch=st.sampled_from([[], [2]]),
    numbers=st.lists(st.integers(-3, 3), min_size=72, max_size=72),
)
def test_compressed(
    loop: Loop,
    form: Layout,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    batch: list[int],
    numbers: list[int],
) -> None:
    shape = [*batch, 2 * rows, 2 * columns]
    size = int(np.prod(shape))
    flat = torch.tensor(numbers[:size])
    if batch:
        # Batched compressed tensors must have as many entries in each: here all of them.
        flat = flat.abs() + 1
    tensor = COMPRESSED[form](flat.to(dtype).reshape(shape))
    record = loop.record(tensor)
    back = to_tensor(record)
    assert (back.dtype, back.shape, back.layout) == (dtype, tensor.shape, tensor.layout)
    assert memory(back.values()) == memory(tensor.values())
    assert torch.equal(back.to_dense(), tensor.to_dense())
    array = record.array
    assert isinstance(array, SparseArray)
    assert array.layout is form
    assert array.compressed is not None
    np.testing.assert_array_equal(array.values, as_numpy(tensor.values()))


def test_csr_with_small_indices_keeps_their_type(loop: Loop) -> None:
    tensor = torch.sparse_csr_tensor(
        torch.tensor([0, 1, 2], dtype=torch.int32),
        torch.tensor([1, 0], dtype=torch.int32),
        torch.tensor([3.0, 4.0]),
        (2, 2),
    )
    assert to_tensor(loop.record(tensor)).crow_indices().dtype is torch.int32


QUANTIZED = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}


@settings(max_examples=120)
@given(
    dtype=st.sampled_from(list(QUANTIZED)),
    rows=st.integers(1, 4),
    columns=st.integers(0, 4),
    axis=st.sampled_from([None, 0]),
    content=st.binary(min_size=1, max_size=40),
    scale=st.floats(1e-3, 1e3),
    zero=st.integers(0, 100),
)
def test_quantized(
    loop: Loop,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    axis: int | None,
    content: bytes,
    scale: float,
    zero: int,
) -> None:
    integers = of_bytes(QUANTIZED[dtype], [rows, columns], content)
    if axis is None:
        tensor = torch._make_per_tensor_quantized_tensor(integers, scale, zero)
    else:
        scales = torch.full((rows,), scale, dtype=torch.float64)
        zeros = torch.full((rows,), zero, dtype=torch.int64)
        tensor = torch._make_per_channel_quantized_tensor(integers, scales, zeros, axis)
    record = loop.record(tensor)
    back = to_tensor(record)
    assert (back.dtype, back.shape, back.qscheme()) == (dtype, tensor.shape, tensor.qscheme())
    assert memory(back.int_repr()) == memory(integers)
    array = record.array
    assert isinstance(array, QuantizedArray)
    assert array.axis == axis
    if axis is None:
        assert (back.q_scale(), back.q_zero_point()) == (tensor.q_scale(), tensor.q_zero_point())
    else:
        assert torch.equal(back.q_per_channel_scales(), tensor.q_per_channel_scales())
        assert torch.equal(back.q_per_channel_zero_points(), tensor.q_per_channel_zero_points())
    np.testing.assert_allclose(array.dequantized(), tensor.dequantize().numpy(), rtol=1e-5)


class Behaving(torch.Tensor):
    """A subclass that only adds behaviour, as torchvision's are."""


def test_a_subclass_without_parts_is_a_tensor(loop: Loop) -> None:
    tensor = torch.arange(4.0).as_subclass(Behaving)
    assert torch.equal(to_tensor(loop.record(tensor)), torch.arange(4.0))


def freed() -> torch.Tensor:
    tensor = torch.ones(100)
    tensor.untyped_storage().resize_(0)
    return tensor


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


class Wrapping(torch.Tensor):
    """A subclass that holds other tensors and no bytes of its own, as DTensor does."""

    @staticmethod
    def __new__(cls) -> Wrapping:
        made = torch.Tensor._make_wrapper_subclass(cls, (2,))
        assert isinstance(made, cls)
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return [], None


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: torch.ones(2, 2).to_mkldnn(), "layout torch._mkldnn"),
        (nested, "nested"),
        (lambda: torch.empty(3, device="meta"), "device meta"),
        (lambda: torch.empty(2, dtype=torch.uint8).view(torch.bits8), "dtype torch.bits8"),
        (freed, "storage was freed"),
        (Wrapping, "Wrapping"),
        (lambda: [1.0, 2.0], "list"),
    ],
)
def test_unsupported_tensors_are_refused_by_name(
    loop: Loop, make: Callable[[], torch.Tensor], what: str
) -> None:
    with pytest.raises(TypeError, match=what):
        loop.writer.put(make(), 2)
    # And the queue goes on as if nothing had been.
    loop.record(torch.ones(1))


def test_a_label_alone_carries_no_tensor(loop: Loop) -> None:
    loop.writer.put(None, 3, b'{"kind": "note"}', t_ns=12)
    (record,) = loop.reader.poll().records
    assert (record.label, record.t_ns, record.dtype) == (b'{"kind": "note"}', 12, "")
    assert isinstance(record.array, np.ndarray)
    assert record.array.size == 0
    with pytest.raises(ValueError, match="no tensor"):
        to_tensor(record)


def test_a_row_with_a_label_is_that_of_its_tensor(loop: Loop) -> None:
    numbers = [1.5, math.nan, -math.inf, 3.0]
    row = loop.writer.row(2, len(numbers), len(b"label"))
    row.label[:], row.fields[:] = b"label", memoryview(array("d", numbers))
    row.publish(0)
    loop.writer.put(torch.tensor(numbers, dtype=torch.float64), 2, b"label")
    first, second = loop.reader.poll().records
    assert (first.kind, first.label, first.dtype) == (second.kind, second.label, second.dtype)
    assert isinstance(first.array, np.ndarray)
    assert np.array_equal(first.array, np.asarray(second.array), equal_nan=True)


def test_later_changes_of_the_source_are_never_seen(loop: Loop) -> None:
    buffer = torch.zeros(4, 8)
    for batch in range(10):
        buffer.fill_(batch)
        loop.writer.put(buffer[1:3, ::2], 2)
    buffer.fill_(-1)
    records = loop.reader.poll().records
    assert [to_tensor(record).unique().tolist() for record in records] == [[b] for b in range(10)]


def test_a_record_owns_its_bytes(loop: Loop) -> None:
    record = loop.record(torch.arange(6.0))
    first, second = to_tensor(record), to_tensor(record)
    first.zero_()
    assert torch.equal(second, torch.arange(6.0))
    assert isinstance(record.array, np.ndarray)
    assert not record.array.flags.writeable
    for _ in range(3000):
        loop.writer.put(torch.full((6,), 9.0), 2)
    while loop.reader.poll().records:
        pass
    assert record.array.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_forked_child_writes_nothing(loop: Loop) -> None:
    def act() -> None:
        loop.writer.put(torch.ones(3), 2)
        put_row(loop.writer, [1.0], 1)
        loop.writer.pulse.set(phase=3)
        loop.writer.pulse.set(batch=99)
        loop.writer.close()

    loop.writer.pulse.set(phase=6, batch=5)
    run_child(act)
    assert loop.reader.poll().records == ()
    pulse = required(loop.reader.pulse())
    assert (pulse.phase, pulse.batch) == (6, 5)
    put_row(loop.writer, [2.0], 1)
    assert len(loop.reader.poll().records) == 1


def test_closing_twice_and_putting_after_it_is_harmless(tmp_path: Path) -> None:
    writer = QueueWriter.create(tmp_path / "q", capacity_bytes=4096)
    put_row(writer, [1.0], 1)
    writer.close()
    writer.close()
    put_row(writer, [1.0], 1)
    writer.put(torch.ones(1), 1)
    writer.pulse.set(phase=3)
    assert len(QueueReader(tmp_path / "q").poll().records) == 1
