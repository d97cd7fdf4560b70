"""The decision which queued runs may start, as a pure function."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ltui.training.problem import ProblemError
from ltui.training.state.run_queue import (
    GONE,
    QueueEntry,
    QueueFacts,
    QueuePlace,
    UsedSlots,
    check_no_cycle,
    decide,
    moved,
    ordered,
    split_dependency,
)

HERE = "here"


def facts(entries: dict[str, QueueEntry], **others: Any) -> QueueFacts:
    placed = {
        run: replace(entry, host=entry.host or HERE, position=entry.position or float(n))
        for n, (run, entry) in enumerate(entries.items(), 1)
    }
    return QueueFacts(entries=placed, host=HERE, **{"now": 1000.0, **others})


def started(places: list[QueuePlace]) -> list[str]:
    return [place.run for place in places if place.starts]


def reason(places: list[QueuePlace], run: str) -> str:
    return next(place.reason for place in places if place.run == run)


@pytest.mark.parametrize(
    ("entry", "others", "words"),
    [
        (QueueEntry(held=True), {}, "held"),
        (QueueEntry(host="elsewhere"), {}, "waits on machine elsewhere"),
        (QueueEntry(after=("x",)), {"x": "running"}, "waits for run x to end"),
        (QueueEntry(after=("x:ok",)), {"x": "queued"}, "waits for run x to finish"),
        (
            QueueEntry(after=("y", "x:ok")),
            {"x": "crashed", "y": "running"},
            "never starts: run x had to finish before, and it is crashed",
        ),
        (
            QueueEntry(after=("x:ok",)),
            {"x": GONE},
            "never starts: run x had to finish before, and it was deleted",
        ),
        (QueueEntry(slots=3), {}, "never starts: it needs 3 slots, and there are 2"),
        (QueueEntry(starting=1), {}, "it is being started"),
        (QueueEntry(ended="failed", reason="no torch"), {}, "could not be started: no torch"),
    ],
)
def test_reasons_of_one_entry(entry: QueueEntry, others: dict[str, str], words: str) -> None:
    [place] = decide(facts({"a": entry}, others=others, slots=2))
    assert (place.starts, place.reason) == (False, words)


@pytest.mark.parametrize(
    ("after", "state"), [("x", "failed"), ("x", GONE), ("x", "finished"), ("x:ok", "finished")]
)
def test_dependency_that_is_met(after: str, state: str) -> None:
    assert started(decide(facts({"a": QueueEntry(after=(after,))}, others={"x": state}))) == ["a"]


def test_time_is_named_with_the_day_if_it_is_another_one() -> None:
    soon, late = QueueEntry(not_before=1060.0), QueueEntry(not_before=1000.0 + 9 * 86400)
    places = decide(facts({"soon": soon, "late": late}))
    assert len(reason(places, "soon")) == len("not before 18:30")
    assert len(reason(places, "late")) == len("not before 2026-11-30 18:30")
    assert [place.expected_at for place in places] == [soon.not_before, late.not_before]
    assert started(decide(facts({"soon": soon}, now=1060.0))) == ["soon"]


def test_slots_in_order_with_and_without_passing() -> None:
    live = (UsedSlots(run="x", left_s=60.0), UsedSlots(run="gpu", slots=0))
    entries = {"big": QueueEntry(slots=2), "small": QueueEntry(), "urgent": QueueEntry(priority=1)}
    every = facts(entries, live=live, slots=3)
    assert started(decide(every)) == ["urgent"]
    words = "2nd in the run queue: 2 of 3 slots are used by runs x, urgent"
    assert reason(decide(every), "big") == words
    behind = "3rd in the run queue: run big before it needs more slots than are free"
    assert reason(decide(every), "small") == behind
    assert started(decide(replace(every, passing=True))) == ["urgent", "small"]
    # The end of `urgent` is not known, so only the first can be expected.
    assert [place.expected_at for place in decide(every)] == [None, 1060.0, None]


def test_one_run_at_a_time_waits_for_gpus() -> None:
    entries = {"a": QueueEntry(gpus=1), "b": QueueEntry(gpus=2), "cpu": QueueEntry()}
    assert started(decide(facts(entries))) == ["a", "cpu"]
    waiting = (UsedSlots(run="x", slots=0, waits_for_gpus=True),)
    places = decide(facts(entries, live=waiting))
    assert started(places) == ["cpu"]
    assert reason(places, "a") == "1st in the run queue: run x waits for GPUs before it"


RUNS = tuple("abcdefgh")
ENTRY = st.builds(
    QueueEntry,
    priority=st.integers(-1, 1),
    position=st.floats(-2, 9),
    slots=st.integers(1, 3),
    gpus=st.integers(0, 1),
    held=st.booleans(),
    after=st.lists(st.sampled_from([*RUNS, "a:ok", "b:ok"]), max_size=2).map(tuple),
    host=st.just(HERE),
)
QUEUE = st.dictionaries(st.sampled_from(RUNS), ENTRY, min_size=1)


@given(QUEUE, st.integers(1, 4), st.booleans(), st.data())
@settings(deadline=None)
def test_each_run_starts_once_and_never_too_early(
    entries: dict[str, QueueEntry], slots: int, passing: bool, data: st.DataObject
) -> None:
    """Random runs end, and a start may be forgotten half-way, until nothing more happens."""
    states = dict.fromkeys(RUNS, GONE) | dict.fromkeys(entries, "queued")
    waiting, live = dict(entries), dict[str, UsedSlots]()
    starts: list[str] = []
    for _ in range(4 * len(entries)):
        every = QueueFacts(
            entries=waiting, live=tuple(live.values()), others=states, host=HERE,
            slots=slots, passing=passing,
        )  # fmt: skip
        first = next(iter(started(decide(every))), None)
        if first is not None:
            entry = entries[first]
            assert waiting[first].starting is None, "it is started twice"
            assert not entry.held
            for text in entry.after:
                run, must_finish = split_dependency(text)
                assert states[run] in (
                    ("finished",) if must_finish else ("finished", "failed", GONE)
                )
            if data.draw(st.booleans(), "the dispatcher is killed in between"):
                waiting[first] = replace(waiting[first], starting=1)
                assert first not in started(decide(replace(every, entries=waiting)))
            starts.append(first)
            del waiting[first]
            used = 0 if entry.gpus else entry.slots
            gets_gpu = data.draw(st.booleans())
            live[first] = UsedSlots(
                run=first, slots=used, waits_for_gpus=bool(entry.gpus) and not gets_gpu
            )
            states[first] = "running"
        elif live:
            run = data.draw(st.sampled_from(sorted(live)), "ends")
            states[run] = data.draw(st.sampled_from(["finished", "failed"]))
            del live[run]
        assert sum(one.slots for one in live.values()) <= slots
        assert sum(one.waits_for_gpus for one in live.values()) <= 1
    assert len(starts) == len(set(starts))
    assert not live
    # Whatever is left can never start, and says why.
    for place in decide(QueueFacts(entries=waiting, others=states, host=HERE, slots=slots)):
        assert not place.starts
        assert place.reason


@given(QUEUE, st.data())
@settings(deadline=None)
def test_move_puts_a_run_at_its_place_and_keeps_the_others(
    entries: dict[str, QueueEntry], data: st.DataObject
) -> None:
    run, number = data.draw(st.sampled_from(sorted(entries))), data.draw(st.integers(1, 9))
    before = ordered(entries)
    after = ordered(entries | moved(entries, run, number))
    assert [name for name in after if name != run] == [name for name in before if name != run]
    assert after.index(run) == min(number, len(before)) - 1


@pytest.mark.parametrize(
    ("after", "way"),
    [(("a",), "a after a"), (("b:ok",), "a after b after a"), (("d", "c"), "a after c after b")],
)
def test_a_run_does_not_wait_for_itself(after: tuple[str, ...], way: str) -> None:
    entries = {"b": QueueEntry(after=("a",)), "c": QueueEntry(after=("b:ok",))}
    check_no_cycle(entries, "a", ("d", "elsewhere"))
    with pytest.raises(ProblemError, match=way):
        check_no_cycle(entries, "a", after)
