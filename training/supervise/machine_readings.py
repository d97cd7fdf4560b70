"""Sample the processes and GPUs of a run once a second.

Used by the supervisor's loop only. Nothing here blocks: a driver call that hangs is reported as a
reading.

Inspect the processes of a run whose ranks send no telemetry yet, or never will. Reads ``/proc``,
and the empty files by which a process says that it has imported a library
(``training/rank/program/attach.py``). A program that uses PyTorch sends no telemetry before
Lightning's Trainer starts, or before the first step of an optimizer. A program that trains nothing,
or without an optimizer of torch, never sends any. From outside the two cannot be distinguished, so
the description states only what was observed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from ltui.training.gpu.findings import verdicts as gpu_verdicts
from ltui.training.gpu.run_gpus import RunGpus, RunGpusView
from ltui.training.lifecycle.rank_package import RANK_SIDE
from ltui.training.lifecycle.rank_queue_poller import local_processes
from ltui.training.process.identity import ProcessIdentity, ProcessTable
from ltui.training.process.proc_files import command_line, environment, read_text
from ltui.training.process.process_activity import RankFinder, RankUsage, UsageMeter
from ltui.training.shared.record_types import PulseState
from ltui.training.state.run_snapshot import Event, FreezeWarning, RunSnapshot, Verdict
from ltui.training.store.history_writer import Batch

_MAX_PROCESSES = 64
"""Maximum number of processes of one command that are inspected."""
_COMMAND_S = 6.0
"""Seconds after which a command without a Python process counts as running."""
_PYTHON_S = 20.0
"""Seconds after which a Python program that has not begun to import PyTorch counts as running."""
_IMPORT_S = 180.0
"""Maximum seconds for the import of PyTorch; an old PyTorch does not say that it is over."""
_FIRST_STEP_S = 60.0
"""Seconds after the import of PyTorch in which the first step is expected."""
_HELP = "ltui_rank.log and --metrics-pattern show its values"


class Program(Struct, frozen=True, kw_only=True):
    """Observations about the processes of a command."""

    python: bool = False
    torch: bool = False
    """True if one of the processes has loaded the PyTorch library, also if it has ended."""
    keras: bool = False
    """True if ``fit`` of Keras, with PyTorch as its backend, has begun in one of the processes."""
    importing_s: float | None = None
    """Seconds for which a process has been importing PyTorch; None if none is."""
    imported_s: float | None = None
    """Seconds since the last process has imported PyTorch; None if none has."""
    ranks: int = 0
    """Number of processes with a rank in their environment variables."""
    world_size: int | None = None
    unwatched: FreezeWarning | None = None
    """Why a process that has loaded PyTorch will never report; None if each can."""

    def runs(self, elapsed_s: float) -> bool:
        """Return True if the command counts as running ``elapsed_s`` after its start."""
        if self.importing_s is not None:
            return False
        if self.unwatched is not None and self.imported_s is None:
            return True
        if self.imported_s is not None:
            return self.keras or self.imported_s > _FIRST_STEP_S
        return self.torch or elapsed_s > (_PYTHON_S if self.python else _COMMAND_S)

    def stage(self) -> str | None:
        """Return what the program does before it trains: ``importing torch (12 s)``."""
        if self.importing_s is not None:
            # A launcher has imported it, and the ranks begin to.
            another = "" if self.imported_s is None else " in another process"
            return f"importing torch{another} ({self.importing_s:.0f} s)"
        return "no training step yet" if self.imported_s is not None else None

    def describe(self, *, logs: bool = False) -> str:
        """Return one line that explains why there are no steps and no rates.

        ``logs``: the values that the program logs are known.
        """
        remedy = "" if logs else f"; {_HELP}"
        if not self.torch:
            return f"no steps: the {'program' if self.python else 'command'} does not use PyTorch"
        if self.unwatched is not None:
            return f"no steps: {self.unwatched.what}"
        if self.keras:
            return f"no steps: Keras trains by optimizers that ltui does not see{remedy}"
        who = f"on its {self.ranks} ranks " if self.ranks > 1 else ""
        return f"no steps: {who}no optimizer of torch.optim has stepped{remedy}"


class ProgramReader:
    """Inspects the processes of one attempt, and remembers which have loaded PyTorch."""

    def __init__(self, queue_dir: Path) -> None:
        """``queue_dir``: the folder in which processes say what they have imported."""
        self._queue_dir = queue_dir
        self._loaded: dict[ProcessIdentity, float] = {}
        """Monotonic second at which the PyTorch library was first seen in a process."""
        self._imported: dict[int, float] = {}
        """pid -> monotonic second at which its import of PyTorch was first seen to be over."""
        self._torch = self._keras = False
        self._unwatched: dict[ProcessIdentity, FreezeWarning] = {}
        """Those that have loaded it and will never report; also those that have ended."""

    def read(
        self,
        table: ProcessTable,
        engine: ProcessIdentity,
        rank_processes: Mapping[int, ProcessIdentity],
    ) -> Program:
        """Return what the processes show. ``rank_processes`` are those that count as ranks."""
        now = time.monotonic()
        processes = [table.identity(pid) for pid in table.tree(engine.pid)[:_MAX_PROCESSES]]
        live = {process for process in processes if process is not None}
        self._read_imported(now)
        self._loaded = {process: at for process, at in self._loaded.items() if process in live}
        for process in live - self._loaded.keys():
            if "/libtorch" in read_text(f"/proc/{process.pid}/maps"):
                self._loaded[process] = now
                if (why := _why_unwatched(process.pid)) is not None:
                    self._unwatched[process] = why
        self._torch = self._torch or bool(self._loaded)
        begun = [
            at
            for process, at in self._loaded.items()
            if process.pid not in self._imported and process not in self._unwatched
        ]
        importing_s = now - min(begun) if begun else None
        environments = [
            environment(process.pid) for process in rank_processes.values() if process != engine
        ]
        sizes = [e["WORLD_SIZE"] for e in environments if e.get("WORLD_SIZE", "").isdigit()]
        return Program(
            python=any(_is_python(process.pid) for process in live),
            torch=self._torch,
            keras=self._keras,
            importing_s=None if importing_s is None or importing_s > _IMPORT_S else importing_s,
            imported_s=now - max(self._imported.values()) if self._imported else None,
            ranks=len(environments),
            world_size=max(map(int, sizes), default=None),
            unwatched=next(iter(self._unwatched.values()), None),
        )

    def _read_imported(self, now: float) -> None:
        try:
            names = os.listdir(self._queue_dir)
        except OSError:
            return
        for name in names:
            library, _, pid = name.removesuffix(".imported").rpartition("-")
            if name.endswith(".imported") and pid.isdigit():
                self._keras = self._keras or library == "keras"
                self._torch = True
                self._imported.setdefault(int(pid), now)


def _why_unwatched(pid: int) -> FreezeWarning | None:
    """Return why Python does not import the rank package in a process; None if it does."""
    variables = environment(pid)
    options = [word[1:] for word in _options(command_line(pid))]
    if any({"E", "I"} & set(letters) for letters in options):
        what = "Python runs with -E or -I, so that ltui cannot watch the program"
        return FreezeWarning(what=what, remedy="Leave the option out.")
    if not variables or f"/{RANK_SIDE}/" in variables.get("PYTHONPATH", ""):
        return None
    what = "the program has replaced PYTHONPATH, so that ltui cannot watch it"
    return FreezeWarning(what=what, remedy="Extend it: PYTHONPATH=src:$PYTHONPATH")


def _options(words: Sequence[str]) -> Iterator[str]:
    """Yield the short options of an interpreter, which stand before its script."""
    for word in words[1:]:
        if not word.startswith("-") or word.removeprefix("-") in ("", "c", "m"):
            return
        if not word.startswith("--"):
            yield word


class OtherTrainings:
    """Finds processes that train beside the ranks, and that no rank has started."""

    def __init__(self, queue_dir: Path) -> None:
        """``queue_dir``: the folder in which processes say that they train."""
        self._queue_dir = queue_dir
        self._reported: set[int] = set()
        self.error: str | None = None
        """Why a pause would not pause all that trains. None if it would."""

    def update(self, table: ProcessTable, ranks: Collection[ProcessIdentity]) -> list[Event]:
        """Return an event for each process that is new."""
        pids = {int(p.stem.split("-")[1]) for p in self._queue_dir.glob("training-*.imported")}
        if pids:  # what a rank has started is an evaluation or a tool
            pids -= {pid for rank in ranks for pid in table.tree(rank.pid)}
        others = sorted(pid for pid in pids if table.identity(pid) is not None)
        text = f"process {others[0]} trains as well, and ltui does not watch it" if others else None
        self.error = text
        new, self._reported = set(others) - self._reported, self._reported | set(others)
        remedy = "Start each training as a run of its own, or the ranks of one by torchrun."
        return [
            Event(
                time.time(),
                "warning",
                f"Process {pid} trains as well. ltui watches one process of a rank: the steps,"
                " values and errors of the other are not shown, and it cannot be paused.",
                {"remedy": remedy},
            )
            for pid in sorted(new)
        ]


def _is_python(pid: int) -> bool:
    try:
        name = os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        return False
    return name.startswith(("python", "pypy"))


READINGS_S = 1.0
"""Seconds between two samples."""


class MachineMonitor:
    """Samples the processes and GPUs of one attempt."""

    def __init__(self, run_id: str, queue_dir: Path, *, user_command: bool) -> None:
        """``user_command``: the run is a command of the user, which may itself count as a rank."""
        self.gpus = RunGpus(run_id)
        self.gpu_view = RunGpusView()
        self.gpu_verdicts: tuple[Verdict, ...] = ()
        """Verdicts about GPUs that are currently active."""
        self.unreported_processes: dict[int, ProcessIdentity] = {}
        """rank -> process, for ranks that have not sent a pulse."""
        self.program = Program()
        """What the processes do. Updated until a rank sends telemetry."""
        self.readings: dict[int, RankUsage] = {}
        """rank -> the newest CPU and memory reading."""
        self.rank_processes: dict[int, ProcessIdentity] = {}
        self.table: ProcessTable | None = None
        """The process table of the newest sample."""
        self._user_command = user_command
        self._readings = UsageMeter()
        self._finder = RankFinder()
        self._program_reader = ProgramReader(queue_dir)
        self.others = OtherTrainings(queue_dir)
        self._read_at = 0.0
        self._gpus_at: float | None = None
        self._ended_verdicts: list[Verdict] = []

    def sample(
        self,
        snapshot: RunSnapshot,
        pulses: Mapping[int, PulseState | None],
        engine: ProcessIdentity | None,
        now_s: float,
    ) -> Batch | None:
        """Return new readings for the store, or None if the last sample is recent enough."""
        now = time.monotonic()
        if now - self._read_at < READINGS_S:
            return None
        self._read_at = now
        batch = Batch()
        self.table = table = ProcessTable()
        reported = local_processes(pulses)
        remote = sum(p is not None and p.node != 0 for p in pulses.values())
        local_size = None if snapshot.world_size is None else snapshot.world_size - remote
        self.unreported_processes = self._without_telemetry(table, engine, reported, local_size)
        if engine is not None and not any(pulses.values()):
            self.program = self._program_reader.read(table, engine, self.unreported_processes)
        self.rank_processes = {**self.unreported_processes, **reported}
        batch.events += self.others.update(table, reported.values())
        self.readings = self._readings.sample(table, self.rank_processes, now)
        batch.processes = [
            (rank, now_s, r.cpu_percent, r.rss_bytes) for rank, r in self.readings.items()
        ]
        self._sample_gpus(snapshot, batch, now_s)
        return batch

    def _without_telemetry(
        self,
        table: ProcessTable,
        engine: ProcessIdentity | None,
        reported: Mapping[int, ProcessIdentity],
        size: int | None,
    ) -> dict[int, ProcessIdentity]:
        if engine is None or (reported and (size is None or len(reported) >= size)):
            return {}
        processes = self._finder.find(table, engine)
        return {
            rank: process
            for rank, process in processes.items()
            # The user's command counts as a rank until a rank reports. A preset's agent never does.
            if rank not in reported and (process != engine or (not reported and self._user_command))
        }

    def _sample_gpus(self, snapshot: RunSnapshot, batch: Batch, now_s: float) -> None:
        view = self.gpu_view = self.gpus.sample(snapshot.ranks, now_s)
        ended = {(v.kind, v.began): v for v in self.gpu_verdicts}
        self.gpu_verdicts = gpu_verdicts(view.findings)
        for verdict in self.gpu_verdicts:
            ended.pop((verdict.kind, verdict.began), None)
        self._ended_verdicts += [replace(v, ended=now_s) for v in ended.values()]
        batch.events += view.events
        sampled_at = max(
            (g.sampled_at for g in view.gpus if g.sampled_at is not None), default=None
        )
        if sampled_at != self._gpus_at:
            self._gpus_at = sampled_at
            batch.gpus = [g for g in view.gpus if g.error is None]

    def take_ended_verdicts(self) -> list[Verdict]:
        """Return the verdicts about GPUs that have ended since the last call."""
        ended, self._ended_verdicts = self._ended_verdicts, []
        return ended

    def end_verdicts(self, ended_at: float) -> list[Verdict]:
        """End all active verdicts about GPUs, because the run has ended. Return them."""
        ended = [replace(v, ended=ended_at) for v in self.gpu_verdicts]
        self.gpu_verdicts = ()
        return ended
