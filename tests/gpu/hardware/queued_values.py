"""Tensors that are put into a queue while their stream is busy, and overwritten at once.

Another process reads them (``queue_digests.py``). What it reads must be what the tensor held in the
order of the stream, and no put may wait for the device.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from ltui.training.tensor_queue.queue_writer import DTYPES, QueueWriter
from tests.gpu.hardware.check import Check
from tests.gpu.hardware.queue_digests import END, MODULE, describe
from tests.run_module import ROOT

CAPACITY_BYTES = 128 << 20
"""More than all values together, so that a slow reader misses none of them."""
SLEEP_CYCLES = 20_000_000
"""Length of the kernel that keeps a stream busy before each value: about 10 ms."""
ROUNDS = 20
STREAMS = 4
STAGED_LIMIT = 256
"""Copies that may wait at once; ``StagingQueue`` counts further records as missed."""
BEYOND_LIMIT = 44
LARGE_BYTES = 8 << 20
TYPES = (
    *("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "complex64"),
    *("int64", "int32", "uint8", "bool"),
)


class Values:
    """Puts values of one device into a queue, and remembers what must come out."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.device = device
        self.on_cuda = device.type == "cuda"
        path = folder / "values.queue"
        self.writer = QueueWriter.create(path, capacity_bytes=CAPACITY_BYTES)
        self.expected: list[tuple[str, str]] = []
        """Label and digest of each value, in the order of the puts."""
        self.put_s: list[float] = []
        self.reader = subprocess.Popen(
            [sys.executable, "-m", MODULE, str(path)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )

    def put(self, case: str, source: torch.Tensor, value: torch.Tensor) -> None:
        """Put ``source``, which holds ``value`` in the order of the stream; ``value`` is on the
        CPU."""
        label = f"{case} {len(self.expected)}"
        self.expected.append((label, digest(value)))
        began = time.perf_counter()
        self.writer.put(source, 2, label.encode())
        self.put_s.append(time.perf_counter() - began)

    def keep_busy(self) -> None:
        """Have the current stream wait before what follows."""
        if self.on_cuda:
            torch.cuda._sleep(SLEEP_CYCLES)

    def wait(self) -> None:
        """Wait for the device, and publish what has arrived."""
        if self.on_cuda:
            torch.cuda.synchronize(self.device)
        self.writer.flush_staged()

    def stream(self) -> Any:
        """Return another stream of the device; None on the CPU."""
        return torch.cuda.Stream(self.device) if self.on_cuda else None

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Make a stream the current one."""
        return nullcontext() if stream is None else torch.cuda.stream(stream)

    def finish(self) -> dict[str, Any]:
        """End the queue and return what the other process has read."""
        self.wait()
        self.writer.put(None, 3, END)
        output, _ = self.reader.communicate(timeout=60)
        self.writer.close()
        read: dict[str, Any] = json.loads(output)
        return read


def digest(value: torch.Tensor) -> str:
    """Return a hash of the bytes, type and shape of a tensor of the CPU."""
    data = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return describe(str(value.dtype).removeprefix("torch."), tuple(value.shape), data)


def pattern(number: int, count: int = 1000, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return different values for each number, on the CPU."""
    return ((torch.arange(count) * 7 + number) % 97).to(dtype)


# -- cases -----------------------------------------------------------------------------------------


def _put_and_overwrite(values: Values, case: str, streams: list[Any]) -> None:
    """Put in each of the streams its own tensor, which is overwritten right after its put."""
    sources = [torch.empty(1000, device=values.device) for _ in streams]
    prepared = [pattern(number).to(values.device) for number in range(ROUNDS)]
    values.wait()
    with no_waits(values.on_cuda):
        for number, value in enumerate(prepared):
            place = number % len(streams)
            with values.on(streams[place]):
                values.keep_busy()
                sources[place].copy_(value)
                values.put(case, sources[place], pattern(number))
                sources[place].zero_()


def _overwritten(values: Values) -> None:
    """The source is overwritten right after its put."""
    _put_and_overwrite(values, "overwritten", [None])


def _streams(values: Values) -> None:
    """Several streams put at the same time, each its own tensor."""
    _put_and_overwrite(values, "streams", [values.stream() for _ in range(STREAMS)])
    values.wait()


def _freed(values: Values) -> None:
    """The memory of the source is used again, in another stream, before its copy is made."""
    side = values.stream()
    values.wait()
    for number in range(ROUNDS):
        source = pattern(number, 1 << 16).to(values.device)
        values.wait()
        with no_waits(values.on_cuda):
            with values.on(side):
                values.keep_busy()
                values.put("freed", source, pattern(number, 1 << 16))
            del source
            torch.full((1 << 16,), -1.0, device=values.device)
    values.wait()


def _types(values: Values) -> None:
    """Every type of number, and a tensor that is not contiguous."""
    dtypes = (getattr(torch, name, None) for name in TYPES)
    kinds = [pattern(1, 64, dtype) for dtype in dtypes if dtype in DTYPES]
    for value in (*kinds, pattern(2, 64).reshape(4, 16)):
        source = value.to(values.device)
        values.wait()
        with no_waits(values.on_cuda):
            values.keep_busy()
            values.put("types", source.t(), value.t())
            source.zero_()


def _large(values: Values) -> None:
    """Tensors whose copies take longer than a step of a small model."""
    count = LARGE_BYTES // 4
    source = torch.empty(count, device=values.device)
    for number in range(4):
        value = pattern(number, count)
        prepared = value.to(values.device)
        values.wait()
        values.keep_busy()
        source.copy_(prepared)
        values.put("large", source, value)
        source.zero_()


CASES: tuple[Callable[[Values], None], ...] = (_overwritten, _streams, _freed, _types, _large)


@contextmanager
def no_waits(on_cuda: bool) -> Iterator[None]:
    """Have torch refuse every wait for a device."""
    if on_cuda:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if on_cuda:
            torch.cuda.set_sync_debug_mode("default")


# -- the checks ------------------------------------------------------------------------------------


def check_values(folder: Path, device: torch.device) -> Iterator[Check]:
    """Put the values of all cases, read them in another process, and compare."""
    values = Values(folder, device)
    try:
        yield from _run(values)
    finally:
        values.reader.kill()
        values.reader.wait()
        (folder / "values.queue").unlink(missing_ok=True)


def _run(values: Values) -> Iterator[Check]:
    # The first copies allocate pinned memory, which may wait for the device.
    for number in range(ROUNDS + 1):
        values.put("first", pattern(number).to(values.device), pattern(number))
    values.wait()
    values.put_s.clear()
    for case in CASES:
        case(values)
        busy = is_busy(values.device)
        values.wait()
        if case is _overwritten:
            yield Check("queue: the stream is still busy after the puts", busy, "yes", busy)
    put_us = sorted(values.put_s)[len(values.put_s) // 2] * 1e6
    yield Check("queue: median host time of a put, us", put_us)
    yield _reuse(values)
    missed = _beyond_limit(values)
    yield from judge_values(values.expected, values.finish(), missed)


def is_busy(device: torch.device) -> bool | None:
    """Return whether work waits in the current stream; None on the CPU."""
    if device.type != "cuda":
        return None
    return not torch.cuda.current_stream(device).query()


def _reuse(values: Values) -> Check:
    """Check that pinned memory is used again. torch counts its allocations from 2.7 on."""

    def allocations() -> int | None:
        statistics = getattr(torch.cuda, "host_memory_stats", None)
        if not values.on_cuda or statistics is None:
            return None
        count: int | None = statistics().get("num_host_alloc")
        return count

    def put_some() -> None:
        source = torch.empty(1000, device=values.device)
        for number in range(50):
            source.copy_(pattern(number))
            values.put("reused", source, pattern(number))
        values.wait()

    put_some()
    before = allocations()
    for _ in range(5):
        put_some()
    after = allocations()
    new = None if before is None or after is None else after - before
    return Check(
        "queue: new allocations of pinned memory", new, "0", None if new is None else not new
    )


def _beyond_limit(values: Values) -> int:
    """Put more than may wait at once, and return how many records must be missed."""
    source = torch.ones(1, device=values.device)
    for beyond in (0, BEYOND_LIMIT):  # the first time allocates the pinned memory
        values.wait()
        if values.on_cuda:
            torch.cuda._sleep(50 * SLEEP_CYCLES)
        for _ in range(STAGED_LIMIT + beyond):
            values.put("limit", source, torch.ones(1))
    if not values.on_cuda:
        return 0
    del values.expected[-BEYOND_LIMIT:]
    return BEYOND_LIMIT


def judge_values(
    expected: list[tuple[str, str]], read: dict[str, Any], missed: int
) -> Iterator[Check]:
    """Compare what was put with what the other process has read. ``missed``: records that must be
    missed."""
    found = dict(read["records"])
    cases = dict.fromkeys(label.partition(" ")[0] for label, _ in expected)
    for case in cases:
        own = [(label, right) for label, right in expected if label.startswith(f"{case} ")]
        wrong = [label for label, right in own if found.get(label) != right]
        yield Check(f"queue: wrong values of {len(own)}, {case}", wrong[:5], "none", not wrong)
    labels = [label for label, _ in read["records"]]
    ordered = labels == [label for label, _ in expected]
    yield Check("queue: the values come in the order of their puts", ordered, "yes", ordered)
    yield Check("queue: records missed", read["missed"], str(missed), read["missed"] == missed)
