"""The comparison of samples: the place where one rank spends more time than another."""

from __future__ import annotations

from ltui.training.diagnosis.evidence import Frame, ThreadStack
from ltui.training.diagnosis.stack_samples import SampledRank, StackSamples, StackTime, compare

SITE = "/venv/lib/python3.11/site-packages"
BACKWARD = f"{SITE}/torch/autograd/graph.py:829:_engine_run_backward /p/train.py:61:main"
LOADER = (
    "/usr/lib/python3.11/selectors.py:415:select"
    f" {SITE}/torch/utils/data/dataloader.py:1275:_try_get_data /p/train.py:59:main"
)
OPEN = f"{SITE}/PIL/ImageFile.py:293:load {SITE}/PIL/Image.py:940:convert"
FORWARD = (
    f"/p/net.py:20:forward {SITE}/torch/nn/modules/module.py:1798:_call_impl /p/train.py:60:main"
)
WORKER = f"{SITE}/torch/utils/data/_utils/worker.py:349:_worker_loop /p/train.py:59:main"
WORKER_WAITS = f"/usr/lib/python3.11/multiprocessing/queues.py:113:get {WORKER}"


def stack(text: str, seconds: float, held_s: float = 0.0) -> StackTime:
    """Return a stack of words ``file:line:function``, innermost first."""
    parts = [word.split(":") for word in text.split()]
    frames = tuple(Frame(file=f, line=int(n), function=name) for f, n, name in parts)
    return StackTime(frames=frames, seconds=seconds, held_s=held_s)


def samples(*stacks: tuple[str, float] | tuple[str, float, float]) -> StackSamples:
    return StackSamples(seconds=10.0, stacks=tuple(stack(*s) for s in stacks))


def rank(
    number: int, *stacks: tuple[str, float], workers: tuple[StackSamples, ...] = ()
) -> SampledRank:
    return SampledRank(rank=number, main=samples(*stacks), workers=workers)


WAITING = rank(0, (BACKWARD, 9.6), (FORWARD, 0.4))


def sentence(slow: SampledRank, normal: SampledRank | None = WAITING) -> str:
    return compare(slow, normal, 0.0).sentence


def test_the_function_in_which_the_difference_is_spent_is_named_with_its_caller() -> None:
    slow = rank(
        1,
        (f"{OPEN} /p/data.py:31:__getitem__ /p/train.py:59:main", 4.1),
        (FORWARD, 0.4),
        (BACKWARD, 5.5),
    )
    normal = rank(
        0,
        (f"{OPEN} /p/data.py:31:__getitem__ /p/train.py:59:main", 0.9),
        (FORWARD, 0.4),
        (BACKWARD, 8.7),
    )
    report = compare(slow, normal, 5.0)
    assert report.differs
    assert report.sentence == (
        "rank 1 spends 4.1 s of 10 s in ImageFile.py:293 in load, called by data.py:31 in"
        " __getitem__, rank 0 0.9 s"
    )
    assert [(r.slow_s, r.normal_s, r.where) for r in report.rows] == [
        (4.1, 0.9, "data.py:31 in __getitem__ > load"),
        (0.4, 0.4, "net.py:20 in forward"),
        (5.5, 8.7, "train.py:61 in main > _engine_run_backward"),
    ]
    assert (report.slow, report.normal, report.taken_at, report.missing) == (1, 0, 5.0, ())


def test_time_in_several_callees_is_named_by_their_common_caller() -> None:
    slow = rank(
        1, *((f"/p/augment.py:{n}:step{n} {FORWARD}", 2.0) for n in range(4)), (BACKWARD, 2.0)
    )
    assert "8.0 s of 10 s in net.py:20 in forward, rank 0 0.4 s" in sentence(slow)


def test_a_function_that_both_call_often_hides_nothing() -> None:
    """Modules call each other by the same function; the deepest such stack does not count."""
    deep = f"/p/lin.py:5:linear {SITE}/torch/nn/modules/module.py:1798:_call_impl {FORWARD}"
    slow = rank(1, (f"/p/mask.py:3:mask {FORWARD}", 9.0), (deep, 0.4), (BACKWARD, 0.6))
    assert "9.0 s of 10 s in mask.py:3 in mask," in sentence(slow)


def test_waits_for_other_ranks_are_no_work() -> None:
    alike = compare(rank(1, (BACKWARD, 9.5), (FORWARD, 0.5)), WAITING, 0.0)
    assert alike.sentence == "no difference was found: rank 1 and rank 0 spent 10 s alike"
    assert not alike.differs
    reduce = f"{SITE}/torch/distributed/distributed_c10d.py:3000:all_reduce /p/train.py:63:main"
    waits = compare(rank(1, (reduce, 9.0), (FORWARD, 1.0)), rank(0, (FORWARD, 10.0)), 0.0)
    assert waits.sentence.startswith("rank 0 did not wait for rank 1 while both were sampled")
    assert not waits.differs


