"""What held the memory, read from messages of torch."""

from __future__ import annotations

import pytest

from ltui.training.shared.record_types import Outcome, Phase, RecordKind
from ltui.training.state.record_fold import FoldState, fold
from ltui.training.state.run_snapshot import Verdict
from tests.diagnosis.machines import at
from tests.state.records import labelled, pulse

TRACEBACK = '  File "/home/user/train.py", line 31, in training_step\n    hidden = self.first(x)\n'
# As torch 2.9 to 2.15 write it, in one line.
CUDA = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.81 GiB of"
    " which 5.44 GiB is free. {others}Including non-PyTorch memory, this process has 130.36 GiB"
    " memory in use. Of the allocated memory 128.00 GiB is allocated by PyTorch, and {unused} is"
    " reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting"
    " PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for"
    " Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)
LESS = "Use a smaller batch"


def _verdict(name: str, message: str) -> Verdict:
    event = {"kind": "exception", "text": name, "type": name, "message": message}
    record = labelled(RecordKind.EVENT, {**event, "traceback": TRACEBACK})
    state = fold(FoldState(), 0, [record])
    ended = pulse(0, Phase.EXCEPTION, 0.5, batch=9, pid=100, outcome=Outcome.RAISED)
    (verdict,) = at(12, [ended], fold=state).verdicts
    return verdict


def test_the_holders_of_gpu_memory_are_named() -> None:
    message = CUDA.format(others="Process 4711 has 3.00 GiB memory in use. ", unused="20.11 MiB")
    verdict = _verdict("OutOfMemoryError", message)
    assert (verdict.kind, verdict.level, verdict.culprits) == ("out_of_memory", "dead", (0,))
    assert verdict.cause == (
        "rank 0 ran out of GPU memory at train.py:31 in training_step: tried to allocate 20.00 GiB"
        " while 5.44 GiB of 139.81 GiB was free on GPU 0; PyTorch held 128.00 GiB in tensors,"
        " 20.11 MiB that was reserved and not used, process 4711 held 3.00 GiB"
    )
    assert str(verdict.remedy).startswith(LESS)


def test_the_memory_of_cuda_graphs_is_named() -> None:
    pools = (
        " is allocated by PyTorch, with 9.00 GiB allocated in private pools (e.g., CUDA Graphs),"
    )
    message = CUDA.format(others="", unused="512 bytes")
    verdict = _verdict("OutOfMemoryError", message.replace(" is allocated by PyTorch,", pools))
    assert "PyTorch held 128.00 GiB in tensors (9.00 GiB for CUDA graphs), 512 bytes" in (
        verdict.cause
    )


@pytest.mark.parametrize(
    ("others", "unused", "remedy"),
    [
        ("Process 7 has 60.00 GiB memory in use. ", "1.00 GiB", "Process 7 holds 60.00 GiB of"),
        ("", "30.50 GiB", "Memory is fragmented: set PYTORCH_ALLOC_CONF=expandable_segments:True"),
        ("", "512 bytes", LESS),
    ],
)
def test_the_remedy_is_about_the_largest_holder(others: str, unused: str, remedy: str) -> None:
    verdict = _verdict("OutOfMemoryError", CUDA.format(others=others, unused=unused))
    assert str(verdict.remedy).startswith(remedy)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("AcceleratorError", "CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`"),
        ("RuntimeError", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(h)`"),
        (
            "RuntimeError",
            "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate"
            " memory: you tried to allocate 4398046511104 bytes. Error code 12",
        ),
        ("MemoryError", ""),
    ],
)
def test_other_messages_are_quoted(name: str, message: str) -> None:
    verdict = _verdict(name, message)
    assert verdict.kind == "out_of_memory"
    assert "ran out of memory at train.py:31 in training_step: " in verdict.cause
    assert message.split("\n")[0][:60] in verdict.cause


def test_the_shared_memory_of_a_gpu_is_not_that_of_the_machine() -> None:
    message = "out of resource: shared memory, Required: 262144, Hardware limit: 232448."
    assert _verdict("OutOfResources", message).kind == "raised"
    assert _verdict("RuntimeError", "unable to allocate shared memory(shm)").kind == "shared_memory"
