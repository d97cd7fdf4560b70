"""Samples of the stacks of ranks: real processes without torch, asked as the supervisor asks."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from ltui.app.diagnosis.request_diagnosis import request_diagnosis
from ltui.training.diagnosis.judge import Judgement
from ltui.training.diagnosis.judge_input import HealthHistory
from ltui.training.diagnosis.sample_report import SampleReport
from ltui.training.problem import ProblemError
from ltui.training.process.identity import ProcessTable
from ltui.training.process.process_activity import LOADER_NAME
from ltui.training.state.record_fold import FoldState
from ltui.training.state.run_snapshot import RunState, Verdict
from ltui.training.supervise.speed import sample_ranks
from ltui.training.supervise.speed.sample_ranks import RankSampler
from tests.supervise.conftest import Runs
from tests.supervise.test_evidence import Stuck
from tests.waiting import wait_for

STRAGGLER = Verdict(
    kind="straggler", level="slow", culprits=(1,), cause="rank 1 is slow", began=5.0
)


class Sampled:
    """Two hanging processes as the ranks of a run, and its sampler."""

    def __init__(self, home: Path) -> None:
        self.stuck = Stuck(home)
        self.order = [0, 1]
        """The ranks, the slowest first."""
        self.evidence = cast(Any, SimpleNamespace(samples=None, workers_of=self.workers_of))
        self.sampler = RankSampler(self.stuck.run_dir, 1, self.evidence)
        self.live: Any = SimpleNamespace(
            state=RunState.RUNNING,
            spec=SimpleNamespace(nodes=None),
            fold=FoldState(),
            limits=SimpleNamespace(slowest_first=lambda _: self.order),
            profiles=SimpleNamespace(active=None),
            snapshot=SimpleNamespace(limit=None, verdicts=(STRAGGLER,)),
            machine=SimpleNamespace(rank_processes=self.stuck.processes),
            local_ranks=lambda: list(range(len(self.stuck.processes))),
        )

    def workers_of(self, rank: int) -> tuple[int, ...]:
        table = ProcessTable()
        children = table.tree(self.stuck.processes[rank].pid)
        return tuple(pid for pid in children if table.entries[pid].name == LOADER_NAME)

    def ask(self) -> SampleReport:
        self.sampler.answer(self.live)
        report: SampleReport = self.evidence.samples
        return report


@pytest.fixture
def sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sampled]:
    monkeypatch.setattr(sample_ranks, "SAMPLE_S", 1.0)
    made = Sampled(tmp_path)
    yield made
    made.stuck.end()


def judgement(*verdicts: Verdict, ended: tuple[Verdict, ...] = ()) -> Judgement:
    return Judgement(states={}, verdicts=verdicts, ended=ended, history=HealthHistory())


def test_a_straggler_is_sampled_once_and_its_cause_says_where_its_time_goes(
    sampled: Sampled,
) -> None:
    sampled.stuck.start("locked")
    sampled.stuck.start("fetches")
    wait_for(lambda: sampled.workers_of(1))

    def causes() -> list[str]:
        found = sampled.sampler.explain(judgement(STRAGGLER), sampled.live)
        return [verdict.cause for verdict in found.verdicts]

    (cause,) = wait_for(causes, wanted=lambda c: c != [STRAGGLER.cause], seconds=60)
    spends = r"Rank 1 spends 1\.\d s of 1 s in stuck_rank\.py:\d+ in asleep, rank 0 0\.0 s"
    assert re.fullmatch(rf"rank 1 is slow\. {spends}", cause)
    report = sampled.evidence.samples
    assert (report.slow, report.normal, report.missing) == (1, 0, ())
    assert "decodes" in report.workers[0].where
    assert report.workers[0].normal_s == 0.0
    # The same verdict is not sampled again; it keeps the sentence when it ends.
    found = sampled.sampler.explain(judgement(ended=(STRAGGLER,)), sampled.live)
    assert found.ended[0].cause == cause
    assert sampled.evidence.samples is report
    other = replace(STRAGGLER, kind="frozen")
    assert sampled.sampler.explain(judgement(other), sampled.live).verdicts == (other,)


def test_a_rank_that_holds_the_gil_is_named_with_its_call(
    sampled: Sampled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_ranks, "_LATE_S", 0.0)
    sampled.stuck.start("locked")
    sampled.stuck.start("gil")
    report = sampled.ask()
    assert report.differs
    assert report.sentence.startswith("no Python ran on rank 1, because a call of C code at stuck_")
    assert report.sentence.endswith("in gil holds the GIL")
    assert report.missing == ("rank 1: no samples, because no Python ran in it",)
    assert report.rows == ()


def test_a_rank_that_holds_the_gil_only_at_first_is_waited_for(
    sampled: Sampled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_ranks, "_LATE_S", 60.0)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    sampled.stuck.start("locked")
    sampled.stuck.start("gil_at_first", str(fifo))
    read_held = sampled.sampler._read_held

    def read_and_let_go(target: Any, held: dict[int, Any]) -> None:
        read_held(target, held)
        if 1 in held:
            fifo.write_bytes(b"x")

    monkeypatch.setattr(sampled.sampler, "_read_held", read_and_let_go)
    report = sampled.ask()
    assert "in decodes, rank 0 0.0 s" in report.sentence
    assert report.missing == ()


def test_requests_at_the_same_time_share_one_sampling(sampled: Sampled) -> None:
    sampled.stuck.start("locked")
    sampled.stuck.start("late")
    reports: list[SampleReport] = []
    threads = [
        threading.Thread(target=lambda: reports.append(sampled.sampler._sample(sampled.live, None)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert reports[0] is reports[1]


def test_ranks_that_cannot_be_sampled_are_refused_with_the_reason(sampled: Sampled) -> None:
    def refusal(**changes: Any) -> str:
        live: Any = SimpleNamespace(**{**vars(sampled.live), **changes})
        with pytest.raises(ValueError, match=r"^(its?|profile) .*\.$") as caught:
            sampled.sampler.answer(live)
        return str(caught.value)

    assert refusal(state=RunState.PAUSED) == "it is paused; only a run that trains can be sampled."
    several = SimpleNamespace(nodes=object())
    assert refusal(spec=several) == "its ranks are on several machines, so they cannot be sampled."
    profiled = SimpleNamespace(active=SimpleNamespace(number=3))
    assert refusal(profiles=profiled) == "profile 3 is running. Wait until it is over."
    assert refusal() == "its ranks send nothing to ltui, so they cannot be sampled."


def test_a_request_reaches_the_sampler_of_a_run_and_its_refusal_comes_back(runs: Runs) -> None:
    run = runs.training()
    with pytest.raises(ProblemError, match="its ranks send nothing to ltui"):
        request_diagnosis(run, sample=True)
    runs.end(run, "kill")
    with pytest.raises(ProblemError, match="it is not running"):
        request_diagnosis(run, sample=True)


def test_the_slowest_and_a_median_rank_are_chosen(
    sampled: Sampled, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled.order = [2, 1, 3, 0]
    monkeypatch.setattr(sampled.sampler._table, "read", lambda: dict.fromkeys(range(4)))
    live: Any = SimpleNamespace(**{
        **vars(sampled.live), "local_ranks": lambda: [0, 1, 2, 3],
        "machine": SimpleNamespace(rank_processes=[SimpleNamespace(pid=n) for n in range(4)]),
    })  # fmt: skip
    monkeypatch.setattr(sampled.evidence, "workers_of", lambda _: ())

    def chosen(straggler: Verdict | None = None) -> list[int]:
        return [t.rank for t in sampled.sampler._choose(live, straggler)]

    assert chosen() == [2, 3]
    assert chosen(STRAGGLER) == [1, 3]
