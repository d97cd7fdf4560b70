"""A diagnosis in words and on the screen: folded, cleaned, and the same in a report."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from textual.pilot import Pilot

from ltui.app.diagnosis.diagnosis_view import DiagnosisContext, diagnosis_view_model, evidence_text
from ltui.app.diagnosis.process_rows import frame_location, in_library, stack_lines
from ltui.app.diagnosis.request_diagnosis import (
    DiagnosisResult,
    from_snapshot,
    post_mortem,
    stored_diagnoses,
)
from ltui.app.presentation.run_view import note_lines
from ltui.app.screens.diagnosis import DiagnoseScreen
from ltui.app.state_words import state_sentence
from ltui.training.diagnosis.collective_positions import collective_positions
from ltui.training.diagnosis.evidence import Diagnosis, Evidence, Frame, RankEvidence
from ltui.training.problem import Problem, ProblemError
from ltui.training.state.run_snapshot import CheckpointInfo, Limit, NodeSnapshot, RunState, Verdict
from ltui.training.store.run_directory import RunDir
from ltui.widgets.diagnosis_lines import report
from ltui.widgets.tone import Tone
from ltui.widgets.view_models import DiagnosisViewModel
from tests.app.diagnoses import CAUSE, NOW, TRAIN, collective, diverged, healthy, sampled, stalled
from tests.app.frames import frame, snapshot
from tests.app.one_run import OneRun, Script, settled, shown, until
from tests.required import required

HOSTILE = "\x1b]0;owned\x07\x1b[2J[red]fine[/red]\u202e"


def view_model_of(diagnosis: Diagnosis, **changes: Any) -> DiagnosisViewModel:
    context = DiagnosisContext(snapshot=snapshot(verdicts=diagnosis.verdicts), now=NOW)
    return diagnosis_view_model(diagnosis, replace(context, **changes))


def text_of(diagnosis: Diagnosis, width: int = 100, **changes: Any) -> str:
    return report(view_model_of(diagnosis, **changes), width).replace("\u2009", " ")


# -- words -----------------------------------------------------------------------------------------


def test_a_stall_says_who_where_and_what_to_do() -> None:
    view_model = view_model_of(stalled())
    assert view_model.headline.text == f"! STALLED for 8.2 s: {CAUSE}"
    assert view_model.headline.tone is Tone.BAD
    (verdict,) = view_model.verdicts
    facts = dict(verdict.facts)
    assert facts["who"] == "rank 2"
    assert facts["waiting"] == "ranks 0, 1, 3"
    assert facts["where"].endswith("data/augment.py:88 __call__")
    assert facts["to do"].startswith("Look at data/augment.py:88")
    assert facts["or"].replace("\u2009", " ") == (
        "Press k to kill (ltui stop --kill), then r to resume (ltui resume) from step 1000 "
        "(repeats 204 steps)"
    )
    assert dict(verdict.evidence)["no progress for"] == "8.2 s (ranks 0-3)"


def test_a_kill_without_a_checkpoint_is_not_called_harmless_and_a_duration_is_said_once() -> None:
    run = snapshot(checkpoints=(CheckpointInfo(path="x", global_step=9, ok=False),))
    (verdict,) = view_model_of(stalled(), snapshot=run).verdicts
    assert "no checkpoint" in dict(verdict.facts)["or"]
    cause = "the process of rank 2 is stopped (SIGSTOP) in backward for 14 s"
    stopped = replace(stalled(), verdicts=(replace(stalled().verdicts[0], cause=cause),))
    assert view_model_of(stopped).headline.text == f"! STALLED: {cause}"
    assert [v.title.text for v in view_model_of(stopped).verdicts] == ["STALLED"]


def test_evidence_of_an_ended_run_has_its_distance_from_the_end() -> None:
    def about(taken_at: float, **changes: Any) -> str:
        run = snapshot(taken_at=NOW, **changes)
        made = replace(healthy(), taken_at=taken_at)
        return view_model_of(made, snapshot=run, now=NOW + 660).about

    ended = {"state": RunState.STOPPED, "ended_at": NOW}
    assert about(NOW, **ended).endswith("checked when it ended")
    assert about(NOW - 40, **ended).endswith("checked 40 s before it ended")
    assert about(NOW).endswith("checked 11 m ago")


def test_several_verdicts_stand_with_the_gravest_first() -> None:
    dead = Verdict(kind="killed", level="dead", culprits=(0,), cause="rank 0 was killed", began=NOW)
    nan = Verdict(kind="nan_loss", level="warning", cause="the loss is not finite", began=NOW - 99)
    two = replace(stalled(), verdicts=(nan, *stalled().verdicts, dead))
    view_model = view_model_of(two)
    assert view_model.headline.text.startswith("! DEAD for 0 s: rank 0 was killed  (+2 more)")
    assert [v.title.text.split()[0] for v in view_model.verdicts] == ["DEAD", "STALLED", "Warning"]


def test_a_healthy_run_is_said_to_be_one_with_verdicts_that_are_over() -> None:
    over = replace(stalled().verdicts[0], ended=NOW - 1)
    view_model = view_model_of(healthy(), earlier=(over,))
    assert view_model.verdicts == ()
    assert view_model.earlier[0].startswith("STALLED for 7.2 s (rank 2): rank 2 waits")
    text = text_of(healthy())
    assert text.startswith("Healthy: ranks 0 and 1 are running")
    assert "STALLED" not in text


def test_a_run_that_failed_or_is_slowed_is_not_said_to_be_without_a_problem() -> None:
    how = "failed: python can't open the file"
    ended = {"state": RunState.FAILED, "ended_at": NOW, "log_dir": "/runs/x/logs/1"}
    run = snapshot(detail=how, **ended)
    text = text_of(replace(healthy(), headline=state_sentence(run)), snapshot=run)
    assert text.startswith(how)
    assert f"ltui logs {run.id}, in /runs/x/logs/1" in text
    run = snapshot(limit=Limit(kind="rank", rank=1, evidence=("it works longer",)))
    assert state_sentence(run).startswith("No rank stalls: all 4 ranks are running")
    notes = note_lines(frame(snapshot=run))
    text = text_of(replace(healthy(), headline=state_sentence(run)), snapshot=run, notes=notes)
    assert text.count("speed limited by rank 1, which the others wait for: it works longer") == 1
    assert "No rank stalls; what limits" in text
    assert "Healthy" not in text
    assert "No problem" not in text


SLOWEST = (*snapshot().ranks[:3], replace(snapshot().ranks[3], step_s=0.2))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "Healthy: all 4 ranks are running, 100 ms per step"),
        ({"state": RunState.PAUSED}, "the run is paused"),
        ({"state": RunState.STARTING}, "the run is starting"),
        ({"ranks": ()}, "no rank has reported"),
        ({"state": RunState.FAILED, "detail": "rank 1 raised ValueError"}, "failed: rank 1 raised"),
        ({"state": RunState.STOPPED, "detail": "stopped at step 3"}, "stopped at step 3"),
        (
            {"ranks": SLOWEST},
            "rank 3 is the slowest with 200 ms per step (the fastest: 100 ms)",
        ),
    ],
)
def test_a_run_without_a_verdict_in_a_sentence(changes: dict[str, Any], words: str) -> None:
    assert words in state_sentence(snapshot(**changes))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("budget_s", 5.0, "5.0 s"),
        ("used_bytes", 3 << 30, "3.00 GiB"),
        ("moving", False, "no"),
        ("worker", 123456, "123456"),
        ("nothing", None, ""),
        ("ranks", {"1": {"phase": "forward", "epoch": 0}}, "rank 1: phase forward, epoch 1"),
        ("reasons", {"1": "exit code 3", "0": "exit code 3"}, "ranks 0, 1: exit code 3"),
        ("still_s", {"0": 8.1, "1": 8.2, "2": 30.0}, "8.1 s to 30 s (longest rank 2)"),
        ("at", {"0": "barrier", "1": "all_reduce"}, "rank 0: barrier; rank 1: all_reduce"),
        ("collective", {"op": "all_reduce", "seq": 9, "group": "0"}, "all_reduce #9 of group 0"),
        ("thing", {"op": "all_reduce", "seq": 9}, "op all_reduce, seq 9"),
        ("frame", HOSTILE, "[red]fine[/red]"),
    ],
)
def test_evidence_in_words(name: str, value: Any, words: str) -> None:
    assert evidence_text(name, value) == words


def test_nothing_that_a_run_wrote_reaches_the_terminal_as_it_is() -> None:
    evil = Frame(file=f"/home/{HOSTILE}.py", line=1, function=HOSTILE)
    rank = RankEvidence(
        rank=0, phase=HOSTILE, barrier=HOSTILE, alive=False, how_ended=HOSTILE,
        exception={"type": HOSTILE, "message": HOSTILE, "traceback": HOSTILE},
        log_tail=(HOSTILE,), missing=(HOSTILE,), last_enqueued={"0": 1},
        collectives=(replace(collective(1, op=HOSTILE), call_site=evil, group=HOSTILE),),
    )  # fmt: skip
    verdict = Verdict(
        kind=HOSTILE, level="stalled", cause=HOSTILE, place=HOSTILE, remedy=HOSTILE,
        culprits=(0,), evidence={HOSTILE: HOSTILE, "x": {HOSTILE: [HOSTILE]}},
    )  # fmt: skip
    base = stalled(2, culprit=0)
    stacks = tuple(replace(g, who=(HOSTILE,), frames=(evil,)) for g in base.stacks)
    made = replace(
        base, headline=HOSTILE, verdicts=(verdict,), stacks=stacks, missing=(HOSTILE,),
        evidence=Evidence(taken_at=NOW, taken_ns=1, ranks={0: rank}, missing=(HOSTILE,)),
    )  # fmt: skip
    for full_paths in (True, False):
        text = text_of(made, full_paths=full_paths, earlier=(replace(verdict, ended=NOW),))
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202e]", text)
        assert "fine" in text


# -- folding ---------------------------------------------------------------------------------------


def test_256_ranks_are_folded() -> None:
    text = text_of(stalled(256, culprit=17))
    assert len(text.splitlines()) < 60
    assert "ranks 0-16, 18-255 alike" in text
    assert "! rank 17" in text
    assert "×255" in text


def test_256_ranks_that_all_do_otherwise_are_counted_not_listed() -> None:
    base = stalled(256, culprit=17)
    evidence = required(base.evidence)
    ranks = {
        n: replace(r, phase=f"phase {n}", collectives=(collective(9, retired=False, op=f"op{n}"),))
        for n, r in evidence.ranks.items()
    }
    stacks = tuple(replace(base.stacks[0], who=(f"rank {n}",), ranks=(n,)) for n in range(256))
    wild = replace(base, wavefront=(), stacks=stacks, evidence=replace(evidence, ranks=ranks))
    text = text_of(wild)
    assert len(text.splitlines()) < 130
    assert "more ranks differ" in text
    assert "244 more are in the report" in text


def test_library_calls_are_folded_and_own_ones_marked() -> None:
    torch = "/v/site-packages/torch"
    calls = [Frame(file=f"{torch}/f{n}.py", line=n, function="g") for n in range(1, 7)]
    lines = stack_lines((TRAIN, *calls))
    assert [line.text for line in lines] == [
        "▸ vision/train.py:61 training_step",
        "  torch/f1.py:1 g",
        "  … 5 calls in torch",
    ]
    assert lines[0].tone is Tone.ACCENT


@pytest.mark.parametrize(
    ("path", "inside"),
    [
        ("/venv/lib/python3.11/site-packages/torch/x.py", "torch/x.py"),
        ("/usr/lib/python3.11/threading.py", "threading.py"),
        ("/usr/lib/python3/dist-packages/numpy/a.py", "numpy/a.py"),
        ("/share/ltui/rank-side/ab12/ltui/training/rank/x.py", "ltui/training/rank/x.py"),
        ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap>"),
        ("/home/me/lib/train.py", None),
        ("train.py", None),
    ],
)  # fmt: skip
def test_what_is_a_library(path: str, inside: str | None) -> None:
    assert in_library(path) == inside


def test_a_report_gives_whole_paths_of_own_code() -> None:
    assert frame_location(TRAIN) == "vision/train.py:61 training_step"
    assert frame_location(TRAIN, full_paths=True) == "/home/me/vision/train.py:61 training_step"


# -- the wavefront ---------------------------------------------------------------------------------


def test_the_wavefront_shows_who_is_not_there() -> None:
    (front,) = view_model_of(stalled()).collectives
    assert [c.text for c in front.columns] == ["! rank 2", "  ranks 0, 1, 3"]
    last = front.rows[-1]
    assert (last.number, last.note) == ("#1043", "unfinished on some ranks")
    assert [c.text for c in last.cells] == [
        "never reached it (last: #1042)",
        "all_reduce [1000x512] waiting",
    ]
    assert not any(cell.differs for row in front.rows for cell in row.cells)


def test_the_first_difference_is_marked_though_it_was_finished() -> None:
    (front,) = view_model_of(diverged()).collectives
    first, second = front.rows
    assert (first.number, first.note) == ("#4", "first difference: the problem starts here")
    assert [(c.site, c.differs) for c in first.cells] == [
        ("vision/train.py:5 save_checkpoint", True),
        ("vision/train.py:6 finalize", False),
    ]
    assert second.note == "unfinished on some ranks"


def test_processes_of_several_machines_are_named_with_their_machine() -> None:
    diagnosis = stalled()
    evidence = required(diagnosis.evidence)
    ranks = {r: replace(e, node=r // 2) for r, e in evidence.ranks.items()}
    hosts = {n: replace(evidence.host, host="ab"[n], cores=8 * (n + 1)) for n in range(2)}
    nodes = tuple(NodeSnapshot(node=n, name="ab"[n], ranks=(2 * n, 2 * n + 1)) for n in range(2))
    there = replace(diagnosis, evidence=replace(evidence, ranks=ranks, hosts=hosts))
    run = snapshot(verdicts=diagnosis.verdicts, nodes=nodes)
    view_model = view_model_of(there, snapshot=run)
    names = [row.owner.strip() for row in view_model.processes]
    assert names[0] == "! rank 2 on b"
    assert "… rank 0 on a" in names
    (line,) = view_model.machine
    assert line.startswith("machine b: 16 cores")


def test_call_sites_that_only_some_ranks_gave_are_no_difference() -> None:
    evidence = required(stalled().evidence)
    ranks = dict(evidence.ranks)
    bare = tuple(replace(c, call_site=None) for c in ranks[3].collectives)
    ranks[3] = replace(ranks[3], collectives=bare)
    made = replace(stalled(), evidence=replace(evidence, ranks=ranks))
    (front,) = view_model_of(made).collectives
    assert not any("difference" in row.note for row in front.rows)


def test_two_ranks_that_differ_are_both_marked() -> None:
    ranks = {
        n: RankEvidence(rank=n, last_enqueued={"0": 7}, collectives=(
            replace(collective(7, retired=False), op=op),)) for n, op in enumerate(("a", "b"))
    }  # fmt: skip
    evidence = Evidence(taken_at=NOW, taken_ns=1, ranks=ranks)
    made = replace(stalled(2), wavefront=(), evidence=evidence)
    (front,) = view_model_of(made).collectives
    assert [cell.differs for cell in front.rows[0].cells] == [True, True]


def test_a_rank_that_never_used_a_group_is_not_there_and_nothing_came_before() -> None:
    wait = replace(collective(1, retired=False), group="tp")
    ranks = {
        0: RankEvidence(rank=0, last_enqueued={"tp": 1}, collectives=(wait,)),
        1: RankEvidence(rank=1, groups={"tp": (0, 1)}),
    }
    evidence = Evidence(taken_at=NOW, taken_ns=1, ranks=ranks)
    made = replace(stalled(2), wavefront=collective_positions(ranks), evidence=evidence)
    (front,) = view_model_of(made).collectives
    (row,) = front.rows
    assert row.number == "#1"
    assert "never reached it (none yet)" in [cell.text for cell in row.cells]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 160])
def test_every_line_fits(width: int) -> None:
    for made in (stalled(), stalled(256, 17), diverged(), healthy()):
        assert max(len(line) for line in text_of(made, width).splitlines()) <= width


# -- where it comes from ---------------------------------------------------------------------------


def test_a_post_mortem_tells_each_verdict_once_and_keeps_the_last_evidence() -> None:
    run = snapshot(state=RunState.CRASHED, detail="rank 1 was killed by SIGKILL at step 7")
    stall = replace(stalled().verdicts[0], ended=NOW)
    dead = Verdict(kind="killed", level="dead", culprits=(1,), cause="rank 1 was killed", began=NOW)
    ended = replace(run, verdicts=(dead,))
    made = post_mortem(ended, [stall, replace(dead, ended=NOW + 1)], [healthy(), stalled()])
    assert made.headline == "crashed: rank 1 was killed by SIGKILL at step 7"
    assert [v.kind for v in made.verdicts] == ["killed", "worker_frozen"]
    assert made.stacks == stalled().stacks
    text = text_of(made, snapshot=ended)
    assert text.startswith("! crashed: rank 1 was killed by SIGKILL at step 7")
    assert "k kills" not in text
    nothing = post_mortem(ended, [], [])
    never_started = replace(ended, ended_at=None, taken_at=None)
    for diagnosis in (post_mortem(never_started, [], []), from_snapshot(never_started)):
        assert diagnosis.taken_at > 1e9, "now, and not in 1970"
    assert nothing.evidence is None
    text = text_of(nothing, snapshot=ended)
    assert "-- processes" not in text
    assert "missing evidence" not in text


def test_what_was_kept_is_read_and_damaged_files_are_passed_over(tmp_path: Path) -> None:
    folder = tmp_path / "evidence" / "2"
    folder.mkdir(parents=True)
    for number, made in ((1, healthy()), (3, stalled())):
        (folder / f"{number:03d}.json").write_text(json.dumps(made.to_document()))
    (folder / "002.json").write_text('{"run": "torn')
    (folder / "rank-00001.json").write_text("{}")
    found = stored_diagnoses(RunDir(tmp_path), 2)
    assert [d.headline for d in found] == [healthy().headline, stalled().headline]
    assert stored_diagnoses(RunDir(tmp_path), 1) == []


def test_samples_are_shown_with_two_sides_and_their_age() -> None:
    made = sampled()
    lines = text_of(made).partition("-- samples of stacks")[2].partition("\n-- ")[0].splitlines()
    assert lines[1:] == [
        "rank 1 waits 9.5 s of 10 s for its DataLoader workers, rank 0 0.1 s",
        "sampled for 10 s, 12 s ago",
        "   rank 1     rank 0",
        "    9.5 s      0.1 s  train.py:90 in main > select",
        "    0.4 s      9.8 s  train.py:61 in training_step",
        "   rank 1     rank 0  their workers, on average",
        "    9.6 s      0.0 s  augment.py:88 in __call__",
    ]
    assert "rank 0: a worker was not sampled: it did not answer" in text_of(made)
    ended = snapshot(verdicts=made.verdicts, state=RunState.FAILED, ended_at=NOW + 30)
    assert "sampled for 10 s, 42 s before it ended" in text_of(made, snapshot=ended)

    alone = replace(required(made.samples), normal=None, workers=())
    alone = replace(alone, rows=(replace(alone.rows[0], where=HOSTILE, normal_s=None),))
    text = text_of(replace(made, samples=alone))
    assert "\n   rank 1\n    9.5 s  [red]fine[/red]\n" in text
    assert "\x1b" not in text


def test_the_snapshot_alone_gives_verdicts_and_says_what_is_missing() -> None:
    run = snapshot(verdicts=stalled().verdicts)
    made = from_snapshot(run, missing=("the supervisor gave no evidence: it hangs",))
    assert made.headline == CAUSE
    text = text_of(made, snapshot=run)
    assert "the supervisor gave no evidence: it hangs" in text


# -- the screen ------------------------------------------------------------------------------------


class Opened:
    """The app with a diagnosis open over a run's screen."""

    def __init__(self, diagnosis: Diagnosis, folder: Path | None = None) -> None:
        self.diagnosis = diagnosis
        self.run = snapshot(verdicts=diagnosis.verdicts)
        self.app = OneRun(Script(frame(snapshot=self.run)))
        self.asked = 0
        self.sampled = 0
        self.problem: ProblemError | None = None
        self.folder = folder

    def find(self, run_dir: RunDir, *, sample: bool = False) -> DiagnosisResult:
        self.asked += 1
        self.sampled += sample
        if self.problem is not None:
            raise self.problem
        return DiagnosisResult(self.diagnosis, self.run, ())

    async def open(self, pilot: Pilot[Any]) -> DiagnoseScreen:
        under = await shown(pilot, self.app)
        run_dir = under.run_dir if self.folder is None else RunDir(self.folder)
        screen = DiagnoseScreen(run_dir, lambda: under.frame, find=self.find, folder=self.folder)
        self.app.push_screen(screen)
        await until(pilot, lambda: screen.is_mounted and not screen._requesting)
        await pilot.pause()
        return screen


