"""Why one rank does not come: from its process, its workers and its stack. Pure.

The order matters: a stopped or dead worker explains its rank, a held GIL explains a silent witness,
and only then does the rank's own line count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ltui.training.diagnosis.evidence import (
    Frame,
    ProcessActivity,
    RankEvidence,
    ThreadStack,
    WorkerEvidence,
)
from ltui.training.diagnosis.rules.compiler_frames import active_compiler, compiler_on_stack
from ltui.training.diagnosis.rules.stack_frames import (
    frame_facts,
    frame_text,
    has_frame,
    in_same_function,
    innermost_frame,
    point_to_point_call_in,
    user_frame,
    waits_for_child,
    waits_for_loader,
)
from ltui.training.diagnosis.rules.verdict_words import activity_text
from ltui.training.tensor_queue.record_types import Phase, PulseState

_SILENT_S = 1.5
_BUSY_SHARE = 0.4
STARVED_REMEDY = "Run fewer processes on this machine, or give each rank its own cores."


@dataclass(frozen=True, kw_only=True, slots=True)
class StallReason:
    """One rank's reason. ``text`` follows the rank's name."""

    kind: str
    text: str
    motion: str
    """``fault`` (needs no budget), ``frozen``, ``busy``, ``compiling`` or ``moving``."""
    place: str | None = None
    frame: Frame | None = None
    remedy: str | None = None
    confidence: float = 0.9
    watched_s: float | None = None
    """For how long the process was watched, where the reason is that it is frozen."""
    cpu_share: float | None = None
    """Of one core, what it computed with, where the reason is that it is busy."""
    facts: dict[str, Any] = field(default_factory=dict)


def explain_stall(of_rank: RankEvidence, pulse: PulseState | None) -> StallReason:
    """Why the rank stands where it stands."""
    for look in _FAULTS:
        if (reason := look(of_rank, pulse)) is not None:
            return reason
    return _own_line(of_rank, pulse)


def _stopped_worker(of_rank: RankEvidence, pulse: PulseState | None) -> StallReason | None:
    worker = next((w for w in _loaders(of_rank) if w.process.state in ("T", "t")), None)
    if worker is None:
        return None
    pid = worker.process.pid
    return StallReason(
        kind="worker_stopped",
        text=f"waits for its DataLoader worker {pid}, which is stopped (SIGSTOP or a debugger)",
        motion="fault",
        place=_phase(pulse, "fetch data"),
        remedy=f"To continue it: kill -CONT {pid}",
        confidence=0.95,
        facts={"worker": pid},
    )


def _dead_worker(of_rank: RankEvidence, pulse: PulseState | None) -> StallReason | None:
    worker = next((w for w in _loaders(of_rank) if w.process.state == "Z"), None)
    if worker is None:
        lost = [w for w in of_rank.workers if w.gone]
        if not lost or not waits_for_loader(of_rank.main_stack) or _loaders(of_rank):
            return None
        worker = lost[0]
    pid = worker.process.pid
    return StallReason(
        kind="worker_died",
        text=f"waits for its DataLoader worker {pid}, which exited unexpectedly",
        motion="fault",
        place=_phase(pulse, "fetch data"),
        remedy="Check the log of the rank and the free memory; with num_workers=0 the error is"
        " raised there.",
        confidence=0.8,
        facts={"worker": pid},
    )


def _sigterm(of_rank: RankEvidence, pulse: PulseState | None) -> StallReason | None:
    stack = of_rank.main_stack
    if not has_frame(stack, "_sigterm_notifier_fn"):
        return None
    line = user_frame(stack)
    at = f", interrupted at {frame_text(line)}" if line else ""
    return StallReason(
        kind="sigterm",
        text="received SIGTERM and is stuck in Lightning's SIGTERM handler, which calls a"
        f" collective{at}",
        motion="fault",
        place=_phase(pulse, frame_text(line)),
        frame=line,
        remedy="Kill the run and resume it; send SIGTERM to rank 0 or to all ranks instead.",
        confidence=0.95,
        facts=frame_facts(line),
    )


def _disk(of_rank: RankEvidence, pulse: PulseState | None) -> StallReason | None:
    process = of_rank.process
    if process is None or process.state != "D" or (process.switches or 0) > 2:
        return None
    line = user_frame(of_rank.main_stack)
    doing = "writing a checkpoint: " if pulse and pulse.phase is Phase.CHECKPOINT else ""
    channel = f" ({process.wait_channel})" if process.wait_channel else ""
    return StallReason(
        kind="disk",
        text=f"is {doing}in uninterruptible I/O (state D){channel}: a disk or network file system"
        " does not answer",
        motion="fault",
        place=_phase(pulse, frame_text(line)),
        frame=line,
        remedy="Check the file system that it reads or writes (dmesg, df, the NFS server).",
        confidence=0.9,
        facts=frame_facts(line) | {"wait_channel": process.wait_channel},
    )


def _gil(of_rank: RankEvidence, pulse: PulseState | None) -> StallReason | None:
    age = of_rank.beat_age_s
    process = of_rank.process
    if age is None or age < _SILENT_S or process is None or process.state in ("T", "t", "D", "Z"):
        return None
    if process.starved:
        return None  # it has no processor, nor has its witness
    stack = of_rank.main_stack
    line = user_frame(stack) or innermost_frame(stack)
    at = f" in {frame_text(line)}" if line else ""
    return StallReason(
        kind="gil_held",
        text=f"the GIL is held by a C call{at}: no Python thread has run for {age:.0f} s"
        + activity_text(process),
        motion="frozen" if process.frozen else "busy",
        cpu_share=process.cpu_share,
        place=_phase(pulse, frame_text(line)),
        frame=line,
        remedy="That extension must release the GIL, or return.",
        confidence=0.9,
        facts=frame_facts(line) | {"beat_age_s": round(age, 1)},
    )


def _compiling(of_rank: RankEvidence, pulse: PulseState | None) -> StallReason | None:
    worker = next(
        (w for w in _loaders(of_rank) if compiler_on_stack(_main_of(w)) is not None), None
    )
    if worker is not None and waits_for_loader(of_rank.main_stack):
        name, line = compiler_on_stack(_main_of(worker)), user_frame(_main_of(worker))
        who = f"waits for its DataLoader worker {worker.process.pid}, which compiles"
        process: ProcessActivity | None = worker.process
    else:
        name, line = active_compiler(of_rank), user_frame(of_rank.main_stack)
        who, process = "compiles", of_rank.process
    if name is None:
        return None
    at = f" at {frame_text(line)}" if line else ""
    return StallReason(
        kind="compiling",
        text=f"{who} ({name}){at}{activity_text(process)}",
        motion="compiling",
        place=_phase(pulse, frame_text(line)),
        frame=line,
        remedy="Let it finish. Shapes that change make it compile again; ranks that share a cache"
        " of compiled code (TORCHINDUCTOR_CACHE_DIR, cache=True) compile once.",
        confidence=0.85,
        facts=frame_facts(line) | {"compiler": name},
    )


_FAULTS: tuple[Callable[[RankEvidence, PulseState | None], StallReason | None], ...] = (
    _stopped_worker,
    _dead_worker,
    _sigterm,
    _disk,
    _compiling,
    _gil,
)


def _own_line(of_rank: RankEvidence, pulse: PulseState | None) -> StallReason:
    stack = of_rank.main_stack
    if (pulse is not None and pulse.phase is Phase.CHECKPOINT) or _saves(stack):
        return _checkpoint(of_rank, pulse)
    if waits_for_loader(stack):
        return _worker(of_rank, pulse)
    return _line(of_rank, pulse)


def _saves(stack: ThreadStack | None) -> bool:
    return has_frame(stack, "save_checkpoint") or has_frame(stack, "_save_checkpoint")


def _checkpoint(of_rank: RankEvidence, pulse: PulseState | None) -> StallReason:
    process = of_rank.process
    line = user_frame(of_rank.main_stack)
    at = f" at {frame_text(line)}" if line else ""
    frozen = bool(process and process.frozen)
    return StallReason(
        kind="checkpoint",
        text=f"is {'' if frozen else 'still '}writing a checkpoint{at}{activity_text(process)}",
        motion="frozen" if frozen else "moving",
        place=_phase(pulse, frame_text(line)),
        frame=line,
        remedy="Check the disk that checkpoints go to." if frozen else None,
        confidence=0.85,
        facts=frame_facts(line) | {"moving": not frozen},
    )


def _worker(of_rank: RankEvidence, pulse: PulseState | None) -> StallReason:
    workers = [w for w in _loaders(of_rank) if w.process.state is not None]
    held = [w for w in workers if user_frame(_main_of(w)) is not None] or workers
    frozen = [w for w in held if w.process.frozen]
    busy = [w for w in held if (w.process.cpu_share or 0) >= _BUSY_SHARE]
    worker = next(iter(busy or frozen or held), None)
    if worker is None:
        return StallReason(
            kind="worker_frozen",
            text="waits for DataLoader workers of which none can be seen",
            motion=_motion(of_rank.process),
            place=_phase(pulse, "fetch data"),
            confidence=0.5,
        )
    pid, process = worker.process.pid, worker.process
    line = user_frame(_main_of(worker)) or innermost_frame(_main_of(worker))
    at = f" at {frame_text(line)}" if line else ""
    motion = _motion(process)
    kinds = {"frozen": "worker_frozen", "busy": "worker_busy", "moving": "slow_rank"}
    is_ = {"frozen": "is stuck", "busy": "is busy (a busy loop or a very slow line)"}
    return StallReason(
        kind=kinds[motion],
        text=f"waits for its DataLoader worker {pid}, which {is_.get(motion, 'is slow')}{at}"
        + activity_text(process),
        motion=motion,
        watched_s=process.interval_s,
        cpu_share=process.cpu_share,
        place=_phase(pulse, frame_text(line)),
        frame=line,
        remedy=_worker_remedy(motion),
        confidence=0.9 if line else 0.7,
        facts=frame_facts(line) | {"worker": pid, "moving": motion == "moving"},
    )


def _worker_remedy(motion: str) -> str | None:
    if motion == "frozen":
        return (
            "Check that line; locks taken before the fork (OpenCV, OpenMP, tokenizers) cause such"
            " hangs: set their threads to 0 or use multiprocessing_context='spawn'."
        )
    return "Check that line and at the sample that it works on." if motion == "busy" else None


def _line(of_rank: RankEvidence, pulse: PulseState | None) -> StallReason:
    process, stack = of_rank.process, of_rank.main_stack
    own = user_frame(stack)
    line = own or innermost_frame(stack)
    motion = _motion(process, of_rank)
    data = pulse is not None and pulse.phase is Phase.FETCH
    what = "dataset code " if data and own else ""
    at = f" {what}at {frame_text(line)}" if line else ""
    doing = pulse.phase.label if pulse else "an unknown phase"
    message = point_to_point_call_in(stack)
    waits = motion == "frozen" and waits_for_child(stack)
    child = working_child(of_rank) if waits else None
    if child is not None:
        motion, process = "moving", child.process
        name = f" ({process.name})" if process.name else ""
        text = f"waits in {doing} for process {process.pid}{name}, which works{at}"
        text += activity_text(process)
    elif message is not None and motion != "busy":
        ends = "sends" if "recv" in message else "receives"
        text = f"waits in {message}{at} for a rank that {ends}{activity_text(process)}"
    elif motion == "frozen":
        text = f"is stuck in {doing}{at}{activity_text(process)}"
    elif motion == "busy":
        text = f"computes in {doing}{at}: a busy loop or a very slow line{activity_text(process)}"
    else:
        text = f"is slow in {doing}{at}{activity_text(process)}"
    kinds = {"frozen": "frozen", "busy": "busy", "moving": "slow_rank"}
    return StallReason(
        kind=kinds[motion],
        text=text,
        motion=motion,
        watched_s=process.interval_s if process is not None else None,
        cpu_share=process.cpu_share if process is not None else None,
        place=_phase(pulse, frame_text(line)),
        frame=line,
        remedy=_line_remedy(motion, process),
        confidence=0.9 if own else 0.7,
        facts=frame_facts(line) | {"moving": motion == "moving"},
    )


def working_child(of_rank: RankEvidence) -> WorkerEvidence | None:
    """A child of the rank that does something."""
    return next((w for w in of_rank.workers if not w.gone and w.process.frozen is False), None)


def _line_remedy(motion: str, process: ProcessActivity | None) -> str | None:
    if motion == "frozen" and process and "futex" in (process.wait_channel or ""):
        return "Check for a lock that is taken twice, or held by a thread that has ended."
    if process is not None and process.starved and motion != "frozen":
        return STARVED_REMEDY
    return "Check that line." if motion != "moving" else None


def _motion(process: ProcessActivity | None, of_rank: RankEvidence | None = None) -> str:
    if process is None or process.cpu_share is None:
        return "moving"
    if process.frozen:
        return "frozen"
    if process.cpu_share < _BUSY_SHARE * (1 - min(0.8, process.run_delay_share or 0.0)):
        return "moving"
    now = of_rank.main_stack if of_rank is not None else None
    if of_rank is None or now is None or not of_rank.earlier_stacks:
        return "busy"
    return "busy" if in_same_function((now, *of_rank.earlier_stacks)) else "moving"


def _main_of(worker: WorkerEvidence) -> ThreadStack | None:
    return next((s for s in worker.stacks if s.main), worker.stacks[0] if worker.stacks else None)


def _loaders(of_rank: RankEvidence) -> list[WorkerEvidence]:
    living = [w for w in of_rank.workers if not w.gone]
    named = [w for w in living if w.loader]
    return named or (living if waits_for_loader(of_rank.main_stack) else [])


def _phase(pulse: PulseState | None, detail: str | None) -> str | None:
    label = pulse.phase.label if pulse is not None else None
    if label and detail and detail != label:
        return f"{label}, {detail}"
    return detail or label
