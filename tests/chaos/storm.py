"""SIGKILL to anything at any moment, again and again, and everything looked at after each.

A *life* is one run from its start to its end, killed and resumed on the way. Most lives have ranks
without torch (real supervisors, keepers, sockets, queues and checkpoint files); some are real
two-rank trainings. Every choice comes from one seed.
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

from ltui.training.lifecycle.recover_runs import recover_abandoned_runs
from ltui.training.lifecycle.run_status import resolve_snapshot
from ltui.training.lifecycle.supervisor_client import ControlClient
from ltui.training.problem import ProblemError
from ltui.training.state.run_snapshot import LIVE, to_json
from ltui.training.store.run_directory import RunDir
from tests.chaos.audit import (
    ENDED,
    FalseStateError,
    Look,
    history_holds,
    kept,
    litter,
    nothing_held,
    settle,
)
from tests.chaos.cast import Actor, cast, kill_together, listening_ports
from tests.cli.terminal import Terminal

HERE = Path(__file__).parent
FAKE_ENGINE = HERE.parent / "supervise" / "fake_engine.py"
TORCH_ENGINE = HERE / "torch_engine.py"

MOMENTS = ("start", "training", "checkpoint", "pause", "stop", "end")
VICTIMS = (
    "supervisor", "keeper", "engine", "rank 0", "rank 1", "supervisor and keeper", "everything",
    "dashboard", "command",
)  # fmt: skip
WITNESSES = frozenset({"supervisor", "dashboard", "command"})
"""Whose death must leave the training alone."""
FAKE_STEPS = 600
TORCH_STEPS = 400
_SAVE_EVERY = 20


@dataclass(frozen=True)
class Strike:
    number: int
    torch: bool
    moment: str
    victim: str


def script(seed: int, kills: int, torch_kills: int) -> list[Strike]:
    """What happens, decided beforehand. Kills of torch runs stand together, so that lives last."""
    chance = random.Random(seed)
    deck: list[tuple[str, str]] = []
    strikes = []
    for number in range(kills):
        if not deck:
            # Every moment meets every victim before any meets twice.
            deck = [(m, v) for m in MOMENTS for v in VICTIMS if _can_meet(m, v)]
            chance.shuffle(deck)
        moment, victim = deck.pop()
        strikes.append(Strike(number + 1, number >= kills - torch_kills, moment, victim))
    return strikes


def _can_meet(moment: str, victim: str) -> bool:
    if victim == "dashboard":
        return moment in ("training", "pause", "stop")
    return victim != "command" or moment in ("start", "stop")


@dataclass
class Life:
    """One run under fire."""

    torch: bool
    run: RunDir | None = None
    resumes: int = 0
    ended: bool = False
    """Its last attempt has ended; it can be resumed or not."""
    litter: dict[str, int] = field(default_factory=dict)


@dataclass
class Outcome:
    strike: Strike
    killed: list[str]
    """Whom SIGKILL met; nobody where the moment had passed."""
    states: list[str]
    detail: str | None
    seconds: float


class Storm:
    """Carries a script out in one home. Raises where something does not hold."""

    def __init__(
        self,
        home: Path,
        cwd: Path,
        seed: int,
        *,
        say: Callable[[str], None] = print,
        name: str = "life",
        steps: int = FAKE_STEPS,
    ) -> None:
        """``steps``: how long a run without torch is."""
        self.steps = steps
        self.home, self.cwd, self.say, self.name = home, cwd, say, name
        self.chance = random.Random(seed ^ 0x5EED)
        self.environ = {**os.environ, "LTUI_HOME": str(home), "LTUI_CHECKPOINT_KEEP": "3"}
        self.life: Life | None = None
        self.lives = 0
        self.notes = 0
        self.killed: list[str] = []

    # -- commands ------------------------------------------------------------------------------

    def ltui(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self._argv(*words), cwd=self.cwd, env=self.environ, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip

    def _begin(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self._argv(*words), cwd=self.cwd, env=self.environ, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def _argv(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "ltui.app.cli", *words]

    def show(self, run: RunDir) -> dict[str, Any]:
        """What ``ltui show --json`` does, without the half second that a new process takes."""
        recover_abandoned_runs(self.home)
        document: dict[str, Any] = to_json(resolve_snapshot(run))
        return document

    # -- one strike ----------------------------------------------------------------------------

    def until_met(self, strike: Strike) -> Outcome:
        """``carry_out``, again where nobody was left to be killed when the moment came."""
        for _ in range(10):
            outcome = self.carry_out(strike)
            if outcome.killed:
                return outcome
        raise AssertionError(f"never met anybody: {strike}")

    def carry_out(self, strike: Strike) -> Outcome:
        began = time.monotonic()
        self.killed = []
        if self.life is None or self.life.torch != strike.torch:
            self._finish_life()
            self.life = Life(strike.torch)
            self.lives += 1
        if strike.moment == "start":
            found, states = self._strike_at_start(self.life, strike)
        else:
            found, states = self._strike_within(self.life, strike)
        if found is not None:
            self._audit(self.life, found)
        outcome = Outcome(
            strike,
            self.killed,
            states,
            found.snapshot["detail"] if found else "no run was made, as the command said",
            time.monotonic() - began,
        )
        self._say(outcome)
        return outcome

    def _say(self, outcome: Outcome) -> None:
        strike = outcome.strike
        life = self.life
        name = life.run.id if life and life.run else "-"
        self.say(
            f"{strike.number:4} {'torch' if strike.torch else 'fake ':5} {name:14} "
            f"{strike.moment:10} {strike.victim:21} "
            f"{len(outcome.killed) or 'missed':>2} {' -> '.join(outcome.states) or '-':30} "
            f"{outcome.seconds:5.1f} s  {outcome.detail or ''}"
        )

    def _strike_at_start(self, life: Life, strike: Strike) -> tuple[Look | None, list[str]]:
        if life.run is not None and not life.ended:
            self._end(life)
        if life.run is not None and not self._can_resume(life):
            life = self._new_life(strike)
        fresh = life.run is None
        command = self._begin(*self._start_words(life))
        victims = self._wait_for_victims(life, strike, command)
        time.sleep(self.chance.random() * (0.4 if self.chance.random() < 0.7 else 2.0))
        if strike.victim != "command":
            self._kill(victims())
        elif command.poll() is None:
            command.kill()
            self.killed = ["command"]
        said, _ = command.communicate(timeout=240)
        life.run = life.run or self._run_named(self._name())
        self._let_it_happen(life)
        if life.run is None or not life.run.path.exists():
            assert fresh, "the run is gone"
            assert command.returncode != 0, f"there is no run, and nobody said so: {said}"
            self._nobody_of(self._name())
            self._new_life(strike)
            return None, []
        assert not fresh or command.returncode in (0, -9), f"a run is left after: {said}"
        run = life.run
        return settle(run, lambda: self.show(run), must_end=self._fatal)

    def _let_it_happen(self, life: Life) -> None:
        life.resumes += 1
        life.ended = False

    def _nobody_of(self, name: str) -> None:
        ghost = RunDir(self.home / "runs" / name)
        for found in (self.home / "runs").glob(f".*{name}*"):
            ghost = RunDir(found)
        deadline = time.monotonic() + 90
        while left := cast(ghost):
            assert time.monotonic() < deadline, f"orphans of a run that never was: {left}"
            time.sleep(0.05)

    def _strike_within(self, life: Life, strike: Strike) -> tuple[Look, list[str]]:
        life = self._alive(life, strike)
        run = life.run
        assert run is not None
        dashboard = self._dashboard(run) if strike.victim == "dashboard" else None
        command: subprocess.Popen[str] | None = None
        try:
            before = self.show(run)
            if strike.moment == "pause":
                self._order(run, "pause")
                before = self._until(run, lambda s: s["state"] == "paused" or s["state"] in ENDED)
            elif strike.moment == "checkpoint":
                self._until_saving(run, strike.torch)
            elif strike.moment == "stop":
                if strike.victim == "command":
                    command = self._begin("stop", run.id)
                    self._until_stopping(run, command)
                else:
                    self._order(run, "stop")
            elif strike.moment == "end":
                goal = (TORCH_STEPS if life.torch else self.steps) - 60
                before = self._until(
                    run, lambda s: (s["global_step"] or 0) >= goal or s["state"] in ENDED, 600
                )
            spread = {"checkpoint": 0.015, "stop": 0.15, "end": 0.6}.get(strike.moment, 0.5)
            time.sleep(self.chance.random() * spread)
            actors = cast(run)
            ports = listening_ports(actors)
            if strike.victim == "command":
                assert command is not None
                if command.poll() is None:
                    command.kill()
                    self.killed = ["command"]
            elif dashboard is not None:
                dashboard.process.kill()
                dashboard.process.wait()
                self.killed = ["dashboard"]
            else:
                self._kill(self._named(actors, strike.victim))
            step = before["global_step"] or 0
            found, states = settle(run, lambda: self.show(run), step, must_end=self._fatal)
        finally:
            if dashboard is not None:
                dashboard.close()
            if command is not None:
                command.communicate(timeout=240)
        if strike.victim in WITNESSES and strike.moment in ("training", "checkpoint", "pause"):
            pids = [r["pid"] for r in before["ranks"]]
            assert found.state in ("running", "paused", "finished"), "a watcher's death ended it"
            if found.state != "finished":
                assert pids == [r["pid"] for r in found.snapshot["ranks"]]
        if found.state == "paused":
            self._order(run, "continue")
            self._until(run, lambda s: s["state"] == "running" or s["state"] in ENDED)
        if found.state in ENDED:
            nothing_held(run, ports)
        return found, states

    def _kill(self, actors: list[Actor]) -> None:
        alive = [actor for actor in actors if actor.alive()]
        kill_together(alive)
        self.killed = [actor.role for actor in alive]

    def _fatal(self) -> bool:
        """Whether somebody was killed without whom no attempt goes on."""
        return any(role not in WITNESSES for role in self.killed)

    def _order(self, run: RunDir, command: str) -> None:
        """Ask the supervisor; a run that has ended meanwhile refuses, which is no fault."""
        try:
            ControlClient(run).request({"cmd": command}, 10.0)
        except ProblemError as error:
            if resolve_snapshot(run).state in LIVE:
                raise AssertionError(f"refused while it lives: {error}") from error

    def _named(self, actors: list[Actor], victim: str) -> list[Actor]:
        if victim == "everything":
            return actors
        wanted = ("supervisor", "keeper") if victim == "supervisor and keeper" else (victim,)
        return [a for a in actors if a.role in wanted]

    # -- bringing a run to the moment ----------------------------------------------------------

    def _start_words(self, life: Life) -> list[str]:
        if life.run is not None:
            return ["resume", life.run.id, "--detach"]
        engine = [sys.executable]
        if life.torch:
            engine += [str(TORCH_ENGINE), "2", f"epochs={TORCH_STEPS // 200}"]
        else:
            engine += [
                str(FAKE_ENGINE), "2", "--steps", str(self.steps), "--save-every",
                str(_SAVE_EVERY), "--size", "1000000", "--pause", "0.01",
            ]  # fmt: skip
        return ["exec", "--name", self._name(), "--detach", "--", *engine]

    def _name(self) -> str:
        return f"{self.name}-{self.lives}"

    def _run_named(self, name: str) -> RunDir | None:
        found = [p for p in (self.home / "runs").glob(f"{name}-*") if p.is_dir()]
        return RunDir(found[0]) if found else None

    def _alive(self, life: Life, strike: Strike) -> Life:
        """The life with its run training, checkpoints at hand; another where it is over."""
        while True:
            if life.run is not None and life.ended and not self._can_resume(life):
                life = self._new_life(strike)
            if life.run is None or life.ended:
                done = self.ltui(*self._start_words(life))
                assert done.returncode == 0, f"{done.stdout}{done.stderr}"
                life.run = life.run or self._run_named(self._name())
                self._let_it_happen(life)
            assert life.run is not None
            snapshot = self._until(
                life.run,
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
                life.ended = True
                continue
            # The same step may be saved again by now, under the same name.
            stale = sorted(dict(life.litter.items() & litter(life.run).items()))
            assert not stale, f"parts of checkpoints stay behind: {stale}"
            life.litter = {}
            if life.torch and kept(life.run).last is None:
                self._save_once(life.run)
            return life

    def _save_once(self, run: RunDir) -> None:
        self._order(run, "checkpoint")
        self._until(run, lambda s: kept(run).last is not None or s["state"] in ENDED)

    def _can_resume(self, life: Life) -> bool:
        """Whether the run can be resumed; where not, that it says so in a sentence."""
        assert life.run is not None
        snapshot = self.show(life.run)
        if snapshot["state"] != "finished" and kept(life.run).last is not None:
            return True
        try:
            done = self.ltui("resume", life.run.id, "--detach")
        finally:
            life.ended = True
        assert done.returncode == 2, f"resumed from nothing: {done.stdout}{done.stderr}"
        return False

    def _new_life(self, strike: Strike) -> Life:
        self._finish_life()
        self.life = Life(strike.torch)
        self.lives += 1
        return self.life

    def _until(
        self, run: RunDir, wanted: Callable[[dict[str, Any]], object], seconds: float = 240
    ) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while True:
            snapshot = self.show(run)
            if wanted(snapshot):
                return snapshot
            if time.monotonic() > deadline:
                raise FalseStateError(f"never came: {snapshot}")
            time.sleep(0.15)

    def _until_saving(self, run: RunDir, ask: bool) -> None:
        """Until a checkpoint is being written; gives up where the run ended before."""
        if ask:
            self._order(run, "checkpoint")
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            if any(n.name.endswith(".part") for n in run.checkpoints_dir.iterdir()):
                return
            if not cast(run):
                return
            time.sleep(0.0005)

    def _until_stopping(self, run: RunDir, command: subprocess.Popen[str]) -> None:
        control = run.queue_dir(resolve_snapshot(run).attempt) / "control.bin"
        known = control.read_bytes() if control.exists() else b""
        while command.poll() is None and (not control.exists() or control.read_bytes() == known):
            time.sleep(0.002)

    def _wait_for_victims(
        self, life: Life, strike: Strike, command: subprocess.Popen[str]
    ) -> Callable[[], list[Actor]]:
        """Until the victim is there, or the start is over; who it then is."""
        wanted = {"supervisor and keeper": "keeper", "everything": "supervisor"}.get(
            strike.victim, strike.victim
        )

        def there() -> list[Actor]:
            run = life.run or self._run_named(self._name())
            return [] if run is None else self._named(cast(run), strike.victim)

        deadline = time.monotonic() + 60
        while wanted not in ("command", *(a.role for a in there())):
            if time.monotonic() > deadline:
                break
            time.sleep(0.005)
        return there

    def _dashboard(self, run: RunDir) -> Terminal:
        terminal = Terminal(self._argv("attach", run.id), self.cwd, self.environ)
        terminal.wait_for("step")
        return terminal

    # -- after it ------------------------------------------------------------------------------

    def _audit(self, life: Life, found: Look) -> None:
        run = life.run
        assert run is not None
        life.ended = found.state in ENDED
        note = found.snapshot["history_note"]
        self.notes += note is not None
        history_holds(run, note, ranks=2, fake=not life.torch)
        if not life.ended:
            return
        assert found.snapshot["detail"], "an end without a word"
        nothing_held(run, set())
        shown = self.ltui("show", run.id, "--json")
        assert shown.returncode == 0, shown.stderr
        assert f'"state": "{found.state}"' in shown.stdout
        life.litter = litter(run)
        broken = [c["path"] for c in found.snapshot["checkpoints"] if c["ok"] is False]
        assert not kept(run).broken, f"broken: {kept(run).broken}, shown broken: {broken}"

    def _end(self, life: Life) -> None:
        assert life.run is not None
        self._order(life.run, "kill")
        run = life.run
        found, _ = settle(run, lambda: self.show(run), must_end=lambda: True)
        self._audit(life, found)

    def _finish_life(self) -> None:
        if self.life is not None and self.life.run is not None and self.life.run.path.exists():
            if not self.life.ended:
                self._end(self.life)
            done = self.ltui("delete", self.life.run.id)
            assert done.returncode == 0, done.stderr

    def abandon(self) -> None:
        """End what a failed storm left."""
        for path in (self.home / "runs").iterdir():
            kill_together(cast(RunDir(path)))

    def close(self) -> None:
        """The last life's end."""
        self._finish_life()
