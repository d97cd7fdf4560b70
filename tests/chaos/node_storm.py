"""Kill processes of a run on two machines and cut their link at random, and check what holds.

A trial is one training of the quickstart preset, struck and resumed several times. Whatever does
not hold becomes the ``fault`` of the outcome; the storm then continues with another trial.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ltui.training.lifecycle.run_status import resolve_snapshot
from ltui.training.lifecycle.supervisor_client import ControlClient
from ltui.training.nodes.messages import HEAD_LOST_VARIABLE, NODE_GONE_VARIABLE
from ltui.training.problem import ProblemError
from ltui.training.state.run_snapshot import LIVE, RunSnapshot, RunState
from ltui.training.store.database_schema import StoreError
from ltui.training.store.run_directory import RunDir
from tests.chaos.invariants import check_history, verify_checkpoints
from tests.chaos.node_strikes import FATAL, HARMLESS, Strike
from tests.chaos.node_truth import (
    NOTICE_S,
    Cable,
    MachinesTruth,
    NodesObservation,
    listening_sockets,
)
from tests.chaos.process_tree import kill_together
from tests.ltui_command import LTUI, answer
from tests.nodes.run_of_machines import MachinesRun
from tests.nodes.two_machines import Machine, Machines, ltui_on, start_on
from tests.waiting import wait_for

STRIKES_OF_A_TRIAL = 8
CAUSES = {
    "shim": "shim process was killed", "engine": "launcher was killed", "rank": "rank {0}",
    "worker": "rank {0}", "everything": "machine-1",
}  # fmt: skip
"""Role -> what the reason for the end must contain if it was killed on a machine."""
PATIENCE_S = 300.0
"""Seconds until the consequences of a strike must have come to rest.

An agent whose head is dead reports for a minute, and a torn connection of torch may take as long.
"""
ENVIRONMENT = {NODE_GONE_VARIABLE: "60", HEAD_LOST_VARIABLE: "60"}
"""Silence that ends a run: longer than the longest cut, and the time that TCP then needs."""
_ALONE = ("everything", 0)
"""Strike after which nobody is left on machine 0 who could know the cause."""
_MODEL = """
import time

from ltui.training.models.digits import DigitsCNN


class SlowDigits(DigitsCNN):
    def training_step(self, batch):
        time.sleep(0.02)
        return super().training_step(batch)
