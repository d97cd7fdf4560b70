"""Explain why one rank makes no progress, from its process, its workers and its stack. Pure.

The order matters. A stopped or dead worker explains its rank. A held GIL explains why the heartbeat
thread does not run. Only if nothing of that applies does the line of user code count.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from msgspec.structs import replace

from ltui.training.diagnosis.evidence import (
    ProcessActivity,
    RankEvidence,
    ThreadStack,
    WorkerEvidence,
)
from ltui.training.diagnosis.judge_input import PreparedInput
from ltui.training.diagnosis.stack_frames import (
    active_compiler,
    at_frame,
    compiler_on_stack,
    frame_text,
    has_frame,
    in_gpu_synchronization,
    in_same_function,
    innermost_frame,
    point_to_point_call_in,
    user_frame,
    waits_for_child,
    waits_for_loader,
)
from ltui.training.diagnosis.stalls.stall_case import Activity, StallReason
from ltui.training.diagnosis.verdict_words import activity_text, place_text
from ltui.training.shared.record_types import Phase, PulseState
from ltui.training.state.verdicts import VerdictKind
from ltui.training.tensor_queue.heartbeat_table import LATE_S

_BUSY_CPU_SHARE = 0.4
"""Fraction of a core that a busy process uses at least."""
_GPU_DRIVER = re.compile(r"nvidia|nv_|_nv\d+rm|uvm_|rm_|os_acquire_")
"""Beginnings of the names of functions in the kernel modules of the NVIDIA driver."""
_BUSY_GPU_PERCENT = 95.0
"""Utilisation from which a GPU runs a kernel all the time."""
STARVED_REMEDY = "Run fewer processes on this machine, or give each rank its own cores."


def explain_rank(inputs: PreparedInput, rank: int) -> StallReason:
    """Return why a rank of which there is evidence makes no progress."""
    reason = explain_stall(inputs.settled[rank], inputs.pulses.get(rank))
    machine = inputs.machines.get(rank)
    if machine is None or reason.kind is not VerdictKind.WORKER_STOPPED:
        return reason
    return replace(reason, remedy=f"{reason.remedy} on {machine}")


def explain_stall(rank_evidence: RankEvidence, pulse: PulseState | None) -> StallReason:
    """Return why a rank that makes no progress is where it is."""
    reasons = (cause(rank_evidence, pulse) for cause in _CAUSES)
    reason = next((r for r in reasons if r is not None), None)
    reason = reason or _user_code(rank_evidence, pulse)
    detail = reason.place or frame_text(reason.frame)
    return replace(reason, place=place_text(pulse, detail))


def _lost_worker(rank_evidence: RankEvidence, _pulse: PulseState | None) -> StallReason | None:
    """Explain a rank that waits for a DataLoader worker that is stopped or has ended."""
    workers = _loader_workers(rank_evidence)
    stopped = next((w for w in workers if w.process.state in ("T", "t")), None)
    ended = next((w for w in workers if w.process.state == "Z"), None)
    if not workers and waits_for_loader(rank_evidence.main_stack):
        ended = next((w for w in rank_evidence.workers if w.gone), None)
    worker = stopped or ended
    if worker is None:
        return None
    pid = worker.process.pid
    if stopped is not None:
        kind, confidence = VerdictKind.WORKER_STOPPED, 0.95
        predicate = "is stopped (SIGSTOP or a debugger)"
        remedy = f"To continue it: kill -CONT {pid}"
    else:
        kind, confidence = VerdictKind.WORKER_DIED, 0.8
        predicate = "exited unexpectedly"
        remedy = (
            "Check the log of the rank and the free memory; with num_workers=0 the error is raised"
            " there."
        )
    return StallReason(
        kind=kind,
        text=f"waits for its DataLoader worker {pid}, which {predicate}",
        activity=Activity.FAULT,
        place="fetch data",
        remedy=remedy,
        confidence=confidence,
        facts={"worker": pid},
    )


def _sigterm(rank_evidence: RankEvidence, _pulse: PulseState | None) -> StallReason | None:
    stack = rank_evidence.main_stack
    if not has_frame(stack, "_sigterm_notifier_fn"):
        return None
    line = user_frame(stack)
    at_line = f", interrupted{at_frame(line)}" if line else ""
    return StallReason(
        kind=VerdictKind.SIGTERM,
        text="received SIGTERM and is stuck in Lightning's SIGTERM handler, which calls a"
        f" collective{at_line}",
        activity=Activity.FAULT,
        frame=line,
        remedy="Kill the run and resume it; send SIGTERM to rank 0 or to all ranks instead.",
        confidence=0.95,
    )


def _ending(rank_evidence: RankEvidence, _pulse: PulseState | None) -> StallReason | None:
    """Explain a rank that has ended. To free the memory of a GPU may take seconds."""
    process = rank_evidence.process
    if process is None or not process.exiting:
        return None
    channel = f", {process.wait_channel}" if process.wait_channel else ""
    return StallReason(
        kind=VerdictKind.NOT_EXITING,
        text="has ended, but the kernel has not freed its memory and devices yet (state"
        f" {process.state}{channel})",
        activity=Activity.FROZEN,
        remedy="Wait. If it lasts, a GPU or a disk does not answer: check dmesg and nvidia-smi.",
        facts={"wait_channel": process.wait_channel},
    )


def _uninterruptible(rank_evidence: RankEvidence, pulse: PulseState | None) -> StallReason | None:
    """Explain a rank that waits within the kernel, for a GPU or for a disk."""
    process = rank_evidence.process
    if process is None or process.state != "D":
        return None
    channel = process.wait_channel or ""
    if _GPU_DRIVER.match(channel):
        kind = VerdictKind.WAITS_FOR_GPU
        text = f"is in the NVIDIA driver, which does not answer (state D, {channel})"
        remedy = "Check the GPU: dmesg (XID errors) and nvidia-smi."
    elif (process.switches or 0) <= 2:
        kind = VerdictKind.DISK
        writes = "writing a checkpoint: " if pulse and pulse.phase is Phase.CHECKPOINT else ""
        text = (
            f"is {writes}in uninterruptible I/O (state D){f' ({channel})' if channel else ''}: a"
            " disk or network file system does not answer"
        )
        remedy = "Check the file system that it reads or writes (dmesg, df, the NFS server)."
    else:
        return None
    return StallReason(
        kind=kind,
        text=text,
        activity=Activity.FAULT,
        frame=user_frame(rank_evidence.main_stack),
        remedy=remedy,
        facts={"wait_channel": process.wait_channel},
    )


def _compiling(rank_evidence: RankEvidence, _pulse: PulseState | None) -> StallReason | None:
    worker = next(
        (w for w in _loader_workers(rank_evidence) if compiler_on_stack(_worker_stack(w))), None
    )
    stack, process = rank_evidence.main_stack, rank_evidence.process
    if worker is not None and waits_for_loader(stack):
        stack, process = _worker_stack(worker), worker.process
        compiler = compiler_on_stack(stack)
        action = f"waits for its DataLoader worker {worker.process.pid}, which compiles"
    else:
        compiler, action = active_compiler(rank_evidence), "compiles"
    if compiler is None:
        return None
    line = user_frame(stack)
    return StallReason(
        kind=VerdictKind.COMPILING,
        text=f"{action} ({compiler}){at_frame(line)}{activity_text(process)}",
        activity=Activity.COMPILING,
        frame=line,
        remedy="Let it finish. Shapes that change make it compile again; ranks that share a cache"
        " of compiled code (TORCHINDUCTOR_CACHE_DIR, cache=True) compile once.",
        confidence=0.85,
        facts={"compiler": compiler},
    )


def _gil_held(rank_evidence: RankEvidence, _pulse: PulseState | None) -> StallReason | None:
    age_s, process = rank_evidence.beat_age_s, rank_evidence.process
    if age_s is None or age_s < LATE_S or process is None:
        return None
    if process.state in ("T", "t", "D", "Z"):
        return None
    if process.starved:
        return None  # The heartbeat thread has no processor either.
    stack = rank_evidence.main_stack
    line = user_frame(stack) or innermost_frame(stack)
    in_line = f" in {frame_text(line)}" if line else ""
    return StallReason(
        kind=VerdictKind.GIL_HELD,
        text=f"the GIL is held by a C call{in_line}: no Python thread has run for {age_s:.0f} s"
        + activity_text(process),
        activity=Activity.FROZEN if process.frozen else Activity.BUSY,
        cpu_share=process.cpu_share,
        frame=line,
        remedy="That extension must release the GIL, or return.",
        facts={"beat_age_s": round(age_s, 1)},
    )


def _checkpoint(rank_evidence: RankEvidence, pulse: PulseState | None) -> StallReason | None:
    stack, process = rank_evidence.main_stack, rank_evidence.process
    saves = has_frame(stack, "save_checkpoint", "_save_checkpoint")
    if not saves and (pulse is None or pulse.phase is not Phase.CHECKPOINT):
        return None
    line = user_frame(stack)
    frozen = bool(process and process.frozen)
    return StallReason(
        kind=VerdictKind.CHECKPOINT,
        text=f"is {'' if frozen else 'still '}writing a checkpoint{at_frame(line)}"
        + activity_text(process),
        activity=Activity.FROZEN if frozen else Activity.MOVING,
        frame=line,
        remedy="Check the disk that checkpoints go to." if frozen else None,
        confidence=0.85,
        facts={"moving": not frozen},
    )


def _hung_fork(rank_evidence: RankEvidence, _pulse: PulseState | None) -> StallReason | None:
    """Explain a rank that waits for a DataLoader worker that never began to run after its fork.

    torch names its workers when they begin. All that have begun wait for work.
    """
    if not waits_for_loader(rank_evidence.main_stack) or rank_evidence.process is None:
        return None
    own_name = rank_evidence.process.name
    for child in rank_evidence.workers:
        process = child.process
        is_fork = not child.loader and not child.gone and process.name == own_name
        if is_fork and process.frozen and process.switches == 0 and not child.stacks:
            break
    else:
        return None
    if any(user_frame(_worker_stack(w)) for w in rank_evidence.workers if w.loader and not w.gone):
        return None
    return StallReason(
        kind=VerdictKind.WORKER_FROZEN,
        text=f"waits for its DataLoader worker {process.pid}, which hangs since it was forked"
        + activity_text(process),
        activity=Activity.FROZEN,
        watched_s=process.interval_s,
        cpu_share=process.cpu_share,
        remedy="Python before 3.11.10 and 3.10.15 may hang in a fork (its issue 112275), and so may"
        " locks taken before it: use persistent_workers=True, so that it forks less often, or"
        " multiprocessing_context='spawn'.",
        confidence=0.8,
        place="fetch data",
        facts={"worker": process.pid, "moving": False},
    )


def _loader_worker(rank_evidence: RankEvidence, _pulse: PulseState | None) -> StallReason | None:
    """Explain a rank that waits for a DataLoader worker by what the worker does."""
    if not waits_for_loader(rank_evidence.main_stack):
        return None
    visible = [w for w in _loader_workers(rank_evidence) if w.process.state is not None]
    in_user_code = [w for w in visible if user_frame(_worker_stack(w)) is not None] or visible
    frozen = [w for w in in_user_code if w.process.frozen]
    busy = [w for w in in_user_code if (w.process.cpu_share or 0) >= _BUSY_CPU_SHARE]
    worker = next(iter(busy or frozen or in_user_code), None)
    if worker is None:
        return StallReason(
            kind=VerdictKind.WORKER_FROZEN,
            text="waits for DataLoader workers of which none can be seen",
            activity=_activity(rank_evidence.process),
            place="fetch data",
            confidence=0.5,
        )
    process, stack = worker.process, _worker_stack(worker)
    line = user_frame(stack) or innermost_frame(stack)
    activity = _activity(process)
    kind, state, remedy = _WORKER_REASONS.get(activity, (VerdictKind.SLOW_RANK, "is slow", None))
    return StallReason(
        kind=kind,
        text=f"waits for its DataLoader worker {process.pid}, which {state}{at_frame(line)}"
        + activity_text(process),
        activity=activity,
        watched_s=process.interval_s,
        cpu_share=process.cpu_share,
        frame=line,
        remedy=remedy,
        confidence=0.9 if line else 0.7,
        facts={"worker": process.pid, "moving": activity is Activity.MOVING},
    )


_WORKER_REASONS: dict[Activity, tuple[VerdictKind, str, str | None]] = {
    Activity.FROZEN: (
        VerdictKind.WORKER_FROZEN,
        "is stuck",
        "Check that line; locks taken before the fork (OpenCV, OpenMP, tokenizers) cause such"
        " hangs: set their threads to 0 or use multiprocessing_context='spawn'.",
    ),
    Activity.BUSY: (
        VerdictKind.WORKER_BUSY,
        "is busy (a busy loop or a very slow line)",
        "Check that line and the sample that it works on.",
    ),
}
"""activity of a worker -> kind, predicate and remedy."""


def _gpu(rank_evidence: RankEvidence, pulse: PulseState | None) -> StallReason | None:
    """Explain a rank that waits for a kernel on its GPU.

    A stack shows this only in a call of ``synchronize``: other calls wait within one line, such as
    ``loss.item()``. While it waits, CUDA usually spins, so the process looks busy. A loop on the
    CPU looks the same but leaves the GPU idle.
    """
    process, stack = rank_evidence.process, rank_evidence.main_stack
    activity = _activity(process, rank_evidence)
    if activity is Activity.MOVING:
        return None
    gpu = rank_evidence.gpu or {}
    use, power, limit = (gpu.get(n) for n in ("utilisation_percent", "power_w", "power_limit_w"))
    synchronizes = in_gpu_synchronization(stack)
    if not synchronizes and (use is None or use < _BUSY_GPU_PERCENT):
        return None
    facts = [] if use is None else [f"{use:.0f} % utilisation"]
    if power is not None and limit:
        facts.append(f"{power:.0f} W of {limit:.0f} W")
    name = gpu.get("label") or gpu.get("index")
    of_gpu = f" (GPU {name}: {', '.join(facts)})" if facts else ""
    line = user_frame(stack) or innermost_frame(stack)
    phase = pulse.phase.label if pulse else "an unknown phase"
    return StallReason(
        kind=VerdictKind.WAITS_FOR_GPU,
        text=f"waits in {phase}{at_frame(line)} for its GPU, which does not finish its kernels"
        + of_gpu
        + activity_text(process),
        activity=activity,
        watched_s=process.interval_s if process is not None else None,
        cpu_share=process.cpu_share if process is not None else None,
        frame=line,
        remedy="Kernels run later than the lines that start them: with CUDA_LAUNCH_BLOCKING=1 the"
        " run hangs at the line of the kernel.",
        confidence=0.9 if synchronizes else 0.75,
        facts={"gpu_utilisation_percent": use, "gpu_power_w": power},
    )


_CAUSES: tuple[Callable[[RankEvidence, PulseState | None], StallReason | None], ...] = (
    _lost_worker,
    _sigterm,
    _ending,
    _uninterruptible,
    _compiling,
    _gil_held,
    _checkpoint,
    _hung_fork,
    _loader_worker,
    _gpu,
)
"""Causes in the order in which they are checked, before the line of user code."""


def _user_code(rank_evidence: RankEvidence, pulse: PulseState | None) -> StallReason:
    """Explain a rank by the line that its main thread executes."""
    process, stack = rank_evidence.process, rank_evidence.main_stack
    own_line = user_frame(stack)
    line = own_line or innermost_frame(stack)
    activity = _activity(process, rank_evidence)
    fetches = pulse is not None and pulse.phase is Phase.FETCH
    at_line = f"{' dataset code' if fetches and own_line else ''}{at_frame(line)}"
    phase = pulse.phase.label if pulse else "an unknown phase"
    message_call = point_to_point_call_in(stack)
    child = None
    if activity is Activity.FROZEN and waits_for_child(stack):
        child = working_child(rank_evidence)
    if child is not None:
        activity, process = Activity.MOVING, child.process
        name = f" ({process.name})" if process.name else ""
        text = f"waits in {phase} for process {process.pid}{name}, which works{at_line}"
    elif message_call is not None and activity is not Activity.BUSY:
        peer_action = "sends" if "recv" in message_call else "receives"
        text = f"waits in {message_call}{at_line} for a rank that {peer_action}"
    elif activity is Activity.FROZEN:
        text = f"is stuck in {phase}{at_line}"
    elif activity is Activity.BUSY:
        text = f"computes in {phase}{at_line}: a busy loop or a very slow line"
    else:
        text = f"is slow in {phase}{at_line}"
    kinds = {Activity.FROZEN: VerdictKind.FROZEN, Activity.BUSY: VerdictKind.BUSY}
    return StallReason(
        kind=kinds.get(activity, VerdictKind.SLOW_RANK),
        text=text + activity_text(process),
        activity=activity,
        watched_s=process.interval_s if process is not None else None,
        cpu_share=process.cpu_share if process is not None else None,
        frame=line,
        remedy=_user_code_remedy(activity, process),
        confidence=0.9 if own_line else 0.7,
        facts={"moving": activity is Activity.MOVING},
    )


def working_child(rank_evidence: RankEvidence) -> WorkerEvidence | None:
    """Return a child process of the rank that does something, or None."""
    return next(
        (w for w in rank_evidence.workers if not w.gone and w.process.frozen is False), None
    )


def _user_code_remedy(activity: Activity, process: ProcessActivity | None) -> str | None:
    frozen = activity is Activity.FROZEN
    if frozen and process and "futex" in (process.wait_channel or ""):
        return "Check for a lock that is taken twice, or held by a thread that has ended."
    if process is not None and process.starved and not frozen:
        return STARVED_REMEDY
    return None if activity is Activity.MOVING else "Check that line."


def _activity(
    process: ProcessActivity | None, rank_evidence: RankEvidence | None = None
) -> Activity:
    """Return what a process does.

    With ``rank_evidence``, a process is busy only if its main thread stays in one function.
    """
    if process is None or process.cpu_share is None:
        return Activity.MOVING
    if process.frozen:
        return Activity.FROZEN
    available_share = 1 - min(0.8, process.run_delay_share or 0.0)
    if process.cpu_share < _BUSY_CPU_SHARE * available_share:
        return Activity.MOVING
    stack = rank_evidence.main_stack if rank_evidence is not None else None
    if rank_evidence is None or stack is None or not rank_evidence.earlier_stacks:
        return Activity.BUSY
    stays = in_same_function((stack, *rank_evidence.earlier_stacks))
    return Activity.BUSY if stays else Activity.MOVING


def _worker_stack(worker: WorkerEvidence) -> ThreadStack | None:
    return next((s for s in worker.stacks if s.main), worker.stacks[0] if worker.stacks else None)


def _loader_workers(rank_evidence: RankEvidence) -> list[WorkerEvidence]:
    """Return the living DataLoader workers, or all children if none is known to be a worker."""
    living = [w for w in rank_evidence.workers if not w.gone]
    loaders = [w for w in living if w.loader]
    return loaders or (living if waits_for_loader(rank_evidence.main_stack) else [])
