"""Constructed diagnoses: a stall of one rank among some, or among many; no run behind them."""

from __future__ import annotations

from msgspec.structs import replace

from ltui.training.diagnosis.evidence import (
    Collective,
    CollectivePosition,
    Diagnosis,
    Evidence,
    Frame,
    HostEvidence,
    ProcessActivity,
    RankEvidence,
    StackGroup,
    ThreadStack,
    WorkerEvidence,
)
from ltui.training.diagnosis.sample_report import SampleReport, SampleRow
from ltui.training.state.run_snapshot import Verdict

NOW = 1_800_000_000.0
SITE = "/venv/lib/python3.11/site-packages"
TRAIN = Frame(file="/home/me/vision/train.py", line=61, function="training_step")
OWN = (
    Frame(file="/home/me/vision/data/augment.py", line=88, function="__call__"),
    Frame(file="/home/me/vision/data/images.py", line=31, function="__getitem__"),
)
WAITING = (
    Frame(file=f"{SITE}/torch/autograd/graph.py", line=829, function="_engine_run_backward"),
    Frame(file=f"{SITE}/torch/_tensor.py", line=626, function="backward"),
    Frame(file=f"{SITE}/lightning/pytorch/strategies/strategy.py", line=213, function="backward"),
    Frame(file=f"{SITE}/lightning/pytorch/loops/fit_loop.py", line=455, function="advance"),
    Frame(file=f"{SITE}/lightning/pytorch/trainer/trainer.py", line=561, function="fit"),
    Frame(file="/home/me/vision/train.py", line=90, function="main"),
)
FETCHING = (
    *OWN,
    Frame(file=f"{SITE}/torch/utils/data/_utils/fetch.py", line=52, function="fetch"),
    Frame(file=f"{SITE}/torch/utils/data/_utils/worker.py", line=349, function="_worker_loop"),
)
GETTING = (
    Frame(file="/usr/lib/python3.11/multiprocessing/connection.py", line=948, function="wait"),
    Frame(file=f"{SITE}/torch/utils/data/dataloader.py", line=1275, function="_try_get_data"),
    Frame(file="/home/me/vision/train.py", line=90, function="main"),
)
CAUSE = (
    "rank 2 waits for DataLoader worker 4711, frozen in data/augment.py:88 __call__; "
    "ranks 0, 1 and 3 wait in all_reduce #1043"
)


def collective(seq: int, *, retired: bool = True, op: str = "all_reduce") -> Collective:
    return Collective(
        group="0", seq=seq, op=op, sizes=((1000, 512),), retired=retired, call_site=TRAIN
    )


def rank(number: int, *, stuck: bool, seq: int = 1043) -> RankEvidence:
    last = seq - 1 if stuck else seq
    frozen, alive = (
        ProcessActivity(
            pid=pid, name="pt_data_worker", state="S", wait_channel=channel, interval_s=1.0,
            cpu_share=0.0, switches=switches, rss_bytes=size << 20,
        )
        for pid, channel, switches, size in (
            (4711, "futex_wait_queue", 0, 300), (4712, None, 12, 290),
        )
    )  # fmt: skip
    workers = (WorkerEvidence(process=frozen), WorkerEvidence(process=alive))
    return RankEvidence(
        rank=number, pid=4000 + number, alive=True, phase="fetch data" if stuck else "backward",
        epoch=2, batch=4, global_step=1203, still_s=8.2, joined=True, beat_age_s=0.4,
        process=ProcessActivity(
            pid=4000 + number, state="S", wait_channel="poll_schedule_timeout" if stuck else
            "futex_wait_queue", interval_s=1.0, cpu_share=0.01, switches=2, rss_bytes=3 << 30,
        ),
        stacks=(ThreadStack(name="MainThread", main=True, frames=GETTING if stuck else WAITING),),
        workers=workers if stuck else (),
        last_enqueued={"0": last},
        collectives=tuple(
            collective(n, retired=stuck or n < seq) for n in range(seq - 6, last + 1)
        ),
        missing=("native frames: py-spy is not installed (pip install py-spy)",),
    )  # fmt: skip