@pytest.mark.parametrize(
    ("made", "size", "keys"),
    [
        (stalled(), (160, 50), ()),
        (stalled(), (80, 24), ()),
        (diverged(), (80, 24), ("2",)),
        (sampled(), (80, 24), ("3",)),
    ],
    ids=["160", "80", "mismatch", "samples"],
)
def test_a_diagnosis(
    snap_compare: Callable[..., bool], made: Diagnosis, size: tuple[int, int], keys: Sequence[str]
) -> None:
    opened = Opened(made)

    async def drawn(pilot: Pilot[Any]) -> None:
        await opened.open(pilot)
        await pilot.press(*keys)
        await settled(pilot)

    assert snap_compare(opened.app, terminal_size=size, run_before=drawn)


async def test_keys_alone_reach_every_panel() -> None:
    opened = Opened(stalled())
    async with opened.app.run_test(size=(80, 24)) as pilot:
        screen = await opened.open(pilot)
        names = ("verdict", "collectives", "stacks", "processes")
        for key, name in zip("1234", names, strict=True):
            await pilot.press(key)
            await pilot.pause()
            seen = [p.id for p in screen.query("Panel") if p.display]
            assert seen == [name]
            assert required(screen.focused).id == f"{name}-scroll"
        await pilot.resize_terminal(160, 50)
        await pilot.pause()
        assert all(panel.display for panel in screen.query("Panel"))
        await pilot.press("z")
        assert [p.id for p in screen.query("Panel") if p.display] == ["processes"]
        await pilot.press("escape")
        assert opened.app.screen is screen
        await pilot.press("q")
        await until(pilot, lambda: opened.app.screen is not screen)


