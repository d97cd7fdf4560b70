"""Faults on a GPU: each is injected into a real run, and ltui has to name rank, place and cause.

With NCCL on two GPUs, or else in a group of one rank; and with gloo, two ranks on one GPU, which
NCCL refuses.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from ltui.training.state.run_snapshot import LIVE, RunSnapshot, RunState
from tests.faults.fault import Expected, Fault
from tests.faults.run import FaultRun
from tests.faults.verdicts import Outcome, check_verdicts, is_right
from tests.gpu.hardware.check import Check, Conditions
from tests.gpu.hardware.first_gpu import FirstGpu, find_first_gpu
from tests.gpu.hardware.instruments import ask_torch
from tests.ltui_command import answer

SCRIPT = Path(__file__).with_name("scripts") / "faulty_training.py"
CASE_S = 45.0
"""No case is begun when fewer seconds are left: importing torch, the verdict and the end."""
_FREED_WITHIN_S = 15.0
_FREED_MIB = 64.0
"""Difference up to which the memory in use is the same before and after a run."""
_KERNEL = "for its GPU, which does not finish its kernels"


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The ranks of a run: back end and devices."""

    title: str
    backend: str
    devices: tuple[str, ...]


def groups(gpus: int) -> dict[str, Group]:
    """Return the process groups that a machine with so many GPUs allows; 0 in a rehearsal."""
    gpu, ranks = ("cpu", "CPU") if gpus == 0 else ("cuda:0", "GPU")
    shared = Group(title=f"gloo, 2 ranks on one {ranks}", backend="gloo", devices=(gpu, gpu))
    if gpus == 0:
        return {"alone": Group(title="1 rank", backend="gloo", devices=(gpu,)), "shared": shared}
    alone = ("cuda:0", "cuda:1") if gpus > 1 else ("cuda:0",)
    title = f"NCCL, {len(alone)} {'ranks' if gpus > 1 else 'rank'}"
    return {"alone": Group(title=title, backend="nccl", devices=alone), "shared": shared}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One fault in one group."""

    fault: str
    title: str
    group: str
    expected: Expected
    ends: RunState | None = None
    """The state in which the run ends because of the fault; None if it does not."""


def cases(found: dict[str, Group], *, rehearsal: bool) -> list[Case]:
    """Return the cases in the order in which they run. A rehearsal has each fault once."""
    if rehearsal:
        memory, kernel, on_cpu = ["ran out of memory"], ["forward"], " on the CPU"
    else:
        memory = ["ran out of GPU memory", "tried to allocate .* was free", "PyTorch held"]
        kernel, on_cpu = [_KERNEL], ""
    listed = []
    for name, group in found.items():
        last = len(group.devices) - 1
        hung = ("stalled", *kernel, _line(f"hung_kernel{on_cpu}"))
        full = ("dead", *memory, _line(f"out_of_memory{on_cpu}"))
        faults: tuple[tuple[str, str, tuple[str, ...], RunState | None], ...] = (
            ("hung_kernel", "a hung kernel", hung, None),
            ("stopped", "SIGSTOP to a rank", ("stalled", "stopped"), None),
            ("killed", "SIGKILL to a rank", ("dead", "SIGKILL"), RunState.CRASHED),
            ("out_of_memory", "out of memory", full, RunState.FAILED),
        )
        for fault, title, (level, *words), ends in faults:
            expected = _expect(level, last, *words)
            listed.append(Case(fault=fault, title=title, group=name, expected=expected, ends=ends))
    left_out = Case(
        fault="left_out",
        title="a collective that one rank leaves out",
        group="shared",
        expected=_expect("stalled", 0, "barrier", "only|mismatch", _line("left_out")),
    )
    if rehearsal:
        alone = ("hung_kernel", "stopped")
        return [c for c in listed if (c.fault in alone) == (c.group == "alone")] + [left_out]
    return [*listed, left_out, _hung_kernel_later(len(found["alone"].devices))]


def _hung_kernel_later(ranks: int) -> Case:
    """Return the case of a kernel that hangs before a collective that is already enqueued.

    With several ranks it can't be known whose kernel it is.
    """
    return Case(
        fault="hung_kernel_later",
        title="a hung kernel, waited for after a collective",
        group="alone",
        expected=_expect("stalled", 0, _KERNEL, _line("hung_kernel_later"))
        if ranks == 1
        else replace(_expect("stalled", 0, "a kernel before it does not end"), culprits=()),
    )


def _expect(level: str, rank: int, *words: str) -> Expected:
    return Expected(levels=(level,), culprits=(rank,), words=words)


def _line(name: str) -> str:
    """Return an expression for ``file.py:12`` of the comment ``fault: NAME`` in the script."""
    for number, text in enumerate(SCRIPT.read_text(encoding="utf-8").splitlines(), 1):
        if text.endswith(f"# fault: {name}"):
            return rf"{SCRIPT.name}:{number}\b"
    raise LookupError(name)


def checks(conditions: Conditions) -> Iterator[Check]:
    """Yield what ltui reported of each fault."""
    found = groups(0 if conditions.rehearsal else int(ask_torch("torch.cuda.device_count()")))
    gpu = find_first_gpu(conditions.rehearsal)
    for case in cases(found, rehearsal=conditions.rehearsal):
        title = f"{found[case.group].title}: {case.title}"
        if conditions.seconds_left() < CASE_S:
            yield Check(f"{title}: verdict", "not tried, no time left", "", False)
            continue
        try:
            yield from _try(case, found[case.group], conditions, gpu)
        except Exception as error:
            yield Check(f"{title}: tried", f"{type(error).__name__}: {error}"[-600:], "yes", False)


def _try(case: Case, group: Group, conditions: Conditions, gpu: FirstGpu | None) -> Iterator[Check]:
    title = f"{group.title}: {case.title}"
    before = None if gpu is None else gpu.used_mib()
    with _started(case, group, conditions) as run:
        fault = Fault(id=case.fault, title=title, expected=(case.expected,), hold_s=1.0)
        outcome = check_verdicts(fault, contextlib.nullcontext(run))
        during = None if gpu is None else gpu.used_mib()
        yield from verdict_checks(title, case, outcome)
        if case.ends is not None:
            yield _end_check(title, case.ends, run.until(lambda seen: seen.state not in LIVE, 60))
        elif case.fault.startswith("hung_kernel"):
            yield recorder_check(title, answer(run.ltui("diagnose", "last", "--json")))
    yield memory_check(title, before, during, None if gpu is None else _freed(gpu, before))


@contextlib.contextmanager
def _started(case: Case, group: Group, conditions: Conditions) -> Iterator[FaultRun]:
    """Start the run of a case; afterwards end it and keep its logs."""
    folder = conditions.folder / f"{case.group}-{case.fault}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    environment = {
        "FAULT": case.fault,
        "FAULT_FOLDER": str(folder),
        "FAULT_DEVICES": ",".join(group.devices),
        "FAULT_BACKEND": group.backend,
        "OMP_NUM_THREADS": "1",
        **({"CUDA_VISIBLE_DEVICES": ""} if conditions.rehearsal else {}),
    }
    run = FaultRun(folder, environment, home=conditions.home)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    try:
        run.ltui(
            "exec", "--detach", "--",
            sys.executable, *launcher, str(len(group.devices)), str(SCRIPT),
        )  # fmt: skip
        yield run
    finally:
        run.end(60)
        with contextlib.suppress(OSError, shutil.Error, ValueError):
            shutil.copytree(run.run_dir.path / "logs", folder / "logs")


def verdict_checks(title: str, case: Case, outcome: Outcome) -> Iterator[Check]:
    """Yield whether the verdict was right, with its own words, and when it came."""
    rights = [v for v in outcome.last if is_right(case.expected, v)]
    said = [f"{v.level}, {v.kind}: {v.cause} [{v.place}]" for v in rights or outcome.last]
    if outcome.wrong:
        said.append(f"also, and wrong: {'; '.join(outcome.wrong)}")
    if outcome.error:
        said.append(outcome.error)
    expected = case.expected
    ranks = ", ".join(map(str, expected.culprits)) or "none"
    wanted = f"{' or '.join(expected.levels)}, rank {ranks}: {' & '.join(expected.words)}"
    yield Check(f"{title}: verdict", said or ["none"], wanted, outcome.right)
    yield Check(f"{title}: seconds until rank and level were right", outcome.culprit_s)
    yield Check(f"{title}: seconds until cause and place were right", outcome.cause_s)


def _end_check(title: str, ends: RunState, seen: RunSnapshot) -> Check:
    """Return whether the run has ended as it should, with all its ranks."""
    left = [r.rank for r in seen.ranks if r.pid is not None and psutil.pid_exists(r.pid)]
    said = f"{seen.state.value}: {seen.detail}; ranks left: {left or 'none'}"
    right = seen.state is ends and not left
    return Check(f"{title}: the run ended", said, f"{ends.value}; ranks left: none", right)


def recorder_check(title: str, diagnosis: dict[str, Any]) -> Check:
    """Return whether torch's flight recorder showed the collectives of every rank."""
    ranks = (diagnosis.get("evidence") or {}).get("ranks") or {}
    entries = [rank.get("collectives") or [] for rank in ranks.values()]
    missing = [text for rank in ranks.values() for text in rank.get("missing") or ()]
    pending = [f"{e.get('op')} #{e.get('seq')}" for of in entries for e in of if not e["retired"]]
    said = f"{[len(of) for of in entries]} entries; unfinished: {', '.join(pending) or 'none'}"
    said += f"; missing: {', '.join(missing) or 'nothing'}"
    what = f"{title}: collectives in torch's flight recorder, of each rank"
    return Check(what, said, "> 0", bool(entries) and all(entries))


def _freed(gpu: FirstGpu, before: float | None) -> float | None:
    """Return the memory in use once it is that before the run, or after some seconds."""
    deadline = time.monotonic() + _FREED_WITHIN_S
    while True:
        used = gpu.used_mib()
        if used is None or before is None or used <= before + _FREED_MIB:
            return used
        if time.monotonic() > deadline:
            return used
        time.sleep(0.2)


def memory_check(
    title: str, before: float | None, during: float | None, after: float | None
) -> Check:
    """Return whether the memory of the GPU was freed."""
    what = f"{title}: memory of the GPU in use before, at the verdict, and after the run, MiB"
    if before is None or after is None:
        return Check(what, None)
    said = [None if mib is None else round(mib) for mib in (before, during, after)]
    return Check(what, said, "after as before", after <= before + _FREED_MIB)
