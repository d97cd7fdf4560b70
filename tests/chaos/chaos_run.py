"""Kill processes of runs with SIGKILL at random times, and check the invariants after each kill.

A trial is one run from its start to its end, killed and resumed on the way. Most trials have fake
ranks without torch, but real supervisors, shims, sockets, queues and checkpoint files. Some are
real trainings with two ranks. Every choice depends on one seed.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ltui.training.json_codec import to_json
from ltui.training.lifecycle.run_status import recover_run, resolve_snapshot
from ltui.training.lifecycle.supervisor_client import ControlClient
from ltui.training.problem import ProblemError
from ltui.training.state.run_snapshot import LIVE
from ltui.training.store.run_directory import RunDir, list_runs
from tests.chaos.invariants import (
    ENDED,
    Observation,
    assert_nothing_held,
    check_history,
    leftover_files,
    verify_checkpoints,
    wait_until_settled,
)
from tests.chaos.process_tree import RunProcess, kill_together, listening_ports, live_processes
from tests.cli.terminal import Terminal
from tests.ltui_command import LTUI, run_ltui
from tests.required import required
from tests.waiting import wait_for

HERE = Path(__file__).parent
FAKE_ENGINE = HERE.parent / "supervise" / "fake_engine.py"
TORCH_ENGINE = HERE / "torch_engine.py"

PHASES = ("start", "training", "checkpoint", "pause", "stop", "end")
VICTIMS = (
    "supervisor", "shim", "engine", "rank 0", "rank 1", "supervisor and shim", "everything",
    "dashboard", "command",
)  # fmt: skip
HARMLESS_VICTIMS = frozenset({"supervisor", "dashboard", "command"})
"""Victims whose death must not affect the training."""
FAKE_STEPS = 600
TORCH_STEPS = 400
_SAVE_EVERY = 20


@dataclass(frozen=True)
class KillPlan:
    number: int
    torch: bool
    phase: str
    victim: str


def plan_kills(seed: int, kills: int, torch_kills: int) -> list[KillPlan]:
    """Choose all kills in advance. Kills of torch runs are consecutive, so that trials last."""
    chance = random.Random(seed)
    deck: list[tuple[str, str]] = []
    kill_plans = []
    for number in range(kills):
        if not deck:
            # Every phase is combined with every victim once before any combination is repeated.
            deck = [(phase, v) for phase in PHASES for v in VICTIMS if _is_possible(phase, v)]
            chance.shuffle(deck)
        phase, victim = deck.pop()
        kill_plans.append(KillPlan(number + 1, number >= kills - torch_kills, phase, victim))
    return kill_plans


def _is_possible(phase: str, victim: str) -> bool:
    if victim == "dashboard":
        return phase in ("training", "pause", "stop")
    return victim != "command" or phase in ("start", "stop")


@dataclass
class Trial:
    """One run under fire."""

    torch: bool
    run: RunDir | None = None
    ended: bool = False
    """Its last attempt has ended; it can be resumed or not."""
    leftover_files: dict[str, int] = field(default_factory=dict)


@dataclass
class KillOutcome:
    plan: KillPlan
    killed: list[str]
    """Whom SIGKILL met; nobody where the moment had passed."""
    states: list[str]
    detail: str | None
    seconds: float


class ChaosRun:
    """Carries a script out in one home. Raises where something does not hold."""

    def __init__(self, home: Path, cwd: Path, seed: int, *, steps: int = FAKE_STEPS) -> None:
        """``steps``: how long a run without torch is."""
        self.steps = steps
        self.home, self.cwd = home, cwd
        self.chance = random.Random(seed ^ 0x5EED)
        self.environ = {**os.environ, "LTUI_HOME": str(home), "LTUI_CHECKPOINT_KEEP": "3"}
        self.trial: Trial | None = None
        self.trials = 0
        self.notes = 0
        self.killed: list[str] = []

    # -- commands ------------------------------------------------------------------------------

    def ltui(self, *words: str) -> subprocess.CompletedProcess[str]:
        return run_ltui(*words, cwd=self.cwd, environment=self.environ)

    def _begin(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*LTUI, *words], cwd=self.cwd, env=self.environ, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def show(self, run: RunDir) -> dict[str, Any]:
        """Return what ``ltui show --json`` prints, without starting a process."""
        for run in list_runs(self.home):
            recover_run(run)
        document: dict[str, Any] = to_json(resolve_snapshot(run))
        return document

    # -- one strike ----------------------------------------------------------------------------

    def carry_out_with_retries(self, plan: KillPlan) -> KillOutcome:
        """``carry_out``, again where nobody was left to be killed when the moment came."""
        for _ in range(10):
            outcome = self.carry_out(plan)
            if outcome.killed:
                return outcome
        raise AssertionError(f"never met anybody: {plan}")

    def carry_out(self, plan: KillPlan) -> KillOutcome:
        began = time.monotonic()
        self.killed = []
        trial = self.trial
        if trial is None or trial.torch != plan.torch:
            trial = self._new_trial(plan)
        if plan.phase == "start":
            observation, states = self._kill_at_start(trial, plan)
        else:
            observation, states = self._kill_during(trial, plan)
        if observation is not None:
            self._check_invariants(required(self.trial), observation)
        outcome = KillOutcome(
            plan,
            self.killed,
            states,
            observation.snapshot["detail"]
            if observation
            else "no run was made, as the command said",
            time.monotonic() - began,
        )
        self._say(outcome)
        return outcome

    def _say(self, outcome: KillOutcome) -> None:
        plan = outcome.plan
        trial = self.trial
        name = trial.run.id if trial and trial.run else "-"
        print(
            f"{plan.number:4} {'torch' if plan.torch else 'fake ':5} {name:14} "
            f"{plan.phase:10} {plan.victim:21} "
            f"{len(outcome.killed) or 'missed':>2} {' -> '.join(outcome.states) or '-':30} "
            f"{outcome.seconds:5.1f} s  {outcome.detail or ''}",
            flush=True,
        )

    def _kill_at_start(self, trial: Trial, plan: KillPlan) -> tuple[Observation | None, list[str]]:
        if trial.run is not None and not trial.ended:
            self._end(trial)
        if trial.run is not None and not self._can_resume(trial):
            trial = self._new_trial(plan)
        fresh = trial.run is None
        command = self._begin(*self._start_words(trial))
        victims = self._wait_for_victims(trial, plan, command)
        time.sleep(self.chance.random() * (0.4 if self.chance.random() < 0.7 else 2.0))
        if plan.victim != "command":
            self._kill(victims())
        elif command.poll() is None:
            command.kill()
            self.killed = ["command"]
        output, _ = command.communicate(timeout=240)
        trial.run = trial.run or self._run_named(self._name())
        trial.ended = False
        if trial.run is None or not trial.run.path.exists():
            assert fresh, "the run is gone"
            assert command.returncode != 0, f"there is no run, and nobody said so: {output}"
            self._wait_until_no_process(self._name())
            self._new_trial(plan)
            return None, []
        assert not fresh or command.returncode in (0, -9), f"a run is left after: {output}"
        run = trial.run
        return wait_until_settled(run, lambda: self.show(run), must_end=self._fatal)

    def _wait_until_no_process(self, name: str) -> None:
        ghost = RunDir(self.home / "runs" / name)
        for observation in (self.home / "runs").glob(f".*{name}*"):
            ghost = RunDir(observation)
        # What is left is an orphan of a run that never was.
        wait_for(lambda: live_processes(ghost), wanted=lambda left: not left, seconds=90)

    def _kill_during(self, trial: Trial, plan: KillPlan) -> tuple[Observation, list[str]]:
        trial = self._alive(trial, plan)
        run = trial.run
        assert run is not None
        dashboard = self._dashboard(run) if plan.victim == "dashboard" else None
        command: subprocess.Popen[str] | None = None
        try:
            before = self.show(run)
            if plan.phase == "pause":
                self._order(run, "pause")
                before = self._until(run, lambda s: s["state"] == "paused" or s["state"] in ENDED)
            elif plan.phase == "checkpoint":
                self._until_saving(run, plan.torch)
            elif plan.phase == "stop":
                if plan.victim == "command":
                    command = self._begin("stop", run.id)
                    self._until_stopping(run, command)
                else:
                    self._order(run, "stop")
            elif plan.phase == "end":
                goal = (TORCH_STEPS if trial.torch else self.steps) - 60
                before = self._until(
                    run, lambda s: (s["global_step"] or 0) >= goal or s["state"] in ENDED, 600
                )
            spread = {"checkpoint": 0.015, "stop": 0.15, "end": 0.6}.get(plan.phase, 0.5)
            time.sleep(self.chance.random() * spread)
            processes = live_processes(run)
            ports = listening_ports(processes)
            if plan.victim == "command":
                assert command is not None
                if command.poll() is None:
                    command.kill()
                    self.killed = ["command"]
            elif dashboard is not None:
                dashboard.process.kill()
                dashboard.process.wait()
                self.killed = ["dashboard"]
            else:
                self._kill(self._named(processes, plan.victim))
            step = before["global_step"] or 0
            observation, states = wait_until_settled(
                run, lambda: self.show(run), step, must_end=self._fatal
            )
        finally:
            if dashboard is not None:
                dashboard.close()
            if command is not None:
                command.communicate(timeout=240)
        if plan.victim in HARMLESS_VICTIMS and plan.phase in ("training", "checkpoint", "pause"):
            pids = [r["pid"] for r in before["ranks"]]
            assert observation.state in ("running", "paused", "finished"), (
                "a watcher's death ended it"
            )
            if observation.state != "finished":
                assert pids == [r["pid"] for r in observation.snapshot["ranks"]]
        if observation.state == "paused":
            self._order(run, "continue")
            self._until(run, lambda s: s["state"] == "running" or s["state"] in ENDED)
        if observation.state in ENDED:
            assert_nothing_held(run, ports)
        return observation, states

    def _kill(self, processes: list[RunProcess]) -> None:
        alive = [process for process in processes if process.alive()]
        kill_together(alive)
        self.killed = [process.role for process in alive]

    def _fatal(self) -> bool:
        """Return True if a process was killed without which the attempt cannot continue."""
        return any(role not in HARMLESS_VICTIMS for role in self.killed)

    def _order(self, run: RunDir, command: str) -> None:
        """Ask the supervisor; a run that has ended meanwhile refuses, which is no fault."""
        try:
            ControlClient(run).request({"cmd": command}, 10.0)
        except ProblemError as error:
            if resolve_snapshot(run).state in LIVE:
                raise AssertionError(f"refused while it is alive: {error}") from error

    def _named(self, processes: list[RunProcess], victim: str) -> list[RunProcess]:
        if victim == "everything":
            return processes
        wanted = ("supervisor", "shim") if victim == "supervisor and shim" else (victim,)
        return [a for a in processes if a.role in wanted]

    # -- bringing a run to the moment ----------------------------------------------------------

    def _start_words(self, trial: Trial) -> list[str]:
        if trial.run is not None:
            return ["resume", trial.run.id, "--detach"]
        engine = [sys.executable]
        if trial.torch:
            engine += [str(TORCH_ENGINE), "2", f"epochs={TORCH_STEPS // 200}"]
        else:
            engine += [
                str(FAKE_ENGINE), "2", "--steps", str(self.steps), "--save-every",
                str(_SAVE_EVERY), "--size", "1000000", "--pause", "0.01",
            ]  # fmt: skip
        return ["exec", "--name", self._name(), "--detach", "--", *engine]

    def _name(self) -> str:
        return f"life-{self.trials}"

    def _run_named(self, name: str) -> RunDir | None:
        observation = [p for p in (self.home / "runs").glob(f"{name}-*") if p.is_dir()]
        return RunDir(observation[0]) if observation else None

    def _alive(self, trial: Trial, plan: KillPlan) -> Trial:
        """The life with its run training, checkpoints at hand; another where it is over."""
        while True:
            if trial.run is not None and trial.ended and not self._can_resume(trial):
                trial = self._new_trial(plan)
            if trial.run is None or trial.ended:
                done = self.ltui(*self._start_words(trial))
                assert done.returncode == 0, f"{done.stdout}{done.stderr}"
                trial.run = trial.run or self._run_named(self._name())
                trial.ended = False
            assert trial.run is not None
            snapshot = self._until(
                trial.run,
                lambda s: (
                    s["state"] in ENDED
                    or (
                        s["state"] == "running"
                        and len(s["ranks"]) == 2
                        and all(r["global_step"] for r in s["ranks"])
                        and s["supervisor_pid"]
                    )
                ),
            )
            if snapshot["state"] in ENDED:
                trial.ended = True
                continue
            # The same step may be saved again by now, under the same name.
            stale = sorted(dict(trial.leftover_files.items() & leftover_files(trial.run).items()))
            assert not stale, f"parts of checkpoints stay behind: {stale}"
            trial.leftover_files = {}
            if trial.torch and verify_checkpoints(trial.run).last is None:
                self._save_once(trial.run)
            return trial

    def _save_once(self, run: RunDir) -> None:
        self._order(run, "checkpoint")
        self._until(run, lambda s: verify_checkpoints(run).last is not None or s["state"] in ENDED)

    def _can_resume(self, trial: Trial) -> bool:
        """Return True if the run can be resumed. If not, check that the error is one sentence."""
        assert trial.run is not None
        snapshot = self.show(trial.run)
        if snapshot["state"] != "finished" and verify_checkpoints(trial.run).last is not None:
            return True
        try:
            done = self.ltui("resume", trial.run.id, "--detach")
        finally:
            trial.ended = True
        assert done.returncode == 2, f"resumed from nothing: {done.stdout}{done.stderr}"
        return False

    def _new_trial(self, plan: KillPlan) -> Trial:
        self.finish_trial()
        self.trial = Trial(plan.torch)
        self.trials += 1
        return self.trial

    def _until(
        self, run: RunDir, wanted: Callable[[dict[str, Any]], object], seconds: float = 240
    ) -> dict[str, Any]:
        return wait_for(lambda: self.show(run), wanted=wanted, seconds=seconds, period_s=0.15)

    def _until_saving(self, run: RunDir, ask: bool) -> None:
        """Until a checkpoint is being written; gives up where the run ended before."""
        if ask:
            self._order(run, "checkpoint")
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and live_processes(run):
            if any(n.name.endswith(".part") for n in run.checkpoints_dir.iterdir()):
                return
            time.sleep(0.0005)

    def _until_stopping(self, run: RunDir, command: subprocess.Popen[str]) -> None:
        control = run.queue_dir(resolve_snapshot(run).attempt) / "control.bin"
        before_stop = control.read_bytes() if control.exists() else b""
        while command.poll() is None and (
            not control.exists() or control.read_bytes() == before_stop
        ):
            time.sleep(0.002)

    def _wait_for_victims(
        self, trial: Trial, plan: KillPlan, command: subprocess.Popen[str]
    ) -> Callable[[], list[RunProcess]]:
        """Until the victim is there, or the start is over; who it then is."""
        wanted = {"supervisor and shim": "shim", "everything": "supervisor"}.get(
            plan.victim, plan.victim
        )

        def there() -> list[RunProcess]:
            run = trial.run or self._run_named(self._name())
            return [] if run is None else self._named(live_processes(run), plan.victim)

        deadline = time.monotonic() + 60
        while wanted not in ("command", *(a.role for a in there())):
            if time.monotonic() > deadline:
                break
            time.sleep(0.005)
        return there

    def _dashboard(self, run: RunDir) -> Terminal:
        terminal = Terminal([*LTUI, "attach", run.id], self.cwd, self.environ)
        terminal.wait_for("step")
        return terminal

    # -- after it ------------------------------------------------------------------------------

    def _check_invariants(self, trial: Trial, observation: Observation) -> None:
        run = trial.run
        assert run is not None
        trial.ended = observation.state in ENDED
        note = observation.snapshot["history_note"]
        self.notes += note is not None
        check_history(run, note, ranks=2, fake=not trial.torch)
        if not trial.ended:
            return
        assert observation.snapshot["detail"], "an end without a word"
        assert_nothing_held(run, set())
        shown = self.ltui("show", run.id, "--json")
        assert shown.returncode == 0, shown.stderr
        assert f'"state": "{observation.state}"' in shown.stdout
        trial.leftover_files = leftover_files(run)
        broken = [c["path"] for c in observation.snapshot["checkpoints"] if c["ok"] is False]
        assert not verify_checkpoints(run).broken, (
            f"broken: {verify_checkpoints(run).broken}, shown broken: {broken}"
        )

    def _end(self, trial: Trial) -> None:
        assert trial.run is not None
        self._order(trial.run, "kill")
        run = trial.run
        observation, _ = wait_until_settled(run, lambda: self.show(run), must_end=lambda: True)
        self._check_invariants(trial, observation)

    def finish_trial(self) -> None:
        """End the current run and delete it."""
        if self.trial is not None and self.trial.run is not None and self.trial.run.path.exists():
            if not self.trial.ended:
                self._end(self.trial)
            done = self.ltui("delete", self.trial.run.id)
            assert done.returncode == 0, done.stderr

    def abandon(self) -> None:
        """End what a failed chaos run left behind."""
        for path in (self.home / "runs").iterdir():
            kill_together(live_processes(RunDir(path)))