def stalled(ranks: int = 4, culprit: int = 2) -> Diagnosis:
    """``culprit`` waits for a DataLoader worker that is frozen in the user's code."""
    others = tuple(n for n in range(ranks) if n != culprit)
    verdict = Verdict(
        kind="worker_frozen", level="stalled", culprits=(culprit,), waiting=others,
        place="fetch data, data/augment.py:88 __call__", cause=CAUSE,
        remedy="Look at data/augment.py:88. DataLoader(timeout=60) makes an error of it.",
        confidence=0.9, began=NOW - 8.2,
        evidence={
            "still_s": {str(n): 8.2 for n in range(ranks)},
            "budget_s": 5.0,
            "frame": "/home/me/vision/data/augment.py:88 __call__",
            "worker": 4711,
            "moving": False,
        },
    )  # fmt: skip
    fronts = tuple(
        CollectivePosition(
            rank=n, group="0", last_enqueued=1042 if n == culprit else 1043, last_done=1042,
            waits_in=None if n == culprit else collective(1043, retired=False),
        )
        for n in range(ranks)
    )  # fmt: skip
    return Diagnosis(
        run="brave-owl-3f2a", attempt=2, taken_at=NOW - 1, headline=CAUSE, verdicts=(verdict,),
        evidence=Evidence(
            taken_at=NOW - 1, taken_ns=1,
            ranks={n: rank(n, stuck=n == culprit) for n in range(ranks)},
            host=HostEvidence(
                host="box", cores=64, load=3.1, memory_available_bytes=200 << 30,
                memory_total_bytes=256 << 30, shm_free_bytes=120 << 30, shm_total_bytes=128 << 30,
            ),
        ),
        wavefront=fronts,
        stacks=(
            StackGroup(
                who=tuple(f"rank {n}" for n in others), ranks=others, frames=WAITING
            ),
            StackGroup(who=(f"rank {culprit}",), ranks=(culprit,), frames=GETTING),
            StackGroup(who=(f"worker 4711 of rank {culprit}",), ranks=(culprit,), frames=FETCHING),
        ),
    )  # fmt: skip


def healthy() -> Diagnosis:
    """Two ranks that advance."""
    return replace(
        stalled(2, culprit=1),
        headline="Healthy: ranks 0 and 1 are running; the slowest is rank 1 (0.112 s per step)",
        verdicts=(),
        wavefront=(),
    )


def diverged() -> Diagnosis:
    """Rank 0 alone met a barrier at #4; the hang shows itself at #5."""
    save = Frame(file="/home/me/vision/train.py", line=5, function="save_checkpoint")
    final = Frame(file="/home/me/vision/train.py", line=6, function="finalize")

    def barrier(seq: int, site: Frame, retired: bool) -> Collective:
        return Collective(group="0", seq=seq, op="barrier", retired=retired, call_site=site)

    first = (barrier(4, save, True), barrier(5, final, False))
    other = (barrier(4, final, True),)
    ranks = {
        n: RankEvidence(
            rank=n, alive=True, phase="teardown", last_enqueued={"0": 5 if n == 0 else 4},
            collectives=first if n == 0 else other,
        )
        for n in range(3)
    }  # fmt: skip
    return Diagnosis(
        run="brave-owl-3f2a",
        attempt=1,
        taken_at=NOW,
        headline="rank 0 met a barrier that the others did not",
        verdicts=(
            Verdict(
                kind="mismatch", level="stalled", culprits=(0,), waiting=(), began=NOW - 20,
                cause="rank 0 met a barrier that the others did not", confidence=0.7,
            ),
        ),
        evidence=Evidence(taken_at=NOW, taken_ns=1, ranks=ranks),
    )  # fmt: skip


def sampled() -> Diagnosis:
    """Return a diagnosis of a healthy run in which one rank waits for its slow workers."""
    report = SampleReport(
        taken_at=NOW - 12, seconds=10.0, slow=1, normal=0, differs=True,
        sentence="rank 1 waits 9.5 s of 10 s for its DataLoader workers, rank 0 0.1 s",
        rows=(
            SampleRow(where="train.py:90 in main > select", slow_s=9.5, normal_s=0.1),
            SampleRow(where="train.py:61 in training_step", slow_s=0.4, normal_s=9.8),
        ),
        workers=(SampleRow(where="augment.py:88 in __call__", slow_s=9.6, normal_s=0.0),),
        missing=("rank 0: a worker was not sampled: it did not answer",),
    )  # fmt: skip
    return replace(healthy(), samples=report)
