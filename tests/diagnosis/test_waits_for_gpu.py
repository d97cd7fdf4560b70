"""A rank that waits for a kernel looks like a busy loop; its GPU and its stack show which it is."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from ltui.training.diagnosis.evidence import Collective, Evidence, Frame
from ltui.training.json_codec import to_json
from ltui.training.state.run_snapshot import GpuSnapshot, Verdict
from tests.diagnosis.machines import evidence_of, frozen, process, stack, with_each, with_rank
from tests.diagnosis.recordings import judged, load

_SPINS = GpuSnapshot(index=0, utilisation_percent=100.0, power_w=121.4, power_limit_w=700.0)
SPINS = to_json(_SPINS)
IDLE = to_json(replace(_SPINS, utilisation_percent=0.0, power_w=78.0))
OWN = Frame(file="/home/user/train.py", line=31, function="training_step")
SYNCHRONIZE = Frame(
    file="/env/lib/python3.12/site-packages/torch/cuda/__init__.py",
    line=1100,
    function="synchronize",
)


def _only_rank(
    *frames: Frame, gpu: Mapping[str, object] | None, recorded: bool = False
) -> Evidence:
    """A single rank that has made no progress for 9 s and uses all of its core."""
    pending = Collective(group="0", seq=41, op="all_reduce", sizes=((8,),))
    rank = frozen(
        0, *frames, phase="forward", batch=20, global_step=20, still_s=9.0, gpu=gpu,
        earlier_stacks=(stack(*frames),), process=process(state="R", cpu_share=1.0, switches=3),
        collectives=(pending,) if recorded else (), last_enqueued={"0": 41} if recorded else {},
        groups={"0": (0,)} if recorded else {},
    )  # fmt: skip
    return evidence_of(rank, taken_s=20.0)


def _verdict(evidence: Evidence) -> Verdict:
    (verdict,) = judged(evidence).verdicts
    assert (verdict.level, verdict.culprits) == ("stalled", (0,))
    return verdict


@pytest.mark.parametrize("recorded", [False, True])
def test_a_kernel_that_does_not_end_is_named(recorded: bool) -> None:
    """Also with NCCL, which has recorded the collectives that are to follow the kernel."""
    verdict = _verdict(_only_rank(OWN, gpu=SPINS, recorded=recorded))
    assert verdict.kind == "waits_for_gpu"
    assert verdict.cause.startswith(
        "rank 0 waits in forward at train.py:31 in training_step for its GPU, which does not finish"
        " its kernels (GPU 0: 100 % utilisation, 121 W of 700 W) (MOVING: CPU 100 %"
    )
    assert verdict.place == "forward, train.py:31 in training_step"
    assert "CUDA_LAUNCH_BLOCKING=1" in str(verdict.remedy)


def test_a_call_of_synchronize_needs_no_reading() -> None:
    verdict = _verdict(_only_rank(SYNCHRONIZE, OWN, gpu=None))
    assert verdict.kind == "waits_for_gpu"
    assert "at train.py:31 in training_step for its GPU, which does" in verdict.cause
    assert "not finish its kernels (MOVING: CPU 100 %" in verdict.cause


@pytest.mark.parametrize("gpu", [IDLE, None, {"index": 0}])
def test_a_loop_on_the_cpu_leaves_the_gpu_idle(gpu: Mapping[str, object] | None) -> None:
    verdict = _verdict(_only_rank(OWN, gpu=gpu))
    assert verdict.kind == "busy"
    assert "busy loop" in verdict.cause


def test_others_wait_for_the_rank_whose_kernel_hangs() -> None:
    evidence = with_rank(load("data_spin"), 1, gpu=SPINS, still_s=9.0)
    (verdict,) = judged(evidence, later_s=6.0).verdicts
    assert (verdict.kind, verdict.culprits, verdict.waiting) == ("waits_for_gpu", (1,), (0, 2))
    assert "; ranks 0 and 2 wait in all_reduce #" in verdict.cause


def test_a_collective_of_all_gpus_may_wait_for_a_kernel() -> None:
    """A rank enqueues a collective before its GPU has come to it."""
    recorded = load("rank0_barrier")
    common = recorded.ranks[1]
    evidence = with_each(
        recorded, collectives=common.collectives, last_enqueued=common.last_enqueued,
        stacks=common.stacks, still_s=9.0, gpu=SPINS,
    )  # fmt: skip
    (verdict,) = judged(evidence, later_s=6.0).verdicts
    assert verdict.kind == "transport"
    assert "or a kernel before it does not end on one of their GPUs" in verdict.cause


def _in_state_d(channel: str, *, exiting: bool = False) -> Verdict:
    in_driver = process(state="D", wait_channel=channel, exiting=exiting)
    return _verdict(with_rank(_only_rank(OWN, gpu=None), 0, process=in_driver))


@pytest.mark.parametrize(
    ("channel", "kind", "words"),
    [
        ("os_acquire_rwlock_write", "waits_for_gpu", "is in the NVIDIA driver, which does not"),
        ("uvm_va_space_destroy", "waits_for_gpu", "(state D, uvm_va_space_destroy)"),
        ("nvme_submit_user_cmd", "disk", "a disk or network file system does not answer"),
        ("io_schedule", "disk", "a disk or network file system does not answer"),
    ],
)
def test_a_driver_that_does_not_answer_is_no_disk(channel: str, kind: str, words: str) -> None:
    verdict = _in_state_d(channel)
    assert verdict.kind == kind
    assert words in verdict.cause


def test_a_process_that_ends_is_no_disk() -> None:
    """The kernel frees the memory of a GPU before the process is a zombie."""
    verdict = _in_state_d("os_acquire_mutex", exiting=True)
    assert verdict.kind == "not_exiting"
    assert "has ended, but the kernel has not freed its memory and devices yet" in verdict.cause