async def test_the_report_is_copied_and_written(tmp_path: Path) -> None:
    opened = Opened(stalled(), tmp_path)
    async with opened.app.run_test(size=(80, 24)) as pilot:
        await opened.open(pilot)
        await pilot.press("y")
        await until(pilot, lambda: (tmp_path / "diagnosis.txt").exists())
        copied = opened.app.clipboard
        assert copied == (tmp_path / "diagnosis.txt").read_text()
        assert "/home/me/vision/data/augment.py:88 __call__" in copied
        await pilot.press("w")
        await until(pilot, lambda: any(tmp_path.glob("ltui-*-diagnosis-*.txt")))
        (written,) = tmp_path.glob("ltui-*-diagnosis-*.txt")
        assert written.read_text() == copied
        assert written.stat().st_mode & 0o777 == 0o600


async def test_ranks_are_sampled_by_a_key_while_the_run_lives() -> None:
    opened = Opened(sampled())
    async with opened.app.run_test(size=(160, 50)) as pilot:
        screen = await opened.open(pilot)
        await pilot.press("f")
        await until(pilot, lambda: opened.sampled == 1 and not screen._requesting)
        await pilot.press("a")
        await until(pilot, lambda: opened.asked == 3 and not screen._requesting)
        opened.run = replace(opened.run, state=RunState.FAILED, detail="rank 2 was killed")
        opened.app.script.frame = frame(snapshot=opened.run)
        await until(pilot, lambda: opened.asked == 4 and not screen._requesting)
        await pilot.press("f")
        await pilot.pause()
    assert (opened.sampled, opened.asked) == (1, 4)


async def test_a_run_that_cannot_be_asked_still_shows_its_verdict() -> None:
    opened = Opened(stalled())
    opened.problem = ProblemError(Problem(where="brave-owl", what="its supervisor hangs."))
    async with opened.app.run_test(size=(160, 50)) as pilot:
        screen = await opened.open(pilot)
        view_model = required(screen.view_model())
        assert CAUSE in view_model.headline.text
        assert "its supervisor hangs" in view_model.about
        opened.problem = None
        await pilot.press("a")
        await until(pilot, lambda: screen.result is not None)
        assert opened.asked == 2
        # It is asked for anew when the run ends.
        opened.run = replace(opened.run, state=RunState.FAILED, detail="rank 2 was killed")
        opened.app.script.frame = frame(snapshot=opened.run)
        await until(pilot, lambda: opened.asked == 3)
        await until(pilot, lambda: not screen._requesting)
