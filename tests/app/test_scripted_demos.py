"""The scripts of the demos of GPUs and nodes show every problem that they announce, at its time."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ltui.app.gpu_demo import GPUS, LOST_S, ScriptedGpus
from ltui.app.machines_demo import MachinesDemoApp, SimulatedMachines
from ltui.app.presentation.machine_rows import MachineRows, RowSelection
from ltui.app.screens.run import RunScreen
from ltui.app.scripted_machines import (
    CUT_S,
    LABEL,
    PERIOD_S,
    SLOW_S,
    STALL_S,
    STEP_S,
    Cluster,
    snapshot_at,
    steps_at,
)
from ltui.training.gpu.run_gpus import RunGpus
from ltui.training.state.run_snapshot import NodeState, RankSnapshot, RankState, RunSnapshot
from ltui.widgets.header import RunHeader
from tests.app.one_run import until

FOUR = Cluster()


def at(seconds: float, cluster: Cluster = FOUR) -> RunSnapshot:
    return snapshot_at(cluster, seconds, 1000.0)


def kinds(seconds: float) -> list[str]:
    return [str(verdict.kind.value) for verdict in at(seconds).verdicts]  # type: ignore[attr-defined]


def test_the_script_has_a_stall_a_slow_rank_and_a_cut_link() -> None:
    assert kinds(5) == []
    assert kinds(STALL_S[0] + 10) == ["worker_frozen"]
    assert kinds(STALL_S[1] + 1) == []
    assert kinds(SLOW_S[0] + 10) == ["straggler"]
    assert kinds(CUT_S[0] + 10) == ["node_unreachable"]
    assert kinds(PERIOD_S + STALL_S[0] + 10) == ["worker_frozen"]


def test_the_stalled_rank_is_on_the_second_machine_and_the_others_wait() -> None:
    run = at(STALL_S[0] + 10)
    stalled = [rank.rank for rank in run.ranks if rank.state is RankState.STALLED]
    assert stalled == [11]
    assert run.ranks[11].node == 1
    assert sum(rank.state is RankState.WAITING for rank in run.ranks) == 31


def test_the_last_machine_is_silent_and_then_unreachable_with_its_old_values() -> None:
    assert at(CUT_S[0] + 4).nodes[3].state is NodeState.SILENT
    run = at(CUT_S[0] + 20)
    assert run.nodes[3].state is NodeState.UNREACHABLE
    assert run.nodes[3].link_age_s == 20
    assert [node.state for node in run.nodes[:3]] == [NodeState.CONNECTED] * 3
    assert run.ranks[31].global_step == run.ranks[0].global_step - 20 / STEP_S  # type: ignore[operator]
    assert run.gpus[31].sampled_at == run.gpus[0].sampled_at - 20  # type: ignore[operator]
    later = at(CUT_S[0] + 23)
    assert later.gpus[31] == run.gpus[31]
    assert later.ranks[31].recent_step_s == run.ranks[31].recent_step_s


def test_a_machine_that_is_cut_off_writes_no_lines() -> None:
    machines = SimulatedMachines(FOUR, lambda: 1000.0)
    for second in range(CUT_S[0] + 1, CUT_S[1]):
        shown = machines.poll(1000.0 + second, 0)
    ranks = {line.rank for line in shown.log}
    assert ranks & set(range(24))
    assert not ranks & set(range(24, 32))


def test_steps_never_go_back_and_rest_during_the_stall() -> None:
    steps = [steps_at(second / 4) for second in range(4 * 2 * PERIOD_S)]
    assert steps == sorted(steps)
    assert steps_at(STALL_S[0]) == steps_at(STALL_S[1])
    assert steps_at(STALL_S[1] + 10) == steps_at(STALL_S[1]) + 80


@pytest.mark.parametrize("cluster", [Cluster(1, 1), Cluster(2, 1), Cluster(26, 2), Cluster(128, 8)])
def test_every_size_of_a_cluster_has_its_ranks(cluster: Cluster) -> None:
    for second in (0, STALL_S[0] + 10, SLOW_S[0] + 10, CUT_S[0] + 10):
        run = at(second, cluster)
        assert [rank.rank for rank in run.ranks] == list(range(cluster.world_size))
        assert len({gpu.number for gpu in run.gpus}) == cluster.world_size
        frame = SimulatedMachines(cluster, lambda: 1000.0).poll(1000.0 + second, 0)
        assert MachineRows(frame, RowSelection()).rows()


def test_every_second_a_few_ranks_write_a_line_and_ended_problems_are_reported() -> None:
    machines = SimulatedMachines(FOUR, lambda: 1000.0)
    assert len(machines.poll(1000.0, 0).log) == 3
    assert len(machines.poll(1000.5, 0).log) == 3
    shown = machines.poll(1000.0 + STALL_S[0] + 10, 0)
    assert "no batch from the DataLoader" in shown.log[-1].text
    assert shown.log[-1].rank == 11
    shown = machines.poll(1000.0 + STALL_S[1] + 1, 0)
    assert [resolved.verdict.culprits for resolved in shown.resolved_verdicts] == [(11,)]


async def test_the_screen_says_that_it_is_simulated_and_controls_nothing() -> None:
    app = MachinesDemoApp(FOUR)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = app.screen_stack[0]
        assert isinstance(screen, RunScreen)
        await until(pilot, lambda: screen.frame is not None and screen.frame.snapshot.nodes)
        header = screen.query_one(RunHeader)
        assert header.view_model is not None
        assert LABEL in header.view_model.notes
        assert header.view_model.machines == "4 machines, 32 ranks"
        await pilot.press("s", "k", "p", "d")
        assert app.screen is screen
        messages = [notice.message for notice in app._notifications]
        assert len(messages) == 2, "the notice of three keys is on the screen once"
        assert all("simulated" in message for message in messages)


def test_the_script_leads_to_findings_and_events() -> None:
    now = 1000.0
    gpus = RunGpus(None, source=ScriptedGpus(lambda: now))
    ranks = tuple(
        RankSnapshot(
            rank=i,
            device=f"cuda:{i}",
            gpu_uuid=gpus.sample((), now).gpus[i].uuid,
            state=RankState.STALLED,
        )
        for i in range(GPUS)
    )
    kinds: dict[int, set[tuple[str, int]]] = {}
    events = []
    for second in range(100):
        now = 1000.0 + second
        view = gpus.sample(ranks, now)
        assert len(view.gpus) == GPUS
        assert view.note is None
        kinds[second] = {(finding.kind, finding.gpu) for finding in view.findings}
        events += [event.text for event in view.events]
    assert kinds[0] == {("foreign", 6)}
    assert {("thermal", 2), ("thermal", 3)} <= kinds[30]
    assert ("waiting", 4) in kinds[60]
    assert ("memory_full", 5) in kinds[60]
    assert ("xid", 7) in kinds[60]
    assert not {("thermal", 2), ("waiting", 4)} & kinds[90]
    assert view.gpus[7].error == "fell off the bus"
    assert [text.partition(":")[0] for text in events] == ["GPU 7 (rank 7)"] * 2
    assert gpus.stop()


def test_readings_change_once_a_second() -> None:
    now = 50.0
    source = ScriptedGpus(lambda: now)
    first = source.latest()
    now = 50.9
    assert source.latest() == first
    now = 51.0
    assert source.latest() != first
    now = 50.0 + LOST_S
    last = source.latest().readings[-1]
    assert last.error is not None
    assert last.utilisation_percent is None
    assert last.last_xid is not None
    assert last.last_xid.code == 79


def test_the_demo_loads_neither_the_driver_nor_what_reads_histories() -> None:
    program = "import sys, ltui.app.gpu_demo; print({'pynvml', 'sqlite3'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "set()"
