"""Tests of ``judge``: stalled, waiting and dead ranks by their pulses."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ltui.training.config.run_spec import StallPolicy
from ltui.training.diagnosis.judge import Judgement
from ltui.training.diagnosis.judge_input import Death, HealthHistory
from ltui.training.diagnosis.thresholds import budget_s
from ltui.training.shared.record_types import Outcome, Phase, PulseState, RecordKind
from ltui.training.state.record_fold import FoldState, fold
from ltui.training.state.run_snapshot import CheckpointInfo, RankState
from tests.diagnosis import machines
from tests.diagnosis.machines import trained
from tests.state.records import labelled, pulse, steps

POLICY = StallPolicy()


def at(
    now_s: float, pulses: Sequence[PulseState], state: FoldState | None = None, **more
) -> Judgement:
    """Judge a run of three ranks. The budget of a step is 5 s."""
    return machines.at(now_s, pulses, fold=trained(3) if state is None else state, **more)


def test_the_rank_that_fetches_is_blamed_and_the_others_wait() -> None:
    phases = (Phase.BACKWARD, Phase.FETCH, Phase.BACKWARD)
    judgement = at(12, [pulse(r, phase, 4.0, batch=20) for r, phase in enumerate(phases)])
    assert judgement.states == {0: RankState.WAITING, 1: RankState.STALLED, 2: RankState.WAITING}
    (verdict,) = judgement.verdicts
    assert (verdict.kind, verdict.level) == ("unknown", "stalled")
    assert (verdict.culprits, verdict.waiting) == ((1,), (0, 2))
    assert verdict.place == "fetch data"
    assert "rank 1" in verdict.cause
    assert "ranks 0 and 2" in verdict.cause
    assert verdict.began == 1004.0


@pytest.mark.parametrize(
    ("now_s", "phases", "batches", "culprit", "words"),
    [
        # A lower batch is behind in any phase.
        (12, (Phase.OPTIMIZER, Phase.FORWARD), (19, 20), 0, ""),
        (700, (Phase.CHECKPOINT, Phase.BACKWARD), (10, 20), 0, ""),
        # A rank that left the epoch early is blamed at once.
        (12, (Phase.BACKWARD, Phase.EPOCH_END), (11, 10), 1, "batch counts differ"),
    ],
)
def test_one_of_two_ranks_is_blamed_for_its_position(
    now_s: float, phases: Sequence[Phase], batches: Sequence[int], culprit: int, words: str
) -> None:
    places = enumerate(zip(phases, batches, strict=True))
    pulses = [pulse(r, phase, 4.0, batch=n, global_step=11) for r, (phase, n) in places]
    judgement = at(now_s, pulses)
    assert judgement.verdicts[0].culprits == (culprit,)
    assert words in judgement.verdicts[0].cause


def test_no_rank_is_blamed_if_all_are_at_the_same_place() -> None:
    judgement = at(12, [pulse(r, Phase.BACKWARD, 4.0, batch=20) for r in range(3)])
    (verdict,) = judgement.verdicts
    assert verdict.culprits == ()
    assert verdict.waiting == (0, 1, 2)
    assert verdict.confidence < 0.5
    assert set(judgement.states.values()) == {RankState.STALLED}


OK, PAUSED, WAITING = RankState.OK, RankState.PAUSED, RankState.WAITING


@pytest.mark.parametrize(
    ("now_s", "pulses", "states"),
    [
        (7.9, [pulse(0, Phase.BACKWARD, 4.0), pulse(1, Phase.FETCH, 4.0)], {0: OK, 1: OK}),
        (
            60,
            [pulse(0, Phase.CHECKPOINT, global_step=20), pulse(1, Phase.BACKWARD, global_step=20)],
            {0: OK, 1: WAITING},
        ),
        (500, [pulse(0, Phase.FORWARD, telemetry_ok=False)], {0: RankState.UNKNOWN}),
        *(
            (10_000, [pulse(0, Phase.PAUSED), pulse(1, phase)], {0: PAUSED, 1: OK})
            for phase in (Phase.FETCH, Phase.BACKWARD, Phase.BATCH_END)
        ),
        *(
            (10_000, [pulse(0, phase, outcome=outcome)], {0: RankState.ENDED})
            for phase in set(Phase) - {Phase.EXCEPTION}
            for outcome in (Outcome.FINISHED, Outcome.STOPPED)
        ),
    ],
)
def test_ranks_within_the_budget_that_save_end_pause_or_send_nothing_do_not_stall(
    now_s: float, pulses: Sequence[PulseState], states: dict[int, RankState]
) -> None:
    judgement = at(now_s, pulses)
    assert judgement.verdicts == ()
    assert judgement.states == states


def test_a_stopped_process_is_reported_long_before_the_budget() -> None:
    pulses = [pulse(r, Phase.BACKWARD, 10.0, batch=20) for r in range(2)]
    judgement = at(12, pulses, stopped_pids={1: 4711})
    assert judgement.states == {0: RankState.WAITING, 1: RankState.STALLED}
    (verdict,) = judgement.verdicts
    assert (verdict.culprits, verdict.waiting) == ((1,), (0,))
    assert "rank 1 is stopped" in verdict.cause
    assert verdict.remedy == "To continue it: kill -CONT 4711"
    assert not at(10.5, pulses, stopped_pids={1: 4711}).verdicts
    assert not at(12, pulses, stopped_pids={}).verdicts


def test_a_rank_that_finished_while_another_trains_is_mentioned() -> None:
    ended = pulse(1, Phase.ENDED, 4.0, outcome=Outcome.FINISHED)
    judgement = at(12, [pulse(0, Phase.BACKWARD, 4.0), ended])
    assert "rank 1 already ended" in judgement.verdicts[0].cause


def test_a_dead_rank_is_reported_with_its_reason_and_the_others_wait() -> None:
    pulses = [pulse(r, Phase.BACKWARD, 4.0) for r in range(3)]
    judgement = at(12, pulses, dead=frozenset({1}), deaths={1: Death(signal="SIGKILL")})
    assert judgement.states == {0: RankState.WAITING, 1: RankState.DEAD, 2: RankState.WAITING}
    (verdict,) = judgement.verdicts
    assert (verdict.kind, verdict.culprits) == ("killed", (1,))
    assert verdict.cause == "rank 1 was killed by SIGKILL"


def test_a_rank_that_the_agent_ended_after_an_abort_is_no_cause() -> None:
    line = "what():  op.preamble.length <= op.nbytes. 1025000 vs 4. Is there a mismatch?"
    deaths = {0: Death(signal="SIGTERM"), 1: Death(signal="SIGABRT", last_line=line)}
    pulses = [pulse(r, Phase.COMPUTE, 4.0) for r in range(2)]
    (verdict,) = at(12, pulses, dead=frozenset(deaths), deaths=deaths).verdicts
    # A back end may abort either of two ranks whose collectives differ in size.
    assert (verdict.kind, verdict.culprits) == ("mismatch", (0, 1))
    assert "it is unknown which of them is wrong: rank 1 was killed by SIGABRT" in verdict.cause


def test_a_dead_rank_without_a_pulse_is_dead() -> None:
    judgement = machines.at(
        1.0, {0: None, 1: None}, dead=frozenset({1}), deaths={1: Death(exit_code=1)},
        fold=FoldState(),
    )  # fmt: skip
    assert judgement.states == {0: RankState.STARTING, 1: RankState.DEAD}
    assert judgement.verdicts[0].culprits == (1,)


def test_the_exception_is_the_cause() -> None:
    event = {"kind": "exception", "text": "t", "type": "ValueError", "message": "bad batch"}
    state = fold(trained(3), 1, [labelled(RecordKind.EVENT, event)])
    judgement = at(5, [pulse(0, Phase.BACKWARD, 4.0), pulse(1, Phase.EXCEPTION, 4.0)], state)
    assert judgement.verdicts[0].cause == "rank 1 raised ValueError: bad batch"


@pytest.mark.parametrize(("saved", "again"), [(True, "resume the run"), (False, "start it again")])
def test_the_line_is_the_users_and_the_remedy_fits_the_run(saved: bool, again: str) -> None:
    """Torch may be built in a folder of any name, and a run without checkpoints has no resume."""
    lines = ["/home/u/train.py", "/opt/torch/nn/linear.py"]
    trace = "".join(f'  File "{file}", line 4, in step\n    x()\n' for file in lines)
    event = {"kind": "exception", "type": "ValueError", "message": "bad", "traceback": trace}
    records = [
        labelled(RecordKind.HELLO, {"program": "PyTorch", "saves": True}),
        labelled(RecordKind.EVENT, {**event, "torch_dir": "/opt/torch/"}),
    ]
    state = fold(trained(1), 0, records)
    checkpoints = (CheckpointInfo(path="step-4.ckpt", global_step=4),) * saved
    judgement = at(5, [pulse(0, Phase.EXCEPTION, 4.0)], state, checkpoints=checkpoints)
    (verdict,) = judgement.verdicts
    assert verdict.cause == "rank 0 raised ValueError: bad at train.py:4 in step"
    assert verdict.remedy == f"Fix the error at that line, then {again}."


def test_a_nan_loss_is_reported() -> None:
    state = fold(trained(1), 0, steps(5, 0.1, first=21, start_s=2.0, loss=math.nan))
    (verdict,) = at(2.5, [pulse(0, Phase.FORWARD, 2.4)], state).verdicts
    assert (verdict.kind, verdict.culprits) == ("nan_loss", (0,))
    assert verdict.evidence["step"] == 21
    healed = fold(state, 0, steps(1, 0.1, first=26, start_s=2.5, loss=0.5))
    assert at(2.6, [pulse(0, Phase.FORWARD, 2.6)], healed).verdicts == ()


def test_a_supervisor_that_was_asleep_raises_no_false_alarm() -> None:
    pulses = [pulse(r, Phase.FORWARD, 4.0) for r in range(2)]
    awake = at(4.5, pulses)
    woken = at(4000.0, pulses, history=awake.history)
    assert woken.verdicts == ()
    history = woken.history
    for now_s in (4001, 4002, 4003, 4004):
        judgement = at(now_s, pulses, history=history)
        history = judgement.history
        assert judgement.verdicts == ()
    assert at(4005.5, pulses, history=history).verdicts


def test_a_verdict_keeps_its_beginning_and_is_reported_once_when_it_ends() -> None:
    stuck = [pulse(0, Phase.BACKWARD, 4.0), pulse(1, Phase.FETCH, 4.0)]
    first = at(12, stuck)
    second = at(13, stuck, history=first.history)
    assert second.verdicts[0].began == first.verdicts[0].began == 1004.0
    moving = [pulse(r, Phase.FORWARD, 13.9) for r in range(2)]
    moved = at(14, moving, history=second.history)
    assert moved.verdicts == ()
    (ended,) = moved.ended
    assert ended.ended == 1014.0
    assert at(15, stuck[:0], history=moved.history).ended == ()


def test_budgets_adapt_to_steps_and_phases() -> None:
    quick, slow = trained(1, 0.1).ranks[0], trained(1, 4.0).ranks[0]
    training = pulse(0, Phase.FORWARD, batch=20)
    assert budget_s(training, quick, POLICY, 0.1) == POLICY.floor_s
    assert budget_s(training, slow, POLICY, 4.0) == 20.0
    assert budget_s(training, slow, POLICY, 40.0) == POLICY.cap_s
    # A model whose steps take minutes is healthy.
    assert budget_s(training, slow, POLICY, 150.0) == 300.0
    assert budget_s(training, slow, POLICY, 4000.0) == POLICY.slow_phase_s
    assert budget_s(pulse(0, Phase.FETCH, batch=0), quick, POLICY, 0.1) == 30.0
    assert budget_s(pulse(0, Phase.SETUP), quick, POLICY, 0.1) == POLICY.slow_phase_s
    assert budget_s(training, None, POLICY, 0.1) == POLICY.slow_phase_s
    assert budget_s(training, quick, POLICY, None) == POLICY.slow_phase_s


pulses_of_any_kind = st.builds(
    pulse,
    st.integers(0, 5),
    st.sampled_from(Phase),
    st.floats(0, 100),
    epoch=st.integers(0, 2),
    batch=st.integers(-1, 30),
    global_step=st.integers(0, 40),
    outcome=st.sampled_from(Outcome),
    telemetry_ok=st.booleans(),
)


@given(
    st.lists(pulses_of_any_kind, unique_by=lambda p: p.rank),
    st.floats(0, 5000),
    st.frozensets(st.integers(0, 5), max_size=2),
)
def test_any_input_is_judged_consistently(
    pulses: list[PulseState], now_s: float, dead: frozenset[int]
) -> None:
    deaths = {rank: Death(signal="SIGKILL") for rank in dead}
    judgement = at(now_s, pulses, FOLD, dead=dead, deaths=deaths)
    assert set(judgement.states) == {p.rank for p in pulses} | dead
    for verdict in judgement.verdicts:
        assert not set(verdict.culprits) & set(verdict.waiting)
        for rank in verdict.culprits:
            assert judgement.states[rank] in (RankState.STALLED, RankState.DEAD)
    stalled = {r for r, s in judgement.states.items() if s is RankState.STALLED}
    reported = {r for v in judgement.verdicts for r in (*v.culprits, *v.waiting)}
    assert stalled <= reported


FOLD = trained(6)


def _apart(
    now_s: float, step: int, batches: tuple[int, ...], pulse_step: int, history: HealthHistory
) -> Judgement:
    """Judge ranks that ended ``step`` at these batches of epoch 0.

    The pulse of rank 1 is at ``pulse_step``.
    """
    state, pulses = FoldState(), []
    for rank, batch in enumerate(batches):
        state = fold(state, rank, steps(1, 0.1, first=step, batch=batch, start_s=now_s))
        at_step = pulse_step if rank == 1 else step
        pulses.append(pulse(rank, Phase.FORWARD, now_s, batch=batch, global_step=at_step))
    return at(now_s, pulses, state, history=history)


def test_a_drift_lasts_while_only_other_ranks_are_observed_together() -> None:
    first = _apart(10, 100, (40, 42, 40), 100, HealthHistory())
    drifting = _apart(12.5, 120, (60, 62, 60), 120, first.history)
    assert [v.culprits for v in drifting.verdicts] == [(1,)]
    without_it = _apart(13, 130, (70, 73, 70), 131, drifting.history)
    assert [v.culprits for v in without_it.verdicts] == [(1,)]
    assert _apart(13.5, 140, (80, 80, 80), 140, without_it.history).verdicts == ()


def test_a_drift_is_reported_until_ranks_are_observed_together() -> None:
    first = _apart(10, 100, (40, 42), 100, HealthHistory())
    assert first.verdicts == ()
    # No two ranks are at an equal step, so nothing can be concluded.
    between = _apart(11, 110, (50, 53), 111, first.history)
    drifting = _apart(12.5, 120, (60, 62), 120, between.history)
    (verdict,) = drifting.verdicts
    assert (verdict.kind, verdict.level, verdict.culprits) == ("drift", "warning", (1,))
    unseen = _apart(13, 130, (70, 73), 131, drifting.history)
    assert [v.kind for v in unseen.verdicts] == ["drift"]
    assert unseen.ended == ()
    assert _apart(13.5, 140, (80, 80), 140, unseen.history).verdicts == ()
    assert _apart(19, 140, (80, 83), 141, drifting.history).verdicts == ()