"""
_SETTINGS = (
    "trainer.num_nodes=2", "trainer.devices=1", "trainer.max_epochs=100000",
    "data.init_args.loader=torch", "data.init_args.workers=1",
    "model.class_path=chaos_model.SlowDigits",
)  # fmt: skip


@dataclass
class NodesOutcome:
    """What followed from a strike."""

    strike: Strike
    killed: list[str] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    detail: str | None = None
    named_after_s: float | None = None
    seconds: float = 0.0
    fault: str | None = None


class StartCommands:
    """``ltui run`` or ``ltui resume`` on machine 0, then ``ltui join`` on machine 1."""

    def __init__(self, machines: Machines, words: list[str], run_dir: Callable[[], RunDir | None]):
        self.current: subprocess.Popen[str] | None = None
        self.codes: list[int] = []
        self.output = ""
        self._machines, self._words, self._run_dir = machines, words, run_dir
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        if self._command(self._machines[0], self._words) != 0:
            return
        run_dir = self._run_dir()
        if run_dir is not None:
            with contextlib.suppress(AssertionError):  # a killed head has no link
                self.join(run_dir)

    def join(self, run_dir: RunDir) -> int:
        link = run_dir.path / "engine" / "link.json"
        wait_for(link.exists, seconds=60)
        place = json.loads(link.read_text())
        words = ["join", f"{place['address']}:{place['port']}", "--detach"]
        return self._command(
            self._machines[1], [*words, "--key-file", str(run_dir.path / "node.key")]
        )

    def _command(self, machine: Machine, words: list[str]) -> int:
        self.current = start_on(machine, [*LTUI, *words], env=ENVIRONMENT)
        output, errors = self.current.communicate(timeout=240)
        self.output += output + errors
        self.codes.append(self.current.returncode)
        return self.current.returncode

    def kill(self) -> bool:
        """Kill the command that runs now. Return False if none does."""
        if self.current is None or self.current.poll() is not None:
            return False
        self.current.kill()
        return True

    def is_over(self) -> bool:
        return not self._thread.is_alive()


class NodeStorm:
    """Carries strikes out on two machines."""

    def __init__(self, machines: Machines, *, keep: Path | None = None) -> None:
        """``keep``: folder for the files of runs in which something did not hold."""
        self.machines, self.keep = machines, keep
        self.run: MachinesRun | None = None
        self.truth: MachinesTruth | None = None
        self.strikes_of_trial = 0
        self.trials = 0
        self.newest_step = 0
        """Step of the newest good checkpoint, from which a resume must start."""
        for machine in machines:
            (machine.folder / "chaos_model.py").write_text(_MODEL)
            machine.environment.update(ENVIRONMENT)

    # -- one strike ----------------------------------------------------------------------------

    def carry_out(self, strike: Strike) -> NodesOutcome:
        """Carry a strike out, again if nobody was there to be killed."""
        began_s = time.monotonic()
        for _ in range(5):
            outcome = NodesOutcome(strike)
            try:
                if self.strikes_of_trial >= STRIKES_OF_A_TRIAL:
                    self.end_trial()
                self.strikes_of_trial += 1
                self._strike(strike, outcome)
            except (AssertionError, ProblemError, StoreError, subprocess.TimeoutExpired) as error:
                outcome.fault = f"{type(error).__name__}: {error}"
                self._abandon(strike)
            if outcome.killed or outcome.fault:
                break
        else:
            outcome.fault = "there was nobody to be killed in five attempts"
        outcome.seconds = time.monotonic() - began_s
        return outcome

    def _strike(self, strike: Strike, outcome: NodesOutcome) -> None:
        if strike.phase == "start":
            self._strike_at_start(strike, outcome)
            return
        self._until_training()
        run, _ = self._current()
        before = run.snapshot()
        pids = {r.rank: r.pid for r in before.ranks}
        command: subprocess.Popen[str] | None = None
        if strike.phase == "pause":
            if strike.role == "command":
                command = self._begin("pause")
            else:
                self._request("pause")
                self._until(lambda s: s.state is RunState.PAUSED)
        elif strike.phase in ("checkpoint", "stop"):
            if strike.role == "command":
                command = self._begin(strike.phase)
            else:
                self._request(strike.phase)
        longest_s = {"checkpoint": 0.3, "stop": 1.0}.get(strike.phase, 2.0)
        time.sleep(strike.delay * longest_s)
        if strike.is_cut:
            outcome.killed = ["link"]
            self._cut(strike, outcome)
        elif command is not None:
            if command.poll() is None:
                command.kill()
                outcome.killed = ["command"]
            command.communicate(timeout=240)
        else:
            outcome.killed = self._kill(strike)
        steps = {r.rank: r.global_step or 0 for r in before.ranks}
        may_stay = strike.phase == "pause"
        last = self._settle(strike, outcome, {} if may_stay else steps)
        if strike.phase in ("training", "checkpoint", "pause") and (
            strike.is_cut or strike.role in HARMLESS
        ):
            assert last.is_live, f"it ended the run: {last.describe()}"
            assert pids == {r.rank: r.pid for r in last.snapshot.ranks}, "other ranks train now"
        elif strike.phase != "stop" and not last.is_live and (strike.role, strike.node) != _ALONE:
            detail, cause = last.snapshot.detail or "", CAUSES[strike.role].format(strike.node)
            assert cause in detail.split(";")[0], f"the cause is not {cause!r}: {detail}"
        if last.snapshot.state is RunState.PAUSED:
            # What the strike has left may end the run only now: a rank whose worker is dead.
            with contextlib.suppress(ProblemError):
                self._request("continue")
            self._settle(strike, outcome, {r.rank: r.global_step or 0 for r in last.snapshot.ranks})

    def _strike_at_start(self, strike: Strike, outcome: NodesOutcome) -> None:
        if self.run is not None and self.run.snapshot().state in LIVE:
            self._stop_regularly()
        commands = self._start()
        deadline_s = time.monotonic() + 90
        time.sleep(0.3 + strike.delay * (5.0 if strike.role == "command" else 12.0))
        if strike.is_cut:
            outcome.killed = ["link"]
            self.run = self.run or self._new_run()
            self._cut(strike, outcome)
        elif strike.role == "command":
            outcome.killed = ["command"] if commands.kill() else []
        else:
            while not outcome.killed and time.monotonic() < deadline_s:
                self.run = self.run or self._new_run()
                if self.run is not None:
                    self.truth = self.truth or MachinesTruth(self.run)
                    outcome.killed = self._kill(strike)
                time.sleep(0.01)
        while not commands.is_over():
            time.sleep(0.05)
        self.run = self.run or self._new_run()
        if self.run is None:
            assert commands.codes[0] != 0, f"there is no run: {commands.output}"
            outcome.detail = "no run was made, as the command said"
            for machine in self.machines:
                assert not machine.processes(), "orphans of a run that never was"
            return
        self.truth = self.truth or MachinesTruth(self.run)
        self._settle(strike, outcome, {}, commands)

    def _kill(self, strike: Strike) -> list[str]:
        _, truth = self._current()
        processes = truth.processes()[strike.node]
        if strike.role == "everything":
            victims = processes
        else:
            victims = [a for a in processes if a.role.split()[0] == strike.role]
        alive = [process for process in victims if process.alive()]
        kill_together(alive)
        return [process.role for process in alive]

    def _cut(self, strike: Strike, outcome: NodesOutcome) -> None:
        """Cut the link for a time, and check what the head says meanwhile."""
        machine = self.machines[1]
        cable = Cable(cut_s=time.monotonic())
        self.machines.cut(machine)
        verdict_after_s: float | None = None
        try:
            while (cut_for_s := cable.cut_for_s()) < strike.cut_s:
                if self.run is not None:
                    self.truth = self.truth or MachinesTruth(self.run)
                    self.truth.cable = cable
                    seen = self._observe()
                    if seen is not None and seen.verdict_names_the_cut():
                        verdict_after_s = verdict_after_s or cut_for_s
                time.sleep(0.2)
        finally:
            cable.restored_s = time.monotonic()
            self.machines.restore(machine)
        outcome.named_after_s = verdict_after_s
        if strike.phase == "training" and strike.cut_s > NOTICE_S + 1:
            assert verdict_after_s is not None, "no verdict named the cut"
            assert verdict_after_s <= NOTICE_S, f"the cut was named after {verdict_after_s:.1f} s"

    # -- what follows --------------------------------------------------------------------------

    def _observe(self) -> NodesObservation | None:
        """Read the run once. Raise if something about it is false; None if it cannot be read."""
        run, truth = self._current()
        before = truth.processes()
        try:
            snapshot = resolve_snapshot(run.run_dir)
        except (StoreError, ProblemError, OSError):
            return None
        seen = NodesObservation(snapshot, before, truth.processes())
        if (fault := seen.contradiction(truth)) is not None:
            raise AssertionError(f"{fault}: {seen.describe()}")
        return seen

    def _settle(
        self,
        strike: Strike,
        outcome: NodesOutcome,
        steps: dict[int, int],
        commands: StartCommands | None = None,
    ) -> NodesObservation:
        """Wait until the run is at rest, and check everything that must hold then."""
        run, _ = self._current()
        began_s = time.monotonic()
        rejoined = False
        rests_since_s: float | None = None
        while True:
            seen = self._observe()
            waited_s = time.monotonic() - began_s
            if seen is not None:
                state = seen.snapshot.state.value
                if not outcome.states or outcome.states[-1] != state:
                    outcome.states.append(state)
                outcome.detail = seen.snapshot.detail
                if not seen.at_rest(steps):
                    rests_since_s = None
                elif not seen.is_live or strike.is_cut or strike.role in HARMLESS:
                    break
                elif strike.phase == "start" or strike.role not in FATAL:
                    # It struck before the start, the user has joined again, or a rank does not
                    # need its worker yet.
                    rests_since_s = rests_since_s or time.monotonic()
                    if time.monotonic() - rests_since_s > NOTICE_S:
                        break
                if seen.is_live and not (seen.has(0, "supervisor") or seen.has(0, "shim")):
                    ltui_on(self.machines[0], "runs")  # any command takes it up
                lacks_agent = commands is not None and not seen.after[1]
                if seen.is_live and lacks_agent and waited_s > 5 and not rejoined:
                    # The user's own reaction: the head still waits for the machine.
                    rejoined = "waiting for node 1" in (seen.snapshot.detail or "")
                    if rejoined and commands is not None:
                        code = commands.join(run.run_dir)
                        assert code == 0, f"cannot join again: {commands.output}"
            assert waited_s < PATIENCE_S, (
                f"never at rest ({' -> '.join(outcome.states)}): "
                f"{'cannot be read' if seen is None else seen.describe()}"
            )
            time.sleep(0.2)
        self._check(seen)
        return seen

    def _check(self, seen: NodesObservation) -> None:
        run, _ = self._current()
        checkpoints = verify_checkpoints(run.run_dir)
        assert not checkpoints.broken, f"broken checkpoints: {checkpoints.broken}"
        newest = 0 if checkpoints.last is None else int(checkpoints.last["global_step"])
        assert newest >= self.newest_step, (
            f"the checkpoint of step {self.newest_step} is gone, the newest is of {newest}"
        )
        self.newest_step = newest
        check_history(run.run_dir, seen.snapshot.history_note, ranks=2, fake=False)
        if seen.is_live:
            return
        assert seen.snapshot.detail, "an end without a reason"
        for machine, run_dir in zip(self.machines, (run.run_dir, run.agent_dir()), strict=True):
            left = [p for p in machine.processes() if p.name() not in ("nsenter",)]
            assert not left, f"orphans on {machine.name}: {[p.cmdline() for p in left]}"
            assert not listening_sockets(machine.holder), f"ports are held on {machine.name}"
            if run_dir.lock_path.exists():
                handle = os.open(run_dir.lock_path, os.O_RDWR)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                finally:
                    os.close(handle)
        shown = answer(ltui_on(self.machines[0], "show", run.run_dir.id, "--json").stdout)
        assert shown["state"] == seen.snapshot.state.value, shown["state"]

    # -- bringing a run to the phase -----------------------------------------------------------

    def _current(self) -> tuple[MachinesRun, MachinesTruth]:
        assert self.run is not None
        assert self.truth is not None
        return self.run, self.truth

    def _start(self) -> StartCommands:
        """Start a new run, or resume the last one."""
        if self.run is not None and not self._can_resume():
            self.end_trial()
        self.truth = None if self.run is None else MachinesTruth(self.run)
        if self.run is not None:
            words = ["resume", self.run.run_dir.id, "--detach"]
            run_dir = self.run.run_dir
            return StartCommands(self.machines, words, lambda: run_dir)
        self.trials += 1
        chosen = [word for setting in _SETTINGS for word in ("--set", setting)]
        words = ["run", "quickstart", "--detach", "--address", self.machines[0].address, *chosen]

        def made() -> RunDir | None:
            run = self._new_run()
            return None if run is None else run.run_dir

        return StartCommands(self.machines, words, made)

    def _new_run(self) -> MachinesRun | None:
        """Return the run that a start has made, or None."""
        folder = self.machines[0].home / "runs"
        paths = [p for p in folder.glob("[!.]*") if p.is_dir()] if folder.exists() else []
        return MachinesRun(self.machines, RunDir(paths[0]), 0) if paths else None

    def _until_training(self) -> None:
        """Bring a run to where both ranks train and there is a good checkpoint."""
        if self.run is None or self.run.snapshot().state not in LIVE:
            commands = self._start()
            while not commands.is_over():
                time.sleep(0.05)
            assert commands.codes == [0, 0], f"it did not start: {commands.output}"
            self.run = self.run or self._new_run()
            assert self.run is not None
            self.truth = MachinesTruth(self.run)
            self._settle_start()
        run, _ = self._current()
        if verify_checkpoints(run.run_dir).last is None:
            self._request("checkpoint")
            self._until(lambda s: verify_checkpoints(run.run_dir).last is not None)
            self.newest_step = int((verify_checkpoints(run.run_dir).last or {})["global_step"])

    def _settle_start(self) -> None:
        run, _ = self._current()
        resumed_from = self.newest_step
        outcome = NodesOutcome(Strike(number=0, phase="start", role="nobody"))
        seen = self._settle(outcome.strike, outcome, {0: resumed_from + 2, 1: resumed_from + 2})
        assert seen.is_live, f"it ended by itself: {seen.describe()}"
        with sqlite3.connect(f"{run.run_dir.db_path.as_uri()}?mode=ro", uri=True) as store:
            query = "SELECT resumed_step FROM attempts ORDER BY attempt DESC LIMIT 1"
            (step,) = store.execute(query).fetchone()
        store.close()
        assert (step or 0) == resumed_from, f"resumed from {step}, the newest is {resumed_from}"

    def _can_resume(self) -> bool:
        assert self.run is not None
        return verify_checkpoints(self.run.run_dir).last is not None

    def _begin(self, command: str) -> subprocess.Popen[str]:
        run, _ = self._current()
        return start_on(self.machines[0], [*LTUI, command, run.run_dir.id])

    def _request(self, command: str) -> None:
        run, _ = self._current()
        ControlClient(run.run_dir).request({"cmd": command}, 10.0)

    def _until(self, wanted: Callable[[RunSnapshot], Any], seconds: float = 120) -> None:
        deadline_s = time.monotonic() + seconds
        while True:
            seen = self._observe()
            if seen is not None and wanted(seen.snapshot):
                return
            assert seen is None or seen.is_live, f"it ended by itself: {seen.describe()}"
            assert time.monotonic() < deadline_s, (
                f"never came: {'cannot be read' if seen is None else seen.describe()}"
            )
            time.sleep(0.15)

    def _stop_regularly(self) -> None:
        """Stop the run as a user does, and check that it has a checkpoint of its last step."""
        run, _ = self._current()
        done = ltui_on(self.machines[0], "stop", run.run_dir.id)
        said = f"a regular stop said: {done.stdout}{done.stderr}"
        assert "checkpoint verified" in done.stdout, said
        outcome = NodesOutcome(Strike(number=0, phase="stop", role="nobody"))
        seen = self._settle(outcome.strike, outcome, {})
        assert seen.snapshot.state is RunState.STOPPED, seen.describe()

    def end_trial(self) -> None:
        """End the current run and delete it."""
        if self.run is not None:
            if self.run.snapshot().state in LIVE:
                self._stop_regularly()
            ltui_on(self.machines[0], "delete", self.run.run_dir.id, code=0)
        self._forget()

    def _forget(self) -> None:
        for machine in self.machines:
            for name in ("runs", "nodes"):
                shutil.rmtree(machine.home / name, ignore_errors=True)
        self.run, self.truth = None, None
        self.strikes_of_trial = self.newest_step = 0

    def _abandon(self, strike: Strike) -> None:
        """Keep the files of a run in which something did not hold, and start from nothing."""
        for machine in self.machines:
            if self.keep is not None:
                for name in ("runs", "nodes"):
                    shutil.copytree(
                        machine.home / name, self.keep / f"{strike.number}-{machine.name}-{name}",
                        ignore=shutil.ignore_patterns("*.sock", "*.queue", "*.ckpt"),
                        dirs_exist_ok=True, ignore_dangling_symlinks=True,
                    ) if (machine.home / name).exists() else None  # fmt: skip
            machine.kill_all()
        self._forget()
