"""What a sweep does next, with simulated runs and with kills between any two of its actions."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ltui.training.json_codec import from_json, to_json
from ltui.training.state.run_snapshot import LIVE, RunState
from ltui.training.sweep.decide import RETRIED, Seen, decide, observed, retried
from ltui.training.sweep.pruning import goes_on, rung_steps, survives
from ltui.training.sweep.record import IN_FLIGHT, State, Sweep, Trial
from ltui.training.sweep.space import parse_dimension
from ltui.training.sweep.suggest import suggest

SPACE = (parse_dimension("a=range(1, 4)"), parse_dimension("b=choice(x, y, z)"))


def sweep(**changes: Any) -> Sweep:
    return Sweep(name="s", created_at=0, space=SPACE, metric="m", **changes)


class World:
    """Runs that make 10 steps in a tick, of 60, with a loss that falls as slowly as ``a`` is
    large. Starting and stopping is forgotten as often as ``chance`` says, as after a kill."""

    def __init__(self, record: Sweep, chance: float, seed: int) -> None:
        self.record, self.chance, self.random = record, chance, random.Random(seed)
        self.runs: dict[str, Seen] = {}
        self.starts: list[str] = []

    def killed(self) -> bool:
        return self.random.random() < self.chance

    def tick(self) -> None:
        for run, seen in self.runs.items():
            if seen.state in LIVE:
                self.runs[run] = self._trained(run, seen)
        before = self.record
        seen_by = {run: self.runs.get(run) for run in map(before.run_id, before.lives)}
        self.record = from_json(Sweep, to_json(decide(before, seen_by, suggest)), tolerant=True)
        for trial in self.record.lives:
            run = self.record.run_id(trial)
            now = self.runs.get(run)
            if self.killed():
                return
            if trial.state == "planned" and now is None:
                self.starts.append(run)
                self.runs[run] = Seen(state=RunState.RUNNING, step=0, resumable=True)
            elif trial.state == "planned" and now is not None and now.state not in LIVE:
                self.runs[run] = replace(now, state=RunState.RUNNING, attempt=now.attempt + 1)
            elif trial.state == "stopping" and now is not None and now.state in LIVE:
                self.runs[run] = replace(now, state=RunState.STOPPED)

    def _trained(self, run: str, seen: Seen) -> Seen:
        if self.random.random() < self.chance / 4:
            return replace(seen, state=RunState.LOST)
        trial = next(t for t in self.record.tried if self.record.run_id(t) == run)
        step = (seen.step or 0) + 10
        loss = trial.parameters["a"] / step
        state = RunState.FINISHED if step >= 60 else RunState.RUNNING
        scores = {**seen.scores, **({step - 10: loss} if step in (20, 40) else {})}
        return replace(seen, step=step, last=loss, state=state, scores=scores)


@settings(max_examples=60, deadline=None)
@given(
    at_once=st.integers(1, 4),
    seeds=st.sampled_from([None, 2]),
    prune=st.sampled_from([None, "asha", "median"]),
    chance=st.sampled_from([0.0, 0.2, 0.5]),
    seed=st.integers(0, 1000),
)
def test_no_trial_is_lost_and_none_runs_twice(
    at_once: int, seeds: int | None, prune: str | None, chance: float, seed: int
) -> None:
    world = World(
        sweep(at_once=at_once, seeds=seeds, prune=prune, rung=10, reduction=2), chance, seed
    )
    for _ in range(2000):
        world.tick()
        live = [run for run, seen in world.runs.items() if seen.state in LIVE]
        assert len(live) <= at_once
        if world.record.state() == "finished":
            break
    tried = world.record.tried
    assert len({(trial.cell, trial.seed) for trial in tried}) == len(tried) == 12 * (seeds or 1)
    assert len(world.starts) == len(set(world.starts)) == len(tried)
    ends = {trial.state for trial in tried}
    assert ends <= {"finished", "failed", *(["pruned"] if prune else [])}
    assert "finished" in ends or chance
    if not chance and prune == "asha":
        assert "pruned" in ends
        best = min(tried, key=lambda trial: trial.parameters["a"])
        assert best.state == "finished"


def test_a_stop_ends_all_trials_and_a_retry_continues_exactly_those_named() -> None:
    world = World(sweep(at_once=3), 0.0, 0)
    world.tick()
    world.tick()
    world.record = replace(world.record, stopped=True)
    for _ in range(3):
        world.tick()
    assert [trial.state for trial in world.record.tried] == ["stopped"] * 3
    assert world.record.state() == "stopped"
    again = [retried(t) if t.state in RETRIED["stopped"] else t for t in world.record.tried]
    world.record = replace(world.record, stopped=False, tried=tuple(again))
    while world.record.state() != "finished":
        world.tick()
    assert sorted(world.starts) == sorted({world.record.run_id(t) for t in world.record.tried})
    assert [seen.attempt for seen in world.runs.values()] == [2] * 3 + [1] * 9


TRIAL = Trial(number=0, suggestion=0, parameters={"a": 1}, cell="c", state=State.RUNNING, attempt=1)


@pytest.mark.parametrize(
    ("seen", "state"),
    [
        (Seen(state=RunState.FAILED, reason="out of memory"), "out of memory"),
        (Seen(state=RunState.FAILED), "failed"),
        (Seen(state=RunState.CRASHED), "planned"),
        (Seen(state=RunState.CRASHED, reason="out of memory"), "out of memory"),
        (Seen(state=RunState.FINISHED, last=0.1), "finished"),
        (Seen(state=RunState.FINISHED, last=float("nan")), "nan"),
        (Seen(state=RunState.FINISHED, last=0.1, reason="nan"), "nan"),
        (Seen(state=RunState.STOPPED), "stopped"),
        (Seen(state=RunState.LOST), "planned"),
        (Seen(state=RunState.QUEUED), "queued"),
        (Seen(state=RunState.PAUSED), "running"),
        (None, "missing"),
    ],
)
def test_the_end_of_a_run_names_the_state_of_its_trial(seen: Seen | None, state: str) -> None:
    now = observed(TRIAL, seen)
    assert now.state == state
    assert state in IN_FLIGHT or retried(now).state == "planned"
    asked = {name for name, states in RETRIED.items() if now.state in states}
    assert ("failed" in asked) == (state == "failed")


def test_a_run_without_a_checkpoint_begins_anew() -> None:
    killed = observed(TRIAL, Seen(state=RunState.LOST, step=3))
    assert (killed.state, killed.generation, killed.interrupted) == ("planned", 2, 1)
    killed = observed(TRIAL, Seen(state=RunState.LOST, step=3, resumable=True))
    assert (killed.state, killed.generation, killed.interrupted) == ("planned", 1, 1)
    failed = observed(TRIAL, Seen(state=RunState.FAILED, attempt=1))
    again = observed(retried(failed), Seen(state=RunState.FAILED, attempt=1))
    assert (again.generation, again.after, again.state) == (2, 0, "planned")
    resumable = Seen(state=RunState.FAILED, attempt=1, resumable=True)
    assert observed(retried(failed), resumable).generation == 1


@pytest.mark.parametrize(
    ("rule", "score", "scores", "survived"),
    [
        ("asha", 0.5, [0.5], True),
        ("asha", 0.5, [0.5, 0.4], False),
        ("asha", 0.5, [0.5, 0.4, 0.6, 0.7, 0.8], False),
        ("asha", 0.5, [0.5, 0.4, 0.6, 0.7, 0.8, 0.9], True),
        ("median", 0.9, [0.9, 0.1, 0.2, 0.3], True),
        ("median", 0.9, [0.9, 0.1, 0.2, 0.3, 0.4], False),
        ("median", 0.25, [0.25, 0.1, 0.2, 0.3, 0.4], True),
    ],
)
def test_the_rules(rule: str, score: float, scores: list[float], survived: bool) -> None:
    assert survives(rule, score, scores, 3) is survived


def test_rungs_count_steps_and_what_was_passed_stays_passed() -> None:
    assert [rung_steps("asha", 100, 3, number) for number in range(3)] == [100, 300, 900]
    assert [rung_steps("median", 100, 3, number) for number in range(3)] == [100, 200, 300]
    others = [{100: 0.1}, {100: 0.2}]
    assert not goes_on("asha", 3, 0, {100: 0.5, 300: 0.4}, others)
    assert goes_on("asha", 3, 100, {100: 0.5, 300: 0.4}, others)
