"""The script of ``ltui demo gpus`` shows every problem that it announces, at its time."""

from __future__ import annotations

import subprocess
import sys

from ltui.app.gpu_demo import GPUS, LOST_S, ScriptedGpus
from ltui.training.gpu.run_gpus import RunGpus
from ltui.training.state.run_snapshot import RankSnapshot, RankState


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