def test_a_small_difference_is_not_named() -> None:
    assert "no difference" in sentence(rank(1, (FORWARD, 1.1), (BACKWARD, 8.9)))
    assert "net.py:20" in sentence(rank(1, (FORWARD, 1.3), (BACKWARD, 8.7)))


def test_samples_of_another_length_are_scaled() -> None:
    short = StackSamples(seconds=5.0, stacks=(stack(FORWARD, 4.0), stack(BACKWARD, 1.0)))
    slow = rank(1, (FORWARD, 8.1), (BACKWARD, 1.9))
    assert "no difference" in sentence(slow, SampledRank(rank=0, main=short))


def test_workers_say_why_a_rank_waits_for_data() -> None:
    busy = samples((f"/p/data.py:24:collate {WORKER}", 9.0), (WORKER_WAITS, 1.0))
    idle = samples((f"/p/data.py:24:collate {WORKER}", 0.5), (WORKER_WAITS, 9.5))
    slow = rank(1, (LOADER, 9.5), (BACKWARD, 0.5), workers=(busy, busy))
    report = compare(slow, rank(0, (BACKWARD, 10.0), workers=(idle,)), 0.0)
    assert report.sentence == (
        "rank 1 waits 9.5 s of 10 s for its DataLoader workers, rank 0 0.0 s. Each of its workers"
        " spends 9.0 s of 10 s in data.py:24 in collate, those of rank 0 0.5 s"
    )
    assert [(r.slow_s, r.normal_s, r.where) for r in report.workers] == [
        (9.0, 0.5, "data.py:24 in collate")
    ]
    assert sentence(slow).endswith(". The workers were not sampled")
    both = compare(slow, rank(0, (BACKWARD, 10.0), workers=(busy,)), 0.0)
    assert both.sentence.endswith(". Its workers do what those of the other rank do")


def test_a_held_gil_is_named_with_the_call_that_holds_it() -> None:
    match = f"/usr/lib/python3.11/re/__init__.py:166:match /p/text.py:9:clean {FORWARD}"
    stacks = [(FORWARD, 3.0, 0.0), (match, 6.0, 5.5), (BACKWARD, 1.0, 0.0)]
    text = sentence(SampledRank(rank=1, main=samples(*stacks)))
    assert "spends 9.0 s of 10 s in net.py:20 in forward" in text
    assert text.endswith(
        "; for 5.5 s no other Python could run, because a call of C code at"
        " __init__.py:166 in match, called by text.py:9 in clean holds the GIL"
    )
    text = sentence(SampledRank(rank=1, main=samples((match, 9.0, 9.0), (BACKWARD, 1.0))))
    assert text.count("match") == 1
    assert text.endswith("because a call of C code there holds the GIL")
    held = ThreadStack(name="main", main=True, frames=stack(match, 0.0).frames)
    report = compare(SampledRank(rank=1, held_at=held, missing=("no samples",)), WAITING, 0.0)
    assert report.differs
    assert report.sentence == (
        "no Python ran on rank 1, because a call of C code at __init__.py:166 in match, called by"
        " text.py:9 in clean holds the GIL"
    )
    assert (report.rows, report.missing) == ((), ("rank 1: no samples",))


def test_without_a_second_rank_the_longest_place_is_named() -> None:
    slow = rank(0, (FORWARD, 7.0), (BACKWARD, 3.0))
    assert sentence(slow, None) == (
        "rank 0 spends 7.0 s of 10 s in net.py:20 in forward; there is no rank to compare it with"
    )
    assert sentence(slow, SampledRank(rank=1)).endswith("; rank 1 gave no samples")
    assert sentence(SampledRank(rank=0), None) == "rank 0 could not be sampled"
    assert sentence(SampledRank(rank=0, main=StackSamples(seconds=10.0)), None).startswith(
        "rank 0 ran no Python"
    )


def test_text_of_a_rank_is_cleaned_and_its_rows_are_limited() -> None:
    places = [(f"/p/a\x1b{n}.py:{n}:f\x07 {FORWARD}", 0.2) for n in range(50)]
    report = compare(rank(1, *places), WAITING, 0.0)
    assert len(report.rows) == 24
    assert all(row.where.isprintable() for row in report.rows)
    assert report.sentence.isprintable()
